"""Training steps whose batches come from two data loading workers that compute."""
