"""How a computation is laid out on a mesh; knows array names, not models."""
