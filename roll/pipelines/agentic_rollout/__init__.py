"""Episodes without training: models and checkpoints play the environments of an agentic file, and are compared."""
