"""Techniques that make a model faster or smaller: what each changes, what it needs, and the measured choice among them."""

from hpnlp.advise.advice import Advice, AdviseSettings, Finding
from hpnlp.advise.functions import FunctionAdvice, advise_function
from hpnlp.advise.search import advise
from hpnlp.advise.technique import Goal, Needs, Technique
from hpnlp.advise.techniques import techniques
from hpnlp.advise.verify import verify

__all__ = [
    "Advice", "AdviseSettings", "Finding", "FunctionAdvice", "Goal", "Needs", "Technique", "advise", "advise_function",
    "techniques", "verify",
]  # fmt: skip
