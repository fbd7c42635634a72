"""The SFT pipeline: supervised learning from demonstrations, on the same strategies as RLVR."""
