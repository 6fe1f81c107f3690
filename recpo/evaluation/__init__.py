"""Offline evaluation of rankings."""

from typing import Final

import lazy_loader

#: 97.5 % quantile of the standard normal distribution. Here because a server, which needs it, has no torch to import.
Z95: Final = 1.959963984540054

__getattr__, __dir__, _ = lazy_loader.attach(__name__, submodules=["off_policy"])
