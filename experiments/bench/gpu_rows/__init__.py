"""Rows of `gpu.py`: parity checks and measurements on one NVIDIA GPU."""
