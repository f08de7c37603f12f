"""Which embeddings travel by rows, what was counted of them, and where their buckets are cut."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from commsched.optimizer.buckets import Buffers, build_layout
from commsched.optimizer.hooks import owners
from commsched.optimizer.planner import (
    Model,
    Options,
    Plan,
    Rows,
    Sent,
    counted_rows,
    first_rows,
    sent_by_rows,
    sent_share,
    tied_heads,
    times_of_buckets,
)
from scheduler.ir.buckets import Bucket, Piece
from scheduler.ir.link import Link
from scheduler.ir.profile import Profile
from scheduler.policies import plan
from tests.support.engines import on_ranks, run_step
from tests.support.two_tiers import tier_engines

LINK = Link(alpha=1e-4, beta=1e-8)


class Tables(nn.Module):
    """One table for each case; those that may travel by rows come first."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(3000, 16, padding_idx=0)
        self.bag = nn.EmbeddingBag(3000, 16)
        self.small = nn.Embedding(300, 16)
        self.sparse = nn.Embedding(3000, 16, sparse=True)
        self.tied = nn.Embedding(3000, 16)
        self.out = nn.Linear(16, 3000)
        self.out.weight = self.tied.weight
        self.columns = nn.Embedding(3000, 16)
        self.columns.weight = nn.Parameter(torch.zeros(16, 3000).t())
        self.empty = nn.Embedding(0, 16)


def rows_of(
    module: nn.Module, asked: bool | str = "auto", given: Profile | None = None, **different: Any
) -> list[str]:
    """The names of the parameters that travel by rows in the first plan."""
    named = list(module.named_parameters())
    params, names = [p for _, p in named], tuple(name for name, _ in named)
    model = Model(names, tuple(p.numel() for p in params), tuple(p.dtype for p in params))
    backend: Any = SimpleNamespace(
        by_rows=different.pop("by_rows", True), name="ring", ranks=SimpleNamespace(rank=1)
    )
    options = Options(None, row_sparse=asked, **different)
    rows = first_rows(model, params, owners(params, module), backend, options, LINK, given)
    assert all(rows[i] == Rows(params[i].shape[1], model.bytes(i)) for i in rows)
    return [names[i] for i in rows]


def test_large_tables_of_embeddings_alone_travel_by_rows() -> None:
    """Small ones too where rows are asked for: 2 * 19.2 kB take less time than four start-ups of 0.1 ms."""
    assert rows_of(Tables()) == ["plain.weight", "bag.weight", "sparse.weight"]
    assert rows_of(Tables(), True) == ["plain.weight", "bag.weight", "small.weight", "sparse.weight"]


def test_a_large_table_with_sparse_gradients_travels_by_rows_whatever_was_measured() -> None:
    """A busy machine made 4 MB of zeros travel in each step."""
    tables = nn.ModuleList([nn.Embedding(3000, 16, sparse=True), nn.Embedding(300, 16, sparse=True)])
    sizes = (48000, 4800)
    whole = Model(("0.weight", "1.weight"), sizes, (torch.float32,) * 2).guess([0, 1], LINK)
    assert rows_of(tables, given=whole) == ["0.weight"]


def program_of(profile: Profile) -> Any:
    return plan(profile, LINK, "wfbp", ranks=2)


@pytest.mark.parametrize(
    "different, words",
    [
        ({"gather": "parameters"}, "rank 1: row_sparse=True needs gather='gradients', got 'parameters'"),
        ({"by_rows": False}, "transport 'direct' or 'tiers' on CPUs, but the transport is 'ring'"),
        (
            {"schedule": program_of(Model(("a",), (9,), (torch.float32,)).guess([0], LINK))},
            "name of a policy as the schedule",
        ),
    ],
)
def test_without_rows_auto_sends_whole_gradients_and_true_is_an_error(different: Any, words: str) -> None:
    assert rows_of(Tables(), **different) == []
    with pytest.raises(ValueError, match=words):
        rows_of(Tables(), True, **different)


