"""Horovod's collectives in PyTorch, carried by Horovod itself or by torch.distributed.

job                  init and shutdown, ranks, process sets
operations           allreduce, allgather and the others, on tensors and on Python objects
compression          the choices for ``compression=``
joins                ``join()``
model_state          give all ranks one rank's parameters and optimizer state
sync_batch_norm      batch normalisation over all ranks' batches

carrier              the interface of the two carriers, and the one that runs
horovod_carrier      Horovod itself
torch_carrier        channels of messages and NCCL

private_groups       connections between ranks for the optimizer's and pipelines' own traffic
"""
