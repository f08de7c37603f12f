"""Carriers of buckets: ``cpu`` the C++ engine over ``transports``, ``cuda`` streams and NCCL."""
