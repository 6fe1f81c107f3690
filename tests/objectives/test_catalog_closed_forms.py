"""MPO, the catalog policy gradient, KTO and weighted likelihood in small numbers: metrics, masks, defaults, bounds."""
