"""Retrieval: indexes over vectors, built, saved and searched."""

from hpnlp.retrieval.index import Index

__all__ = ["Index"]
