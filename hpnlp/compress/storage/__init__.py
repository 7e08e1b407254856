"""Encodings of arrays in files of compressed weights."""
