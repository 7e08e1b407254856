"""Starts of runs: from nothing, from other runs and their weights, and with teachers."""
