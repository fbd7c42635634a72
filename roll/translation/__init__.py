"""From the keys and commands of SkyRL and verl to this project's configuration (``roll translate``)."""
