"""Training: the loop, the step, optimizers, checkpoints, metrics, decoding."""
