"""Language models with neighbours from their training text."""
