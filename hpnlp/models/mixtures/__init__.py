"""Mixtures of the predictions of a model with those of another model, or of its own recent states."""
