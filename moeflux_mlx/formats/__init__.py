"""Files as they lie on disk: packed experts, checkpoints, the Hub."""
