"""From an interaction log to batches."""
