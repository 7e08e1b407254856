"""Optimizers beyond optax, updates of the parameters, and the sharding of their state."""
