"""Interfaces between the modules of a model, its trainer and its layout on devices."""
