"""The profiles that come with commsched, by name. Their times are computed from a FLOP model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from scheduler.ir.inputs import InputError
from scheduler.ir.profile import Layer, Profile


def names() -> list[str]:
    return sorted(MODELS)


def shipped(name: str) -> Profile:
    if name not in MODELS:
        raise InputError(f"there is no profile {name!r}; the shipped profiles are {', '.join(names())}")
    return MODELS[name]()


def find(text: str) -> Profile:
    """Return a profile by file (``.json``, or ``.txt`` for a graph.txt) or by shipped name."""
    path = Path(text)
    if path.suffix == ".txt":
        from scheduler.formats.pipedream import Graph

        return Graph.load(path).profile(path.stem)
    if path.suffix == ".json" or path.exists():
        return Profile.load(path)
    return shipped(text)


# -- the FLOP model ------------------------------------------------------------------------------------------

# Each operation takes the longer of its arithmetic at ``Device.flops`` and its memory traffic at
# ``Device.bandwidth``, plus one ``Device.launch``. The backward of a matrix product or convolution is an
# input gradient and a weight gradient, each as long as the forward (the first layer has no input gradient);
# that of anything else is as long as its forward. Activations, pooling and residual sums belong to the layer
# before them. Parameter bytes are those of the real architectures (fp32); a test holds their sums to the
# published counts.

FLOAT = 4


@dataclass(frozen=True)
class Device:
    """Sustained rates of an accelerator."""

    name: str
    flops: float
    bandwidth: float
    launch: float

    def seconds(self, flops: float, traffic: float) -> float:
        return max(flops / self.flops, traffic / self.bandwidth) + self.launch


V100 = Device("V100, fp32 at 50 % of 15.7 TFLOP/s, 75 % of 900 GB/s, 5 us per launch", 7.85e12, 6.75e11, 5e-6)


@dataclass
class LayerTable:
    """Collect the layers of a model in forward order. ``rows`` is the number of images or tokens per step."""

    device: Device = V100
    layers: list[Layer] = field(default_factory=list)

    def layer(
        self, name: str, parameters: int, flops: float, traffic: float, outputs: int, matrix: bool
    ) -> None:
        """``matrix``: the weight gradient is a separate product with the cost of the forward."""
        once = self.device.seconds(flops, traffic)
        first = not self.layers
        backward, weight = once if first or not matrix else 2 * once, once if matrix else 0.0
        sizes = parameters * FLOAT, outputs * FLOAT
        self.layers.append(Layer(name, once, backward, *sizes, weight_backward=weight))

    def extra(self, flops: float = 0.0, values: int = 0, backward: float = 1.0) -> None:
        """Add work without parameters (reading and writing ``values``) to the layer before it."""
        last = self.layers[-1]
        once = self.device.seconds(flops, 2 * values * FLOAT)
        self.layers[-1] = replace(
            last,
            forward=last.forward + once,
            backward=last.backward + backward * once,
            activation_bytes=last.activation_bytes + values * FLOAT,
        )

    def conv(
        self, name: str, inputs: int, outputs: int, kernel: int, side: int, batch: int, bias: bool = False
    ) -> None:
        """A square convolution whose output is ``side`` x ``side``."""
        weights = inputs * outputs * kernel * kernel
        values = batch * side * side
        traffic = FLOAT * (values * (inputs + outputs) + weights)
        count = weights + (outputs if bias else 0)
        self.layer(name, count, 2.0 * weights * values, traffic, values * outputs, matrix=True)

    def norm(self, name: str, width: int, rows: int) -> None:
        """A batch or layer norm: two passes over its input and one over its output."""
        values = rows * width
        self.layer(name, 2 * width, 8.0 * values, 3.0 * FLOAT * values, values, matrix=False)

    def linear(self, name: str, inputs: int, outputs: int, rows: int) -> None:
        weights = inputs * outputs
        traffic = FLOAT * (rows * (inputs + outputs) + weights)
        self.layer(name, weights + outputs, 2.0 * weights * rows, traffic, rows * outputs, matrix=True)

    def embedding(self, name: str, entries: int, width: int, rows: int) -> None:
        self.layer(name, entries * width, 0.0, 2.0 * FLOAT * rows * width, rows * width, matrix=False)

    def profile(self, name: str, work: str) -> Profile:
        source = f"FLOP model (scheduler/profiles.py): {work}; {self.device.name}; optimizer time not counted"
        return Profile(name, tuple(self.layers), 0.0, source)


def resnet50(batch: int = 64) -> Profile:
    table = LayerTable()

    def conv_norm(name: str, inputs: int, outputs: int, kernel: int, side: int, relu: bool = True) -> None:
        table.conv(f"{name}.conv", inputs, outputs, kernel, side, batch)
        table.norm(f"{name}.bn", outputs, batch * side * side)
        if relu:
            table.extra(values=batch * side * side * outputs)

    conv_norm("stem", 3, 64, 7, 112)
    table.extra(values=batch * 56 * 56 * 64)
    inputs = 64
    for stage, (blocks, width, side) in enumerate([(3, 64, 56), (4, 128, 28), (6, 256, 14), (3, 512, 7)], 1):
        for block in range(blocks):
            name = f"layer{stage}.{block}"
            # The first block of a later stage still sees the larger image in its first convolution.
            before = side * 2 if block == 0 and stage > 1 else side
            conv_norm(f"{name}.1", inputs, width, 1, before)
            conv_norm(f"{name}.2", width, width, 3, side)
            conv_norm(f"{name}.3", width, 4 * width, 1, side, relu=False)
            if block == 0:
                conv_norm(f"{name}.downsample", inputs, 4 * width, 1, side, relu=False)
            table.extra(values=2 * batch * side * side * 4 * width)
            inputs = 4 * width
    table.linear("fc", 2048, 1000, batch)
    return table.profile("resnet50", f"batch {batch}, 224 x 224")


def vgg16(batch: int = 64) -> Profile:
    table = LayerTable()
    inputs = 3
    for block, (count, width, side) in enumerate(
        [(2, 64, 224), (2, 128, 112), (3, 256, 56), (3, 512, 28), (3, 512, 14)], 1
    ):
        for number in range(1, count + 1):
            table.conv(f"conv{block}_{number}", inputs, width, 3, side, batch, bias=True)
            table.extra(values=batch * side * side * width)
            inputs = width
        table.extra(values=batch * side * side * width)
    for number, (fan_in, fan_out) in enumerate([(25088, 4096), (4096, 4096), (4096, 1000)], 6):
        table.linear(f"fc{number}", fan_in, fan_out, batch)
        table.extra(values=batch * fan_out)
    return table.profile("vgg16", f"batch {batch}, 224 x 224")


def densenet201(batch: int = 32) -> Profile:
    table = LayerTable()
    growth, bottleneck, channels, side = 32, 128, 64, 56
    table.conv("conv0", 3, channels, 7, 112, batch)
    table.norm("norm0", channels, batch * 112 * 112)
    table.extra(values=batch * 112 * 112 * channels)
    for block, count in enumerate((6, 12, 48, 32), 1):
        for number in range(1, count + 1):
            name, pixels = f"block{block}.{number}", batch * side * side
            table.norm(f"{name}.norm1", channels, pixels)
            table.extra(values=pixels * channels)
            table.conv(f"{name}.conv1", channels, bottleneck, 1, side, batch)
            table.norm(f"{name}.norm2", bottleneck, pixels)
            table.extra(values=pixels * bottleneck)
            table.conv(f"{name}.conv2", bottleneck, growth, 3, side, batch)
            channels += growth
        if block < 4:
            table.norm(f"transition{block}.norm", channels, batch * side * side)
            table.conv(f"transition{block}.conv", channels, channels // 2, 1, side, batch)
            table.extra(values=batch * side * side * channels // 2)
            channels, side = channels // 2, side // 2
    table.norm("norm5", channels, batch * side * side)
    table.extra(values=batch * side * side * channels)
    table.linear("classifier", channels, 1000, batch)
    return table.profile("densenet201", f"batch {batch}, 224 x 224")


def bert_base(batch: int = 32, length: int = 128) -> Profile:
    table = LayerTable()
    width, rows = 768, batch * length
    table.embedding("embeddings.word", 30522, width, rows)
    table.embedding("embeddings.position", 512, width, rows)
    table.embedding("embeddings.token_type", 2, width, rows)
    table.norm("embeddings.norm", width, rows)
    for number in range(12):
        name = f"layer{number}"
        for part in ("query", "key", "value"):
            table.linear(f"{name}.{part}", width, width, rows)
        _attention(table, batch, length, width, heads=12)
        table.linear(f"{name}.attention_output", width, width, rows)
        table.norm(f"{name}.norm1", width, rows)
        table.linear(f"{name}.intermediate", width, 4 * width, rows)
        table.extra(values=rows * 4 * width)
        table.linear(f"{name}.output", 4 * width, width, rows)
        table.norm(f"{name}.norm2", width, rows)
    table.linear("pooler", width, width, batch)
    return table.profile("bert_base", f"batch {batch}, {length} tokens")


def gpt2(batch: int = 8, length: int = 512) -> Profile:
    table = LayerTable()
    width, rows, words = 768, batch * length, 50257
    table.embedding("wte", words, width, rows)
    table.embedding("wpe", 1024, width, rows)
    for number in range(12):
        name = f"h{number}"
        table.norm(f"{name}.ln_1", width, rows)
        table.linear(f"{name}.attn.c_attn", width, 3 * width, rows)
        _attention(table, batch, length, width, heads=12)
        table.linear(f"{name}.attn.c_proj", width, width, rows)
        table.norm(f"{name}.ln_2", width, rows)
        table.linear(f"{name}.mlp.c_fc", width, 4 * width, rows)
        table.extra(values=rows * 4 * width)
        table.linear(f"{name}.mlp.c_proj", 4 * width, width, rows)
    table.norm("ln_f", width, rows)
    # The head shares wte's weights, whose gradient is complete only when the embedding's backward is: no
    # bytes of its own.
    flops, traffic = 2.0 * rows * width * words, FLOAT * rows * (width + words)
    table.layer("lm_head (weights of wte)", 0, flops, traffic, rows * words, matrix=True)
    return table.profile("gpt2", f"batch {batch}, {length} tokens")


def _attention(table: LayerTable, batch: int, length: int, width: int, heads: int) -> None:
    """Scores, softmax and the weighted sum; each product has two in the backward."""
    scores = batch * heads * length * length
    table.extra(flops=2 * 2.0 * batch * length * length * width, values=2 * scores, backward=2.0)


MODELS = {make.__name__: make for make in (resnet50, vgg16, bert_base, gpt2, densenet201)}
