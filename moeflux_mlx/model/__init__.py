"""The decoder: parameters and wiring."""
