"""Routed experts: where their records are, when they are read, and how a layer computes them."""
