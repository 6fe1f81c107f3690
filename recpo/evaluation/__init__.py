"""Offline evaluation of rankings."""

import lazy_loader

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["off_policy"])
