"""The distributed optimizer: from autograd's hook to the updated parameter.

In the order in which a gradient passes: ``hooks`` (autograd and forward), ``arrivals`` and ``reducer``
(buckets fill and travel), ``backend_choice`` (what moves them), ``pending`` (nobody reads a value that has
not arrived), ``deferred_updates`` and ``shards`` (the wrapped optimizer, bucket by bucket), ``planning``
(which program, agreed by all ranks), ``drift`` (when to plan again). ``wrapper`` has the methods that a
wrapped optimizer gains; ``unplanned`` serves optimizers that no plan can serve.
"""
