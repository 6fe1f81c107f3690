"""Codes for items: item vectors, residual k-means, unique code tuples, and a report."""