def test_max_norm_is_refused_and_no_table_at_all_is_warned_of() -> None:
    limited = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3000, 16, max_norm=2.0))
    assert rows_of(limited) == []
    with pytest.raises(ValueError, match="refuses max_norm, but 1.weight has max_norm=2.0"):
        rows_of(limited, True)
    with pytest.warns(UserWarning, match="row_sparse=True without effect"):
        assert rows_of(nn.Linear(2, 2), True) == []


MODEL = Model(
    ("table", "matrix", "words"),
    (4000, 33, 600),
    (torch.float32, torch.float32, torch.bfloat16),
    rows={0: Rows(10, 16000), 2: Rows(20, 1200)},
)


def test_a_profile_decides_by_its_bytes() -> None:
    tables = nn.ModuleList([nn.Embedding(400, 10), nn.Embedding(400, 10)])
    model = Model(("0.weight", "1.weight"), (4000, 4000), (torch.float32,) * 2, {1: Rows(10, 500)})
    profile = model.guess([0, 1], LINK)
    assert rows_of(tables, given=profile) == ["1.weight"]
    fitted, _ = model.fitted(profile, [0, 1])
    assert [layer.bytes for layer in fitted.layers] == [0, 16000, 500]
    with pytest.raises(ValueError, match="1.weight has 500 bytes there and 16000 here"):
        replace(model, rows={}).fitted(profile, [0, 1])


def test_bytes_are_the_mean_and_seconds_the_median_of_the_steps() -> None:
    """Of 3 ranks each sends two thirds of a message: 150 bytes are those of a message of 225 bytes."""
    layout = build_layout(MODEL.numels, MODEL.itemsizes, BUCKETS, 3, rows={0: 10, 2: 20})
    fields = [("step", "i8"), ("op", "i4"), ("bucket", "i4"), ("start", "f8"), ("end", "f8"), ("bytes", "i8")]
    rows = [
        (step, op, bucket, 10.0, 10.0 + (took if bucket == 0 else 7.0), sent)
        for step, took, size in ((4, 0.25, 100), (5, 0.25, 200), (6, 5.0, 150))
        for op, bucket, sent in ((0, 0, size), (1, 0, size), (0, 2, 10**6))
    ]
    sent = sent_by_rows(np.array(rows, dtype=fields), layout, {0: Rows(10, 16000)}, sent_share(0, 3))
    assert sent == {0: Sent(pytest.approx(225.0), 0.5)}  # type: ignore[arg-type]


def test_only_buckets_that_are_sent_whole_time_the_link() -> None:
    """Fewer bytes of rows travel than their bucket has."""
    layout = build_layout(MODEL.numels, MODEL.itemsizes, BUCKETS, 3, rows={0: 10, 2: 20})
    fields = [("bucket", "i4"), ("op", "i4"), ("start", "f8"), ("end", "f8")]
    events = [(bucket, op, 1.0, 1.25 + op / 4) for bucket in range(len(BUCKETS)) for op in (0, 1)]
    (whole,) = [number for number, piece in enumerate(layout.slices) if not piece.row]
    timed = times_of_buckets(np.array(events, dtype=fields), BUCKETS, layout)
    assert timed == [(BUCKETS[whole].bytes, 0.25), (BUCKETS[whole].bytes, 0.5)]


def test_two_tiers_count_what_leaves_the_hosts() -> None:
    """Of 2 hosts each sends half of a message in RS and half in AG: a quarter from each of 4 ranks."""
    assert sent_share(1, 4, [0, 0, 1, 1]) == 1 / 4
    assert sent_share(1, 4, [0, 1, 2, 3]) == sent_share(1, 4, [0] * 4) == sent_share(1, 4) == 3 / 4
    assert sent_share(5, 8, [0, 0, 1, 1, 2, 2, 3, 3]) == 3 / 8


