"""Lists as they are served: explored with exact propensities, re-ranked to be diverse, capped or calibrated."""
