"""FLOPs of a program, and the parts of a model by which they are divided."""
