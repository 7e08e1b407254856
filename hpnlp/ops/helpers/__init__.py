"""Helpers of operations: arrays of numpy and jax, random numbers by position, and custom VJPs."""
