"""Convolutions over sequences and images."""
