"""Reads each family's config.json: what its fields are called, and what its checkpoints do otherwise."""
