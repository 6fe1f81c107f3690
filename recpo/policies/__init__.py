"""Policies: distributions over the catalogue given a history."""
