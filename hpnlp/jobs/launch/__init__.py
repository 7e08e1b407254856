"""A supervisor of the processes of one machine, and manifests for the engines that own several. JAX is not imported."""
