"""Collectives over torch and commsched's channels alone, without Horovod.

carrier              accepts an operation and checks its arguments
operation_queue      submits it, and runs it when all ranks have
coordinator          rank 0 collects every rank's requests and decides the order in which all run them
algorithms           how each collective is computed
"""
