"""Bundles: export, load, recommend."""
