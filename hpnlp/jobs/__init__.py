"""What is neither a loop nor a command: uses of trained models, served exports, and the supervisor of processes."""
