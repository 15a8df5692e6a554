"""The arrays that hold the store's tokens: many responses one after another in each segment.

A segment is filled to its end, then another is opened; nothing in it ever moves, and no place in it
is used twice. It is freed whole, when nothing in it is live, be it because its owner wrote what was
left elsewhere. Views of it thus stay what they are, and keep its memory as long as they live.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

ARENAS = {"tokens": np.int32, "behavior": np.float32, "reference": np.float32}
# Only in segments with a response that needs them.
OPTIONAL = {"old": np.float32, "offsets": np.int32}

# A response longer than this part of a segment gets one of its own if it doesn't fit, so that no
# more than this part of a segment is lost at its end.
_LONG = 16


@dataclass(slots=True)
class Segment:
    """Arrays of one length, with the same response at the same place in each."""

    arenas: dict[str, np.ndarray]  # [T] each; those of OPTIONAL once some response needs them
    views: dict[str, np.ndarray] = field(init=False)  # the same, read-only
    used: int = 0  # tokens written
    live: int = 0  # of which belong to live responses

    def __post_init__(self) -> None:
        self.views = {name: _read_only(arena) for name, arena in self.arenas.items()}

    @property
    def size(self) -> int:
        return self.arenas["tokens"].shape[0]

    def reserve(self, name: str) -> np.ndarray:
        """An array of OPTIONAL, made of zeros if there is none."""
        if name not in self.arenas:
            self.arenas[name] = np.zeros(self.size, OPTIONAL[name])
            self.views[name] = _read_only(self.arenas[name])
        return self.arenas[name]


class Segments:
    """All segments of a store by number, of which one is open: being filled."""

    def __init__(self, segment_tokens: int) -> None:
        """Make none yet; ``segment_tokens`` is the size of all but those of a long response."""
        self.segment_tokens = segment_tokens
        self.allocated_tokens = 0  # room in all segments
        self._segments: dict[int, Segment] = {}
        self._open: int | None = None
        self._next = 0

    def __getitem__(self, number: int) -> Segment:
        return self._segments[number]

    def all(self) -> list[Segment]:
        """Every segment."""
        return list(self._segments.values())

    def place(self, lengths: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
        """Give responses places, in order, opening segments as needed.

        Args:
            lengths: int64 [n], tokens of each.

        Yields:
            first, last, number, start: ``first:last`` of the responses lie one after another from
            ``start`` in a segment; the caller writes them before it takes the next.
        """
        ends = np.cumsum(lengths)
        first = placed = 0  # responses and tokens
        while first < lengths.shape[0]:
            last = int(np.searchsorted(ends, placed + self._room(), "right"))
            number = self._open
            if last == first or number is None:
                length = int(lengths[first])
                if length <= self.segment_tokens // _LONG:
                    closed, self._open = self._open, self._new(self.segment_tokens)
                    if closed is not None and self._segments[closed].live == 0:
                        self.free(closed)
                    continue
                last, number = first + 1, self._new(length)
            segment = self._segments[number]
            start, size = segment.used, int(ends[last - 1]) - placed
            segment.used += size
            segment.live += size
            yield first, last, number, start
            first, placed = last, placed + size

    def release(self, number: int, tokens: int) -> None:
        """Tell that a response of so many tokens is dead."""
        segment = self._segments[number]
        segment.live -= tokens
        if segment.live == 0 and number != self._open:
            self.free(number)

    def free(self, number: int) -> None:
        """Give up a segment that is not open, whatever is in it."""
        self.allocated_tokens -= self._segments.pop(number).size

    def garbage(self, live_tokens: int) -> int:
        """Tokens of room that are neither live nor still to be filled."""
        return self.allocated_tokens - self._room() - live_tokens

    def emptiest(self) -> int:
        """Number of the segment of which the least part is live, the open one aside."""
        return min(
            (number for number in self._segments if number != self._open),
            key=lambda number: self._segments[number].live / self._segments[number].size,
        )

    def _room(self) -> int:
        if self._open is None:
            return 0
        segment = self._segments[self._open]
        return segment.size - segment.used

    def _new(self, size: int) -> int:
        number, self._next = self._next, self._next + 1
        arenas = {name: np.empty(size, dtype) for name, dtype in ARENAS.items()}
        self._segments[number] = Segment(arenas)
        self.allocated_tokens += size
        return number


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
