"""Names for roll's configurations; pyproject.toml says which."""
