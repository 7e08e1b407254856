"""Jobs that commands run: uses of trained models, served exports, and the supervisor of processes."""
