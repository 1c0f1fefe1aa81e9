"""Prompts and answers: what is computed for a text, in which order, and how tokens are chosen."""
