"""Training: the loop, the step, optimizers, checkpoints and metrics.

Importing this package makes glibc keep the memory that the process frees: see `allocator`.
"""

from hpnlp.training.processes.allocator import keep_freed_memory

keep_freed_memory()
