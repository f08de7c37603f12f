"""What ``commsched.huggingface`` and ``commsched.lightning`` share; needs neither library.

``replica`` keeps the ranks' copies of a model equal, ``optimizers`` checks the arguments of
``DistributedOptimizer`` and accumulates gradients without reducing them.
"""
