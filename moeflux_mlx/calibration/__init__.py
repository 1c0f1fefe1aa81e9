"""Runs a model over texts one layer at a time, and rounds its matrices for what they multiply."""
