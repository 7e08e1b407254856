"""Where the time of a training step or of a forward pass goes, by part of the model."""
