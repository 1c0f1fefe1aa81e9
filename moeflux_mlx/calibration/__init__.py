"""Runs a model over texts one layer at a time, and collects statistics of what its matrices multiply."""
