"""The distributed optimizer: from autograd's hook to the updated parameter.

A gradient passes ``hooks`` (autograd and forward), ``reducer`` and ``filling`` (into the bucket),
``commsched.backends`` (between the ranks), ``arrivals`` (out of the bucket), ``gather_gradients`` or
``gather_parameters`` (the step on whole gradients or on shards), ``deferred_updates`` and ``shards`` (the
wrapped optimizer, bucket by bucket), and ``pending`` (completes values before they are read). Of weights that
are ``tied_weights``, a part comes first, and ``corrections`` follow.

``options`` checks the arguments, ``measuring`` times layers and steps, ``planner`` agrees on a program, and
``reports`` tells the user what it costs. ``driver`` owns all of these and decides when to plan again.
``wrapper`` has the methods of the wrapped optimizer; ``unplanned`` reduces without buckets.
"""
