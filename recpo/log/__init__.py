"""From an interaction log to prepared data."""
