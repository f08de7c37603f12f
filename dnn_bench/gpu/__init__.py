"""The figures of ``docs/gpu.md``: kernels, steps with one worker, host cost, memory, emulated networks."""
