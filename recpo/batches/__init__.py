"""From prepared data to batches of slates."""
