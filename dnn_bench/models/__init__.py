"""The benchmark's models: real architectures, small ones of the same shape, and those of libraries.

>>> from dnn_bench import models
>>> model = models.build("resnet50")
>>> inputs, targets = models.sample_batch("resnet50", batch_size=8)
>>> models.loss("resnet50", model(inputs), targets).backward()

Importing this package does not import torch, so that a command line can list the names at once.
"""

from dnn_bench.models.libraries import FORMS
from dnn_bench.models.registry import HEADS, build, loss, names, sample_batch, spec, spelt, unit, with_head

__all__ = ["FORMS", "HEADS", "build", "loss", "names", "sample_batch", "spec", "spelt", "unit", "with_head"]
