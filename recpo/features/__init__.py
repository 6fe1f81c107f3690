"""Features of items, users and requests: typed features, their codes, and the tables of items and users."""
