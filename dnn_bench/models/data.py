"""Synthetic batches and losses, one pair per task."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Generator = torch.Generator | None
IGNORED = -100  # a target that `cross_entropy` leaves out
MASKED_SHARE = 0.15
MASK_TOKEN = 0


def images(batch: int, generator: Generator, *, image_size: int, num_classes: int) -> tuple[Tensor, Tensor]:
    """Noise in the place of ImageNet."""
    inputs = torch.randn(batch, 3, image_size, image_size, generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def vectors(batch: int, generator: Generator, *, features: int, num_classes: int) -> tuple[Tensor, Tensor]:
    inputs = torch.randn(batch, features, generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def causal_tokens(
    batch: int, generator: Generator, *, seq_len: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Random token streams."""
    return shifted(torch.randint(vocab_size, (batch, seq_len + 1), generator=generator))


def masked_tokens(
    batch: int, generator: Generator, *, seq_len: int, vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Random tokens for BERT's pre-training task."""
    return masked(torch.randint(1, vocab_size, (batch, seq_len), generator=generator), generator)


def labelled_tokens(
    batch: int, generator: Generator, *, seq_len: int, vocab_size: int, num_classes: int
) -> tuple[Tensor, Tensor]:
    """Random tokens, and a random class for each sequence."""
    inputs = torch.randint(1, vocab_size, (batch, seq_len), generator=generator)
    return inputs, torch.randint(num_classes, (batch,), generator=generator)


def shifted(stream: Tensor) -> tuple[Tensor, Tensor]:
    """The target of a position is the token that follows it."""
    return stream[:, :-1].contiguous(), stream[:, 1:].contiguous()


def masked(tokens: Tensor, generator: Generator) -> tuple[Tensor, Tensor]:
    """Some tokens masked, which are the targets; as the targets' last column whether sentence B follows A."""
    hidden = torch.rand(tokens.shape, generator=generator) < MASKED_SHARE
    hidden[:, 0] = True  # at least one token per sentence, so that the mean over masked tokens exists
    follows = torch.randint(2, (len(tokens), 1), generator=generator)
    targets = torch.cat([tokens.masked_fill(~hidden, IGNORED), follows], dim=1)
    return tokens.masked_fill(hidden, MASK_TOKEN), targets


def class_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets)


def causal_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def masked_loss(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """Masked-token loss, averaged per sentence first, plus next-sentence loss.

    Averaging per sentence makes the loss of a batch the mean of the losses of its equal shards, which a
    comparison of data-parallel training with one process needs.
    """
    words, follows = outputs
    labels = targets[:, :-1]
    per_token = F.cross_entropy(words.flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORED)
    counts = (labels != IGNORED).sum(dim=1)
    per_sentence = per_token.view_as(labels).sum(dim=1) / counts
    return per_sentence.mean() + F.cross_entropy(follows, targets[:, -1])


SAMPLERS: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
    "image": images,
    "vector": vectors,
    "causal_lm": causal_tokens,
    "masked_lm": masked_tokens,
    "sentence": labelled_tokens,
}
LOSSES: dict[str, Callable[..., Tensor]] = {
    "image": class_loss,
    "vector": class_loss,
    "causal_lm": causal_loss,
    "masked_lm": masked_loss,
    "sentence": class_loss,
}
