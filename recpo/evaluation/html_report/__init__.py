"""The report of an evaluation: one HTML file that stands alone."""
