"""Attention to memories of earlier tokens: by relative positions, and compressed."""
