"""Runs baselines side by side and measures them."""
