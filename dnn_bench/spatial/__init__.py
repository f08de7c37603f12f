"""Benchmarks of spatial parallelism: trainings with MPI4DL's options, and the halo exchange by itself."""
