"""A GPT-2 trained as such models are: clipped, no weight decay for vectors, bfloat16 with float32 masters.

Hugging Face's where it is installed, else the one of dnn_bench.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from commsched.pipeline import Pipeline
from commsched.pipeline.rows import border
from dnn_bench.models import build
from tests.support.cases import Me, case, main

MESHES = {2: [(2, 1)], 4: [(2, 2), (4, 1)]}
STEPS, ROWS, PARTS, TOKENS, VOCABULARY = 10, 8, 4, 32, 256
LARGEST_NORM = 0.5  # below that of every step, so that all are clipped
NEAR = 1e-5


def language_model() -> nn.Module:
    torch.manual_seed(0)
    if find_spec("transformers") is None:
        return build("gpt2_tiny", vocab_size=VOCABULARY, dim=64, depth=4, heads=4, dropout=0.0)
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": VOCABULARY, "n_positions": TOKENS, "n_embd": 64, "n_layer": 4, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    last = {"bos_token_id": VOCABULARY - 1, "eos_token_id": VOCABULARY - 1}
    return GPT2LMHeadModel(GPT2Config(**sizes, **dropout, **last, use_cache=False))


def loss_of(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def texts() -> list[tuple[Tensor, Tensor]]:
    dice = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, VOCABULARY, (STEPS, ROWS, TOKENS + 1), generator=dice)
    return [(text[:, :-1], text[:, 1:]) for text in tokens]


def grouped(params: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    matrices, vectors = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=1e-3)


def piped(model: nn.Module, mesh: tuple[int, int], **options: Any) -> list[float]:
    data = texts()
    pipeline = Pipeline(
        copy.deepcopy(model), "1f1b", PARTS, mesh, loss=loss_of, optimizer=grouped, max_norm=LARGEST_NORM,
        bucket_bytes=50_000, example=data[0][0], **options,
    )  # fmt: skip
    losses = [pipeline.step(batch) for batch in data]
    pipeline.close()
    return losses


def backward(model: nn.Module, batch: tuple[Tensor, Tensor], part: int, replica: int, of: int) -> float:
    """The backward of the rows that a replica has of a micro-batch; their part of the step's loss."""
    first, end = border(part, ROWS, PARTS), border(part + 1, ROWS, PARTS)
    rows = slice(*(first + border(n, end - first, of) for n in (replica, replica + 1)))
    loss = loss_of(model(batch[0][rows]), batch[1][rows]) * ((rows.stop - rows.start) / ROWS)
    loss.backward()
    return loss.item()


def in_one_process(model: nn.Module) -> list[float]:
    """What a script does that knows of no stages."""
    model = copy.deepcopy(model)
    optimizer, losses = grouped(list(model.parameters())), []
    for batch in texts():
        optimizer.zero_grad()
        losses.append(sum(backward(model, batch, part, 0, 1) for part in range(PARTS)))
        assert nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM) > LARGEST_NORM
        optimizer.step()
    return losses


class WithMasters:
    """One process with float32 masters. Gradients are added up in float32 and in the order of a pipeline:
    each replica's micro-batches, then the replicas, then the uses of a tied weight. The norm is float64.

    A script that rounds elsewhere gets other bits of some bfloat16 weights, and from then on its losses
    differ by about 1e-4: the forward rounds to three digits and is as far from exact itself.
    """

    def __init__(self, model: nn.Module, replicas: int) -> None:
        self.model, self.replicas = copy.deepcopy(model), replicas
        masters = {p: nn.Parameter(p.detach().float()) for p in self.model.parameters()}
        self.masters = list(masters.values())
        self.optimizer = grouped(self.masters)
        self.uses: list[tuple[nn.Parameter, nn.Parameter]] = []
        for module in self.model.modules():
            for name, p in module._parameters.items():
                if p is not None:
                    use = nn.Parameter(p.detach().clone())
                    module._parameters[name] = use
                    self.uses.append((use, masters[p]))

    def step(self, batch: tuple[Tensor, Tensor]) -> float:
        loss = 0.0
        sums = [{use: torch.zeros_like(master) for use, master in self.uses} for _ in range(self.replicas)]
        for replica, its in enumerate(sums):
            for part in range(PARTS):
                loss += backward(self.model, batch, part, replica, self.replicas)
                for use in its:
                    its[use] += use.grad
                    use.grad = None
        self.optimizer.zero_grad()
        for use, master in self.uses:
            for its in sums:
                master.grad = its[use] if master.grad is None else master.grad + its[use]
        norm = nn.utils.get_total_norm([master.grad.double() for master in self.masters])
        assert norm > LARGEST_NORM
        nn.utils.clip_grads_with_norm_(self.masters, LARGEST_NORM, norm)
        self.optimizer.step()
        with torch.no_grad():
            for use, master in self.uses:
                use.copy_(master)
        return loss


def compare(me: Me, losses: list[float], wanted: list[float], mesh: tuple[int, int]) -> None:
    assert len(set(me.everybody(str(losses)))) == 1
    differences = [abs(mine - its) for mine, its in zip(losses, wanted, strict=True)]
    print(f"{mesh=}: losses differ by at most {max(differences)}")
    assert max(differences) <= NEAR, (mesh, losses, wanted)


@case(ranks=(2, 4))
def bfloat16_with_masters_is_one_process(me: Me) -> None:
    model = language_model().bfloat16()
    for mesh in MESHES[me.size]:
        reference = WithMasters(model, mesh[1])
        wanted = [reference.step(batch) for batch in texts()]
        compare(me, piped(model, mesh, master_weights=True), wanted, mesh)


@case(ranks=(2, 4))
def float32_is_a_plain_script(me: Me) -> None:
    model = language_model()
    wanted = in_one_process(model)
    for mesh in MESHES[me.size]:
        compare(me, piped(model, mesh), wanted, mesh)


main(__name__)
