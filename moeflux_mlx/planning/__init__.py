"""Plans of memory: what this machine has, what a model needs, and how both are divided."""
