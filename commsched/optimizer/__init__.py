"""The distributed optimizer: from autograd's hook to the updated parameter.

In the order in which a gradient passes: ``hooks`` (autograd and forward), ``reducer`` (into the bucket),
``commsched.backends`` (between the ranks), ``arrivals`` (out of the bucket), ``gather_gradients`` or
``gather_parameters`` (the step on whole gradients or on shards), ``deferred_updates`` and ``shards`` (the
wrapped optimizer, bucket by bucket), ``pending`` (nobody reads a value that has not arrived). ``planning``
agrees on a program, ``drift`` says when to plan again, ``driver`` holds all of these. ``wrapper`` has the
methods of the wrapped optimizer; ``unplanned`` reduces without buckets.
"""
