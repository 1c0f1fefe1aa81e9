"""Attention to latents: keys and values of all heads are projections of one vector for each position."""
