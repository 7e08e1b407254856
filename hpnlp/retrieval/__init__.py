"""Retrieval: indexes of vectors for maximum inner product search."""

from hpnlp.retrieval.index import Index

__all__ = ["Index"]
