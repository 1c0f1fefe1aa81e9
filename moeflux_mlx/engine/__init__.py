"""Assembles a model from its parts and runs it: memory plans, loading, sessions, generation."""
