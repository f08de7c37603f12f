"""Collectives over torch.distributed alone, without Horovod.

Rank 0's coordinator collects every rank's requests and decides the order in which all ranks run them.
"""
