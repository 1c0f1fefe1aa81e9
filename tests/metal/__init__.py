"""Runs the Metal source that MLX generates on this machine's CPU, with SIMT semantics and checks (see README.md)."""
