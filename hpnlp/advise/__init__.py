"""Techniques that make a model faster or smaller: what each changes, what it needs, and what it can gain at most."""

from hpnlp.advise.technique import Goal, Needs, Technique
from hpnlp.advise.techniques import techniques

__all__ = ["Goal", "Needs", "Technique", "techniques"]
