"""Softmaxes over a structured vocabulary: clusters, classes, trees and codes."""
