"""The decoder: modules with parameters, and their wiring."""
