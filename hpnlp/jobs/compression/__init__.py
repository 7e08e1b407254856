"""Compression of a run in stages, each measured before and after."""
