"""Positions in attention: rotary embeddings, and relative positions as biases."""
