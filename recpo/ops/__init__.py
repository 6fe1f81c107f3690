"""Small pure functions on tensors: reductions, divergences, surrogates, the catalogue head, sampling."""
