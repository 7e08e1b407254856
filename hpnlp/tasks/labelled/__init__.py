"""Tasks on labelled examples."""
