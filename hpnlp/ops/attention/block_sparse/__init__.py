"""The block-sparse executor of attention: which tiles are active, in which order they run, and the tiles' arithmetic."""
