"""Pages to look at: users, items and policies side by side, made on a server of this machine or into one file."""
