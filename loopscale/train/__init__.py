"""The training step, the run around it, and what it tells the world."""
