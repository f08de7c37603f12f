"""A modelled network under real compute: one device, links that take time. Every figure is EMULATED."""
