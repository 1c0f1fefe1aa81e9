"""Attention whose heads of queries share heads of keys and values, by all positions, a window or chosen blocks."""
