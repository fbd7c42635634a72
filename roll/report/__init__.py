"""What came of a run: one HTML file to look at, and a diagnosis. Nothing here imports torch or ray."""
