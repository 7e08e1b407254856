"""Version of the package; a module of its own, so that modules below the trainer may read it."""

__version__ = "0.1.0"
