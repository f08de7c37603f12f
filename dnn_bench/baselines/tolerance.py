"""How far the first steps may be from single-process training (relative to how far a tensor has moved)."""

TOLERANCE = 1e-3
