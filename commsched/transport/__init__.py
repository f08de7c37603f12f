"""Point-to-point messages between ranks, for pipelines and spatial tiles."""
