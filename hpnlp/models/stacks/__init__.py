"""Stacks of the layers of a model, which take several forms in turn."""
