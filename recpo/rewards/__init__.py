"""Rewards of candidates, logged or generated, and the factor models of feedback behind them."""
