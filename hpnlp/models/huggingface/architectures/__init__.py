"""Architectures of Hugging Face checkpoints, and the names of their weights."""
