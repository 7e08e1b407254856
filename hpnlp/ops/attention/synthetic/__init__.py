"""Attention whose scores are not products of queries and keys: Synthesizers."""
