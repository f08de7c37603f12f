"""Horovod's collectives over torch.distributed or over Horovod: negotiation, execution, process sets.

For the other parts of commsched: ``private_groups.data_group`` (groups of their own), ``control`` (objects
between ranks), ``state.engine()`` (the running engine).
"""
