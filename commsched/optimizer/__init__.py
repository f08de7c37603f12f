"""The distributed optimizer: from autograd's hook to the updated parameter.

A gradient passes ``hooks`` (autograd and forward), ``reducer`` and ``filling`` (into the bucket),
``commsched.backends`` (between the ranks), ``arrivals`` (out of the bucket), ``gather_gradients`` or
``gather_parameters`` (the step on whole gradients or on shards), ``deferred_updates`` and ``shards`` (the
wrapped optimizer, bucket by bucket), and ``pending`` (completes values before they are read). Of weights that
are ``tied_weights``, a part comes first, and ``corrections`` follow.

``planning`` agrees on a program, ``drift`` decides when to plan again, ``driver`` owns all of these.
``wrapper`` has the methods of the wrapped optimizer; ``unplanned`` reduces without buckets.
"""
