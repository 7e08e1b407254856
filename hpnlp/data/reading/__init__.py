"""From files to documents: paths, decompression, records, splits, and the cache of tokens."""
