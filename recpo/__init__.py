"""recpo: preference optimization for recommender systems, from an interaction log to served recommendations.

Functions take typed objects, paths, or frames (pandas, polars, pyarrow) and return objects; they print nothing. Names
are imported when they are first used, so ``import recpo`` itself loads neither torch nor pandas.
"""

import os

import lazy_loader

__version__ = "0.1.0"

# Threads of torch that wait for each other spin unless this is set before torch is loaded. Where other processes use
# the same cores, training then takes four times as long (docs/training.md). Your own setting counts.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__getattr__, __dir__, _names = lazy_loader.attach_stub(__name__, __file__)  # the names are in __init__.pyi
__all__ = sorted([*_names, "__version__"])
