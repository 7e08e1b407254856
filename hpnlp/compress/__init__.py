"""Compression of models: other representations of their matrices, and fewer of them."""
