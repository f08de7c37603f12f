"""What moves an optimizer's buckets between the ranks: one ``interface``, two implementations.

``cpu`` is the C++ engine over one of ``transports``, ``cuda`` streams and NCCL; ``choice`` picks one of them.
"""
