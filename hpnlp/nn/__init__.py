"""Thin Flax modules: parameters, logical axis names, and calls to ops."""
