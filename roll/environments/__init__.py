"""Text environments: games and tools that a policy acts in, their registry and adapters for other libraries'."""
