"""Compression of models. The storage formats need numpy only."""
