"""``roll translate``: keys, commands and scripts of verl and SkyRL as this project's configuration."""
