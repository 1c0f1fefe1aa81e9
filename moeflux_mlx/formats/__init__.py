"""File formats: packed experts, checkpoints, the Hub."""
