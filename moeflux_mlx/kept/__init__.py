"""What is kept on the disk between sessions, beside the model."""
