"""Process groups, the ring of stages, and the optimizer state divided over ranks."""
