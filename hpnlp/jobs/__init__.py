"""Uses of trained models: predictions and served exports."""
