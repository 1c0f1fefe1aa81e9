"""Puts a model together from its parts, and runs it: memory, loading, sessions, generation."""
