"""Compression of models: other representations of their matrices, fewer of them, and compact files."""
