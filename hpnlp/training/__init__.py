"""Training and decoding: the loop, the step, optimizers, checkpoints, metrics.

Importing this package tells the C library to keep the memory that the process frees: see `allocator`.
"""

from hpnlp.training.allocator import keep_freed_memory

keep_freed_memory()
