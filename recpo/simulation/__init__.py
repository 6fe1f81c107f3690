"""A simulated world with known true preferences."""
