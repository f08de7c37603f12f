"""A gradient's way through commsched: from autograd into a bucket, over the wire, into the updated parameter.

In the order in which data passes: ``hooks`` (autograd and forward), ``layout`` (buckets as views of flat
buffers), ``rounds`` (one reduction of all buckets by the engine), ``pending`` (nobody reads a value that is
not there yet), ``updates`` (the wrapped optimizer, bucket by bucket), ``planning`` (which program, agreed by
all ranks).
"""
