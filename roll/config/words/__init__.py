"""Words of other projects, and the keys of ours that have the same effect."""
