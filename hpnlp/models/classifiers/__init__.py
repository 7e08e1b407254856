"""Classifiers of texts, trees and bags of paths without a transformer."""
