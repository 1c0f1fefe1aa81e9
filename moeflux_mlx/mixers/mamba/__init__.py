"""Mamba-2, a state space model: a state for each head that decays and takes up every token."""
