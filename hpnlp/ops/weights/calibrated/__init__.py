"""Matrices rounded or pruned with the second moments of their inputs."""
