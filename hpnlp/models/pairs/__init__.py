"""Models that compare texts: dual encoders, their losses, and a language model that retrieves documents."""
