"""Pure functions on arrays: no modules, no meshes, no configs. Every fast one has a slow, obvious twin."""
