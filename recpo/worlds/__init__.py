"""Simulated worlds with known true preferences."""
