"""Bodies and decoders that several models share."""
