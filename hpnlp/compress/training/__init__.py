"""Techniques of training with quantized, pruned or penalised weights."""
