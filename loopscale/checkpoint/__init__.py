"""Checkpoints that do not know the layout: global names and shapes, committed atomically, verified on load."""
