"""Policies: distributions over the catalog given a history."""
