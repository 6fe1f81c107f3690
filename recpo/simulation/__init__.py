"""A simulated world whose true preferences are known."""
