"""The one Lightning module and what surrounds it."""
