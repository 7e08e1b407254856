"""Reports of tasks: scores of held-out data, tables and examples."""
