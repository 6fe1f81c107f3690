"""Small pure functions on tensors: reductions, divergences, surrogates, the catalog head, sampling."""
