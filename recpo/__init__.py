"""recpo: preference optimization for recommender systems, from a Parquet log to served recommendations."""

__version__ = "0.1.0"
