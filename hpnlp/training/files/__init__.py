"""Files of a run: checkpoints, metrics and scores, which stay whole when a run is killed."""
