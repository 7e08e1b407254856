"""Conversion of checkpoints in the Hugging Face layout, in both directions."""
