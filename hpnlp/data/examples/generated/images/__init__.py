"""Images that are drawn: digits, and pairs of points with or without a path."""
