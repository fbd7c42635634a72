"""The RLVR pipeline: reinforcement learning from verifiable rewards."""
