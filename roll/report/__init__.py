"""Report and diagnosis of a run: one HTML file to look at, and findings. Nothing here imports torch or ray."""
