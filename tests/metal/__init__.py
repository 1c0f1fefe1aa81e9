"""Runs the Metal text that MLX generates on this machine's CPU, with SIMT semantics and checks. See README.md."""
