"""Messages from rank to rank, for pipelines and tiles."""
