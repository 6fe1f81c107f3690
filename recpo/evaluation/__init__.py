"""Offline evaluation of rankings."""
