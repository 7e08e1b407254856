"""Checks of files of examples: all faults of a file, and guesses of the fields that it holds."""
