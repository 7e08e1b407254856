"""Distillation: a student that is trained by the outputs of a frozen teacher."""
