"""The DPO pipeline: learning from pairs of responses, of which one is preferred."""
