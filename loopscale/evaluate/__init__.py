"""How good a model is, at every depth."""
