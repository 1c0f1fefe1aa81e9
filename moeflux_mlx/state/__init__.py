"""What a model remembers between calls, in memory and in files."""
