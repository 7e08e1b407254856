"""From files to records: paths, decompression, JSON, splits, and the cache of tokens."""
