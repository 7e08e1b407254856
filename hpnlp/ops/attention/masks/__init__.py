"""Static attention patterns: the mask algebra, the patterns, those of papers, and the table of all of them."""
