"""Everything ``docs/gpu.md`` has figures for, in one command: kernels, steps with one worker, host
cost, memory.
"""
