"""Static attention patterns: the mask algebra, elementary patterns, patterns of papers, and the table of all patterns."""
