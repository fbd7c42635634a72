"""``roll translate``: keys, commands and scripts of verl, SkyRL, TRL and OpenRLHF as this project's configuration."""