def test_of_two_uneven_hosts_each_sends_half() -> None:
    """The rank of the smaller host sends a half alone, not a ninth: its rows seemed to be 4.5 times as many.
    On the larger host rank 0 sends the sum of what the other host owns, and each rank its own rows.
    """
    hosts = [0] * 8 + [1]
    shares = [sent_share(rank, 9, hosts) for rank in range(9)]
    assert shares == [1 / 9, *[1 / 18] * 7, 1 / 2] and sum(shares) == pytest.approx(1)
    assert [sent_share(rank, 3, [0, 1, 0]) for rank in range(3)] == [1 / 3, 1 / 2, 1 / 6]


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 1, 0, 2]])
def test_every_rank_finds_the_bytes_that_it_sent(hosts: list[int]) -> None:
    """Engines send 80 touched rows of 256 bytes, and a number of 8 bytes with each."""
    with tier_engines(hosts) as engines:

        def sent(rank: int) -> float:
            engines[rank].add_bucket(torch.ones(80 * 64), row=64)
            engines[rank].install([("RS", 0), ("AG", 0)])
            run_step(engines[rank], [0])
            mean: float = engines[rank].events()["bytes"].sum() / 2
            return mean / sent_share(rank, len(hosts), hosts)

        assert on_ranks(len(hosts), sent) == [pytest.approx(80 * 264, rel=0.02)] * len(hosts)


@pytest.mark.parametrize(
    "seconds, always, kept",
    [((9.0, 1e-4), False, True), ((9.0, 1e-3), False, False), ((9.0, 1e-3), True, True)],
)
def test_rows_stay_where_the_rank_that_did_not_wait_was_faster_than_whole(
    seconds: tuple[float, float], always: bool, kept: bool
) -> None:
    """The whole table takes 2 * 16 kB * 10 ns = 0.32 ms."""
    by_rank = [{0: Sent(450.4, seconds[0])}, {0: Sent(700.0, seconds[1])}, {}]
    rows = counted_rows(MODEL, by_rank, {0} if always else (), LINK)
    assert rows.get(0) == (Rows(10, 700) if kept else None)
    assert rows[2] == Rows(20, 1200), "nobody has sent it: nothing is known"


def test_counted_bytes_are_those_of_a_row_at_least_and_of_the_table_at_most() -> None:
    for sent, counted in ((0.0, 40), (1e9, 16000)):
        assert counted_rows(MODEL, [{0: Sent(sent, 0.0)}], {0}, LINK)[0] == Rows(10, counted)


BUCKETS = (Bucket((Piece(0, 0, 16000),), 2), Bucket((Piece(1, 0, 132),), 0), Bucket((Piece(2, 0, 1200),), 3))


def test_a_table_is_a_group_with_the_counted_bytes() -> None:
    model = replace(MODEL, rows={0: Rows(10, 700), 2: Rows(20, 90)})
    assert model.groups == [2, 0, 4] and [model.kind(g) for g in (0, 2, 4)] == [
        *model.dtypes[:2],
        model.dtypes[2],
    ]
    profile = model.guess([0, 1, 2], LINK)
    assert [(layer.bytes, layer.group) for layer in profile.layers[1:]] == [(700, 2), (132, 0), (90, 4)]


def test_an_embedding_and_its_head_are_tied() -> None:
    """A weight with two heads, of another type, or of an embedding that is changed in the forward is not."""

    class More(Tables):
        def __init__(self) -> None:
            super().__init__()
            self.again, self.thrice = nn.Embedding(3000, 16), nn.Embedding(9, 16)
            self.again.weight = self.tied.weight
            self.first, self.second = nn.Linear(16, 9), nn.Linear(16, 9)
            self.first.weight = self.second.weight = self.thrice.weight
            self.brief, self.brief_out = nn.Embedding(9, 16).half(), nn.Linear(16, 9).half()
            self.brief_out.weight = self.brief.weight
            self.limited, self.limited_out = nn.Embedding(9, 16, max_norm=1.0), nn.Linear(16, 9)
            self.limited_out.weight = self.limited.weight

    model = More()
    params = list(model.parameters())
    heads = tied_heads(params, owners(params, model))
    assert [(params[i] is model.tied.weight, head is model.out) for i, head in heads.items()] == [
        (True, True)
    ]


TIED = Model(("words", "matrix"), (4000, 33), (torch.float32,) * 2, {0: Rows(10, 700)}, heads=(0,))


