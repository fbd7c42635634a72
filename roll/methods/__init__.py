"""Algorithms: one module each, with what its models minimise and what it asks of other models."""
