"""What is known of items, users and requests beside their ids: typed features, their codes, and the tables of both."""
