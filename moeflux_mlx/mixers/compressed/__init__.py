"""Attention to a window and to entries, each made of several positions before it."""
