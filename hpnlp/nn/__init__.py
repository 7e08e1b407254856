"""Flax modules: parameters with logical axis names, and calls to ops. They contain no other computations."""
