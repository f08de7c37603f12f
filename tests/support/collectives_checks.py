"""What the checks of programs/collectives_checks.py share."""

import torch

import commsched as hvd


def raises(kind, call, *parts):
    """`call` raises `kind`, with all of `parts` in its message."""
    try:
        call()
    except kind as error:
        text = str(error)
        assert all(part in text for part in parts), f"{parts} not all in {text!r}"
        return
    raise AssertionError(f"{call} raised nothing, expected {kind.__name__}")


def of_rank(rank, *shape, dtype=torch.float32):
    """A tensor that only depends on the rank; small whole numbers, so that sums are exact in every type."""
    generator = torch.Generator().manual_seed(1000 + rank)
    return torch.randint(1, 5, shape, generator=generator).to(dtype)


def everyone(*shape, dtype=torch.float32):
    return torch.stack([of_rank(r, *shape, dtype=dtype) for r in range(hvd.size())])


def same(found, expected):
    assert found.dtype == expected.dtype, (found.dtype, expected.dtype)
    assert torch.equal(found, expected), (found, expected)
