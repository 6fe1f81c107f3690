"""The objectives: one file each."""
