"""Beam search, and weights laid out for decoding."""
