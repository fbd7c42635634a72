"""Training and forward passes: the modules that the backends share."""
