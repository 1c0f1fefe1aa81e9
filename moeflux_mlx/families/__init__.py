"""Reads each family's config.json: the names of its fields, and the peculiarities of its checkpoints."""
