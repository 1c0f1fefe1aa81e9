"""Makes packed models from checkpoints."""
