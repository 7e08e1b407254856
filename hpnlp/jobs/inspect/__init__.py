"""A look inside of a trained model: its attention matrices, and its loss by the length of the context."""
