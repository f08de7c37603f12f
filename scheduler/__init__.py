"""commsched's scheduler: profiles in, programs out. Pure: no torch, no processes, no clocks."""
