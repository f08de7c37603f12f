"""The optimizer's way on devices with streams: every operation is put on a stream, and the host goes on.

``device`` (streams and events), ``stream_plan`` (the plan's order, in-stream), ``wire`` (buckets and flags),
``flow`` (gradients into buckets), ``path`` (when all this is used). ``docs/gpu.md`` tells the whole.
"""
