"""A modelled network under real compute: one device, the optimizer's own machinery, links that take time.

Every figure from here is EMULATED: one process computes, and each reduce-scatter or all-gather keeps the
communication stream busy for as long as a link of so many ranks would.
"""
