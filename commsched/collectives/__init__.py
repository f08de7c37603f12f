"""Horovod's collectives in PyTorch, carried by Horovod itself or by torch.distributed.

The API: ``initialization`` (init, rank, size), ``reductions``, ``data_movement``, ``handles`` (poll,
synchronize, join, barrier), ``process_sets``, ``objects``, ``model_state``, ``sync_batch_norm``,
``compression``; ``autograd`` computes the gradients. Below it, ``carrier.Carrier`` is the interface of
``horovod_carrier`` and ``torch_carrier``.

Other parts of commsched also use ``current_carrier`` (the running carrier) and ``private_groups``
(connections between ranks for their own traffic).
"""
