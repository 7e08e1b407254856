"""Processes of a run: their number and devices, signals, and the progress that they report."""
