"""Agents: conversations as token ids, tools, and the episodes that they leave for training."""
