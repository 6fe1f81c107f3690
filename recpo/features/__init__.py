"""Features of items, users and requests: typed features, their codes, and feature tables of items and users."""
