"""Pipelines measured: throughput, bubbles, and torch's own beside them."""
