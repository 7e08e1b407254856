"""Forms of scaling laws, and the fits of their constants."""
