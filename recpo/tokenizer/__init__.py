"""Item -> codes: item vectors, residual k-means, a pass that makes every code tuple unique, a report."""
