"""Cost of a program from its jaxpr."""
