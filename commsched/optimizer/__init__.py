"""The distributed optimizer: from autograd's hook to the updated parameter.

The way of a gradient, file by file::

    hooks                   autograd has accumulated it; ``compiled_graphs``: hooks inside compiled models
    round                   which backward it belongs to; put it into its slot, send the buckets that are full
    gradient                all state of this one parameter; how it is written: dense, rows, blocks, two parts
    commsched.backends      reduce-scatter and all-gather between the ranks
    pending                 whoever reads the parameter, or ``p.grad``, waits for it
    round                   wait for its buckets, show the sum as ``p.grad``
    whole_step              the update of every parameter on every rank, in ``step()`` or when the sums arrive
    sharded_step            or the update of this rank's shards; then the parameters are gathered

``session`` owns the round, the hooks and the plans of one optimizer, and decides when to measure and to plan.
``planner`` agrees on a program with the other ranks, from times that ``measuring`` took. ``model_layers``
maps parameters to the scheduler's layers, ``buckets`` places them in flat buffers, and ``row_traffic``
decides which embeddings travel by rows. ``reports`` tells the user what it costs.

``distributed`` has ``DistributedOptimizer``, ``options`` checks its arguments, and ``wrapper`` has the
methods of the wrapped optimizer.

Special cases: ``joining`` (ranks that have run out of data), ``master_weights`` (float32 weights of
half-precision shards), ``whole_matrix`` (each parameter is updated by one rank), and ``unplanned`` (gradients
are reduced one by one, without buckets).
"""
