"""Attention kernels of accelerators: cuDNN, Pallas on Hopper GPUs, splash attention on TPUs."""
