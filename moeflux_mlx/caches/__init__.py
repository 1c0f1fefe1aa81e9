"""What caches of layers are made of, whichever mixer they serve."""
