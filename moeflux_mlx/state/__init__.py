"""The state of a model between calls, in memory and in files."""
