"""The evaluation pipeline: models and checkpoints answer the validation prompts of an RLVR file, and are compared."""
