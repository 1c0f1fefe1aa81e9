"""Programs over an engine: what a model loses, whether a machine is well, which tiles and pool sizes suit it."""
