"""Using a trained model: forward at any depth, text, early exit."""
