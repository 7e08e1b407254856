"""Masks as parts whose tokens are permuted, and the cost by which a part is chosen."""
