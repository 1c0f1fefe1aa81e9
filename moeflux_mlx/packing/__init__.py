"""Makes packed models of checkpoints."""
