"""Reinforcement-learning post-training of language models, driven by YAML."""

__version__ = "0.1.0"
