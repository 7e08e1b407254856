"""hpnlp: techniques of high-performance NLP in JAX, side by side, correct, composable and measured."""

__version__ = "0.1.0"
