"""The distributed optimizer: from autograd's hook to the updated parameter.

The way of a gradient, file by file::

    hooks                   autograd has accumulated it, also inside compiled models
    round                   which backward it belongs to; put it into its slot, send the buckets that are full
    gradient                all state of this one parameter; how it is written: dense, rows, blocks, two parts
    commsched.backends      reduce-scatter and all-gather between the ranks
    pending                 whoever reads the parameter, or ``p.grad``, waits for it
    round                   wait for its buckets, show the sum as ``p.grad``
    whole_step              the update of every parameter on every rank, in ``step()`` or when the sums arrive
    sharded_step            or the update of this rank's shards; then the parameters are gathered

``session`` owns the round, the hooks and the plans of one optimizer, and decides when to measure and to plan.
It also has the part of a rank that has run out of data (``Joining``). ``planner`` agrees on a program with
the other ranks, from times that ``measuring`` took, and ``buckets`` places the parameters in flat buffers.
``reports`` tells the user what it costs.

``distributed`` has ``DistributedOptimizer`` and checks its arguments. ``wrapper`` has the methods of the
wrapped optimizer, and reduces gradients one by one where buckets cannot carry them (``Unplanned``).
"""
