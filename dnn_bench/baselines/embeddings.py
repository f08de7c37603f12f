"""Embeddings whose gradients are sparse tensors, as with `nn.Embedding(sparse=True)`."""

from __future__ import annotations

from collections import Counter

from torch import nn

Embedding = nn.Embedding | nn.EmbeddingBag


def make_embeddings_sparse(model: nn.Module) -> None:
    """Set `sparse` on embeddings whose weight no other module owns; raise `ValueError` if there are none."""
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    embeddings = [module for module in model.modules() if isinstance(module, Embedding)]
    found = [module for module in embeddings if _may_be_sparse(module) and owners[id(module.weight)] == 1]
    if not found:
        raise ValueError(
            "the model has no trained nn.Embedding or nn.EmbeddingBag whose weight belongs to no other module"
        )
    for module in found:
        module.sparse = True


def _may_be_sparse(embedding: Embedding) -> bool:
    # torch refuses sparse gradients of a maximum, and of rows scaled by how often they occur.
    refused = embedding.scale_grad_by_freq or getattr(embedding, "mode", "") == "max"
    return embedding.weight.requires_grad and not refused