def test_a_tied_weight_has_two_layers() -> None:
    """Its rows, where the embedding is, and the whole matrix, where the head is, needed by the embedding."""
    profile = TIED.guess([0, 1, 2], LINK)
    assert [(la.name, la.bytes, la.group, la.needed_by) for la in profile.layers[1:]] == [
        ("words", 700, 1, -1),
        ("matrix", 132, 0, -1),
        ("words (head)", 16000, 0, 1),
    ]
    whole = TIED.sent_whole()
    assert whole.guess([0, 1, 2], LINK).layers[1:] == tuple(
        replace(after, forward=before.forward, backward=before.backward)
        for before, after in zip(
            whole.guess([0, 1, 2], LINK).layers[1:], profile.whole().layers[1:], strict=True
        )
    )


def test_the_sum_of_a_tied_weight_is_where_its_head_is() -> None:
    """Buckets 0 and 1 hold the head and another gradient, bucket 2 the rows that correct it."""
    parts = (
        Bucket((Piece(2, 0, 8000),), 0),
        Bucket((Piece(2, 8000, 16000), Piece(1, 0, 132)), 0),
        Bucket((Piece(0, 0, 16000),), 1),
    )
    layout = TIED.layout(parts, 2)
    assert layout.slots.keys() == {0, 1} and layout.slots[0].buckets == [0, 1, 2]
    assert [piece.params for piece in layout.slices] == [(0,), (0, 1), (0,)]
    assert [layout.corrected(bucket) for bucket in range(3)] == [None, None, 0]
    buffers = Buffers(layout, {group: (torch.float32, torch.device("cpu")) for group in layout.lengths})
    corrected = buffers.corrected(2)
    assert corrected is not None and buffers.corrected(0) is None
    assert corrected.data_ptr() == buffers.flat[0].data_ptr() and corrected.numel() == 4000


@pytest.mark.parametrize(
    "missing, seconds, kept", [(False, 1e-4, True), (False, 2e-4, False), (True, 1e-4, False)]
)
def test_corrections_stay_where_they_are_short_and_every_rank_is_early(
    missing: bool, seconds: float, kept: bool
) -> None:
    """The whole gradient takes 0.32 ms."""
    by_rank: list[dict[int, Sent]] = [{0: Sent(700.0, seconds)}, {} if missing else {0: Sent(80.0, seconds)}]
    assert bool(counted_rows(TIED, by_rank, (), LINK)) == kept
    assert bool(counted_rows(TIED, by_rank, {0}, LINK)) != missing


def test_parts_of_a_table_are_cut_between_rows() -> None:
    """A bucket gets the share of the rows that it has of the bytes: 128 of 700 are 73 of 400 rows."""
    model = replace(MODEL, rows={0: Rows(10, 700)})
    profile = model.guess([0, 1, 2], LINK)
    parts = (
        Bucket((Piece(1, 0, 128),), 2),
        Bucket((Piece(1, 128, 700),), 2),
        Bucket((Piece(2, 0, 132),), 0),
        Bucket((Piece(3, 0, 1200),), 1),
    )
    chosen = Plan(replace(program_of(profile), buckets=parts), profile, LINK, (-1, 0, 1, 2))
    buckets = chosen.buckets(model)
    assert buckets[0].pieces == (Piece(0, 0, 73 * 40),) and buckets[1].pieces == (Piece(0, 73 * 40, 16000),)
    layout = build_layout(model.numels, model.itemsizes, buckets, 3, rows={0: 10})
    cut = [(s.start, s.stop, s.row, s.params) for s in layout.slices[:2]]
    assert cut == [(0, 730, 10, (0,)), (730, 4000, 10, (0,))]
    assert layout.slots[0].buckets == [0, 1] and layout.lengths[2] == 4000
    assert layout.slices[2].row == 0 and layout.slices[2].numel % 3 == 0


def test_ddp_is_predicted_with_whole_gradients() -> None:
    """It sends 16000 bytes of the table, where 700 are planned."""
    model = replace(MODEL, rows={0: Rows(10, 700)})
    profile = model.guess([0, 1, 2], LINK)
    rows = Plan(program_of(profile), profile, LINK, (-1, 0, 1, 2), whole={1: 16000}).prediction
    unaware = Plan(program_of(profile), profile, LINK, (-1, 0, 1, 2)).prediction
    assert rows.period == unaware.period and rows.ddp_period - unaware.ddp_period > 2e-4
