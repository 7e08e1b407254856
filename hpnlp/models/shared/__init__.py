"""Bodies, decoders and ranges of sizes that several models share."""
