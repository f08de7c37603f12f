"""Interval arithmetic of one sharded dimension. Pure: integers in, integers out."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

Interval = tuple[int, int]


@dataclass(frozen=True)
class Run:
    """Pixels ``lo..hi-1`` of the source, read backwards if ``flip``."""

    lo: int
    hi: int
    flip: bool = False

    def __len__(self) -> int:
        return self.hi - self.lo


@dataclass(frozen=True)
class Fill:
    """``count`` pixels that exist on no rank: padding beyond the true border."""

    count: int

    def __len__(self) -> int:
        return self.count


Want = tuple[Run | Fill, ...]


def want_length(want: Want) -> int:
    return sum(len(part) for part in want)


@dataclass(frozen=True)
class Split:
    """The owners of the pixels of one dimension: part ``i`` owns ``[bounds[i], bounds[i+1])``.

    ``margin``: pixels beyond its own that a part also holds, clipped at the image's border: the halo of a
    block that is computed alone.
    """

    bounds: tuple[int, ...]
    margin: Interval = (0, 0)

    def __post_init__(self) -> None:
        ordered = all(a <= b for a, b in zip(self.bounds, self.bounds[1:]))
        if len(self.bounds) < 2 or self.bounds[0] != 0 or not ordered:
            raise ValueError(f"split bounds must start at 0 and never decrease, got {self.bounds}")

    @classmethod
    def even(cls, size: int, parts: int) -> Split:
        """Nearly equal parts; ``ValueError`` when there are more parts than pixels."""
        if not 1 <= parts <= size:
            raise ValueError(
                f"cannot cut {size} pixels into {parts} tiles: each tile needs at least one pixel"
            )
        return cls.shares(size, parts)

    @classmethod
    def shares(cls, size: int, parts: int) -> Split:
        """Nearly equal parts, which are empty where there are more of them than pixels."""
        return cls(tuple(i * size // parts for i in range(parts + 1)))

    @property
    def size(self) -> int:
        return self.bounds[-1]

    @property
    def parts(self) -> int:
        return len(self.bounds) - 1

    def owned(self, part: int) -> Interval:
        return self.bounds[part], self.bounds[part + 1]

    def held(self, part: int) -> Interval:
        lo, hi = self.owned(part)
        return self.widen((lo, hi), self.margin)

    def widen(self, interval: Interval, margin: Interval) -> Interval:
        """``interval`` with ``margin`` on both sides, within the image; an empty interval stays empty."""
        lo, hi = interval
        return (lo, hi) if lo == hi else (max(0, lo - margin[0]), min(self.size, hi + margin[1]))

    def with_margin(self, margin: Interval) -> Split:
        return replace(self, margin=margin)

    def margin_around(self, bounds: tuple[int, ...]) -> Interval:
        """The margin that every part holds around parts cut at ``bounds``; (0, 0) if one lacks its own."""
        if self.bounds == bounds:
            return self.margin
        before = after = self.size
        for part, (lo, hi) in enumerate(zip(bounds, bounds[1:])):
            start, stop = self.held(part)
            if lo < hi and start > 0:
                before = min(before, lo - start)
            if lo < hi and stop < self.size:
                after = min(after, stop - hi)
        return (0, 0) if min(before, after) < 0 else (before, after)

    def part_of(self, pixel: int) -> int:
        return bisect_right(self.bounds, pixel) - 1


def clipped(lo: int, hi: int, size: int) -> Want:
    """Pixels ``[lo, hi)`` of an image of ``size`` pixels, with fill where they lie outside."""
    if hi <= lo:
        return ()
    before, after = min(max(0, -lo), hi - lo), min(max(0, hi - size), hi - lo)
    inside = Run(lo + before, hi - after)
    parts = (Fill(before), inside, Fill(after))
    return tuple(part for part in parts if len(part) > 0)


@dataclass(frozen=True)
class _Taps:
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0

    @property
    def span(self) -> int:
        """Pixels from the first to the last tap."""
        return self.dilation * (self.kernel - 1) + 1


class Window(_Taps):
    """A sliding window (convolution, pooling) along one dimension."""

    def outputs(self, size: int, ceil: bool = False) -> int:
        room = size + self.before + self.after - self.span
        if not ceil:
            return room // self.stride + 1
        count = -(-room // self.stride) + 1
        # The last window must start inside the image or the padding before it.
        return count - 1 if (count - 1) * self.stride >= size + self.before else count

    def need(self, lo: int, hi: int) -> Interval:
        """Input pixels, unclipped, that outputs ``[lo, hi)`` read."""
        if hi <= lo:
            return (0, 0)
        return lo * self.stride - self.before, (hi - 1) * self.stride - self.before + self.span

    def split(self, source: Split, size: int) -> Split:
        """Owners of the ``size`` outputs: each output belongs where the middle of its window lies."""
        middle = (self.span - 1) // 2 - self.before
        inner = (-(-(bound - middle) // self.stride) for bound in source.bounds[1:-1])
        return Split((0, *(min(max(bound, 0), size) for bound in inner), size))


@dataclass(frozen=True)
class TransposedWindow(_Taps):
    """A transposed convolution along one dimension: input ``i`` writes outputs ``i*stride - before +
    dilation*j``."""

    extra: int = 0

    def outputs(self, size: int) -> int:
        return (size - 1) * self.stride - self.before - self.after + self.span + self.extra

    def need(self, lo: int, hi: int) -> Interval:
        """Inputs, unclipped, that may write into outputs ``[lo, hi)``."""
        if hi <= lo:
            return (0, 0)
        return -(-(lo + self.before - self.span + 1) // self.stride), (
            hi - 1 + self.before
        ) // self.stride + 1

    def split(self, source: Split, size: int) -> Split:
        middle = (self.span - self.stride) // 2 - self.before
        inner = (bound * self.stride + middle for bound in source.bounds[1:-1])
        return Split((0, *(min(max(bound, 0), size) for bound in inner), size))


@dataclass(frozen=True)
class Padding:
    """``torch.nn.functional.pad`` along one dimension of ``size`` pixels; negative amounts crop it."""

    size: int
    before: int
    after: int
    mode: str = "constant"
    stride: int = 1
    span: int = 1

    def want(self, lo: int, hi: int) -> Want:
        """Outputs ``[lo, hi)`` as pixels of the source."""
        return pad_want(lo - self.before, hi - self.before, self.size, self.mode)

    def need(self, lo: int, hi: int) -> Interval:
        """The interval of source pixels that outputs ``[lo, hi)`` read."""
        runs = [part for part in self.want(lo, hi) if isinstance(part, Run)]
        return (min(run.lo for run in runs), max(run.hi for run in runs)) if runs else (0, 0)

    def split(self, source: Split) -> Split:
        """Owners of the outputs: each pixel stays with its owner, and border parts take the padding."""
        size = self.size + self.before + self.after
        inner = (min(max(bound + self.before, 0), size) for bound in source.bounds[1:-1])
        out = Split((0, *inner, size))
        return out.with_margin(spare_margin(self, source, out))


def spare_margin(window: Window | TransposedWindow | Padding, source: Split, out: Split) -> Interval:
    """Outputs beyond its own that every part can compute from the pixels it holds."""
    if not any(source.margin) or not _computable(window, source, out, (0, 0)):
        return 0, 0
    most = (max(source.margin) + 1) * window.stride + window.span
    before = after = 0
    while before < most and _computable(window, source, out, (before + 1, 0)):
        before += 1
    while after < most and _computable(window, source, out, (0, after + 1)):
        after += 1
    return before, after


def _computable(
    window: Window | TransposedWindow | Padding, source: Split, out: Split, margin: Interval
) -> bool:
    for part in range(out.parts):
        lo, hi = out.widen(out.owned(part), margin)
        if lo < hi:
            needed, (start, stop) = window.need(lo, hi), source.held(part)
            first, last = max(needed[0], 0), min(needed[1], source.size)
            if first < last and not start <= first <= last <= stop:
                return False
    return True


def pad_want(lo: int, hi: int, size: int, mode: str) -> Want:
    """Pixels ``[lo, hi)`` of an image padded as ``torch.nn.functional.pad`` does, in coordinates of the
    image."""
    if mode == "constant":
        return clipped(lo, hi, size)
    runs: list[Run | Fill] = []
    position = lo
    while position < hi:
        run = _padded_run(position, hi, size, mode)
        runs.append(run)
        position += len(run)
    return tuple(runs)


def _padded_run(lo: int, hi: int, size: int, mode: str) -> Run:
    """The longest run of source pixels that positions from ``lo`` (up to ``hi``) read."""
    if 0 <= lo < size:
        return Run(lo, min(hi, size))
    if mode == "replicate":
        edge = 0 if lo < 0 else size - 1
        return Run(edge, edge + 1)
    if mode == "circular":
        start = lo % size
        return Run(start, start + min(hi - lo, size - start))
    if lo < 0:  # reflect: position p reads pixel -p
        return Run(max(-hi, 0) + 1, -lo + 1, flip=True)
    last = 2 * (size - 1)  # position p reads pixel last - p
    return Run(last - hi + 1, last - lo + 1, flip=True)
