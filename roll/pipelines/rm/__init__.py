"""The rm pipeline: reward models learnt from judged responses."""
