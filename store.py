"""Trajectories in flat numpy arrays: what the replay buffer keeps, without its rules.

``Store`` holds one row per trajectory, in order of arrival; segments.py holds the tokens.
``append`` only notes a trajectory, ``flush`` writes all that were noted at once. ``remove`` marks a
row as dead. The space of dead rows comes back in two ways: a segment of which little is live is
emptied into the open one and freed, and ``compact`` closes up the rows.

Letters: R rows, T tokens.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import chain
from operator import attrgetter
from typing import Any

import numpy as np

from segments import ARENAS, OPTIONAL, Segment, Segments
from trajectory import Trajectory, offsets_of

_COLUMNS: dict[str, Any] = {
    "arrival": np.int64,  # ascending; the number of trajectories stored before this one
    "prompt_id": np.int64,
    "reward": np.float64,
    "version_start": np.int64,
    "version_end": np.int64,
    "reference_version": np.int64,
    "uses": np.int32,
    "length": np.int32,  # response tokens
    "truncated": np.bool_,
    "old_differs": np.bool_,  # its old log-probs are not its behavior log-probs
    "versions_differ": np.bool_,  # several versions of the weights sampled it
    "segment": np.int32,  # where its tokens lie
    "start": np.int32,
    "response_hash": np.int64,
    "live": np.bool_,
}
# What a saved state holds of a row; the other columns follow from it.
_SAVED = tuple(_COLUMNS)[:11]
_INTEGERS = ("prompt_id", "version_start", "version_end", "reference_version")
_SCALARS = ("prompt_id", "reward", "version_start", "version_end", "reference_version", "truncated")
_ARRAYS = {
    "prompt_tokens": np.dtype(np.int32),
    "response_tokens": np.dtype(np.int32),
    "behavior_logprobs": np.dtype(np.float32),
    "old_logprobs": np.dtype(np.float32),
    "reference_logprobs": np.dtype(np.float32),
}
_FIELDS = {
    "tokens": "response_tokens",
    "behavior": "behavior_logprobs",
    "reference": "reference_logprobs",
}

# Arrays of segments.OPTIONAL: the column that says whether a row has its own, and what it is.
_OPTIONAL: dict[str, tuple[str, Callable[[Trajectory], np.ndarray]]] = {
    "old": ("old_differs", attrgetter("old_logprobs")),
    "offsets": ("versions_differ", offsets_of),
}

FLUSH_ROWS = 1024  # how many rows to note, about, before a flush
_SEGMENT_TOKENS = 1 << 20  # the most; 4 MiB an arena
# At most about 1/9 of the room for tokens is garbage, as much as 1/8 of the live ones: less would
# cost more moves, and it must stay well above what is lost at the ends of segments, 1/16.
_GARBAGE = 8
_LOWEST = 1024  # least number of rows that are sorted to find those of lowest reward


class Store:
    """Trajectories by row; a row number holds until ``compact``, an arrival number for ever.

    Rows are in order of arrival. Methods that take rows accept those not yet flushed only where
    they say so. Memory: 12 bytes a token (4 more where old log-probs differ, and 4 where versions
    do), at most 9/8 of that with garbage and two segments more, and about 90 bytes a row.
    """

    def __init__(self, max_tokens: int) -> None:
        """Make an empty store; ``max_tokens``, its owner's bound, only sets the segments' size."""
        self.num_rows = 0  # flushed ones, live or not
        self.num_live = 0  # with those not flushed
        self.live_tokens = 0  # response tokens of all live rows
        self.columns = {name: np.empty(16, dtype) for name, dtype in _COLUMNS.items()}  # [R]
        # The columns again, for one item at a time, which numpy is slow at.
        self._views = {name: values.data for name, values in self.columns.items()}
        self.parts: dict[str, np.ndarray] = {}  # name -> float64 [R], NaN: no such part
        self.segments = Segments(min(_SEGMENT_TOKENS, max(1024, max_tokens // 16)))
        # Not flushed: each with the hash of its response, None if removed since; and the arrival
        # number of the first, which the others follow without gaps.
        self._noted: list[tuple[Trajectory, int] | None] = []
        self._noted_from = 0
        self._head = 0  # no row before it is live
        # The live rows of lowest (reward, row), all that come before any that is not in it, and
        # perhaps dead ones; a later row belongs to them if its reward is less than the bound.
        self._lowest: list[tuple[float, int]] = []
        self._lowest_bound = -math.inf

    # Changes

    def append(self, t: Trajectory, arrival: int, response_hash: int) -> int:
        """Note a trajectory, the latest to arrive, and return its row."""
        if not self._noted:
            self._noted_from = arrival
        assert arrival == self._noted_from + len(self._noted)
        row = self.num_rows + len(self._noted)
        self._noted.append((t, response_hash))
        self.num_live += 1
        self.live_tokens += len(t.response_tokens)
        if t.reward < self._lowest_bound:
            heappush(self._lowest, (float(t.reward), row))
        return row

    def remove(self, row: int) -> tuple[int, int]:
        """Drop a live row, flushed or not; its arrival number and the hash of its response."""
        self.num_live -= 1
        if row >= self.num_rows:
            t, response_hash = self._unwritten(row)
            self._noted[row - self.num_rows] = None
            self.live_tokens -= len(t.response_tokens)
            return self._noted_from + row - self.num_rows, response_hash
        views = self._views
        assert views["live"][row]
        views["live"][row] = False
        length, number = views["length"][row], views["segment"][row]
        self.live_tokens -= length
        self.segments.release(number, length)
        return views["arrival"][row], views["response_hash"][row]

    def flush(self) -> None:
        """Write what was noted; the arrays of the trajectories are not kept."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        self._reserve_rows(len(noted))
        columns = self.columns
        new = slice(self.num_rows, self.num_rows + len(noted))
        columns["arrival"][new] = np.arange(self._noted_from, self._noted_from + len(noted))
        columns["live"][new] = False  # one that was removed before it was ever written stays so
        kept = [entry for entry in noted if entry is not None]
        rows = np.array([i for i, entry in enumerate(noted, new.start) if entry is not None], int)
        self.num_rows = new.stop
        trajectories = [entry[0] for entry in kept]
        lengths = [len(t.response_tokens) for t in trajectories]
        differs = {
            "old": [_old_differs(t) for t in trajectories],
            "offsets": [t.version_offsets is not None for t in trajectories],
        }
        columns["live"][rows] = True
        columns["length"][rows] = lengths
        columns["uses"][rows] = 0
        columns["response_hash"][rows] = [entry[1] for entry in kept]
        for name, (column, _) in _OPTIONAL.items():
            columns[column][rows] = differs[name]
        for name in _SCALARS:
            columns[name][rows] = list(map(attrgetter(name), trajectories))
        for name in dict.fromkeys(chain.from_iterable(t.reward_parts for t in trajectories)):
            if name not in self.parts:
                self.parts[name] = np.full(columns["live"].shape[0], np.nan)
        for name, values in self.parts.items():
            values[rows] = [t.reward_parts.get(name, math.nan) for t in trajectories]

        for first, last, segment, start, end in self._place(rows, np.array(lengths)):
            piece = trajectories[first:last]
            for name, attribute in _FIELDS.items():
                arrays = list(map(attrgetter(attribute), piece))
                np.concatenate(arrays, out=segment.arenas[name][start:end])
            for name, (_, values_of) in _OPTIONAL.items():
                if any(differs[name][first:last]):
                    np.concatenate(
                        list(map(values_of, piece)), out=segment.reserve(name)[start:end]
                    )
        self._reclaim()

    def set_reference(self, rows: np.ndarray, logprobs: Sequence[np.ndarray], version: int) -> None:
        """Replace the reference's log-probs of rows, and the version that they are of."""
        for (segment, start, end), values in zip(self._pieces(rows), logprobs, strict=True):
            segment.arenas["reference"][start:end] = values
        self.columns["reference_version"][rows] = version

    def should_compact(self) -> bool:
        """Whether so many rows are dead that closing them up pays."""
        full = self.num_rows + FLUSH_ROWS > self.columns["live"].shape[0]
        dead = self.num_rows + len(self._noted) - self.num_live
        return full and dead > self.num_live // _GARBAGE

    def compact(self) -> np.ndarray:
        """Close up the live rows, keeping their order; tokens stay where they are.

        Returns:
            int64 [R + 1] by the old row number: the new one, or for a dead row that of the next
            live one.
        """
        self.flush()
        alive = self.columns["live"][: self.num_rows]
        moved = np.zeros(self.num_rows + 1, np.int64)
        np.cumsum(alive, out=moved[1:])
        live = np.flatnonzero(alive)
        for values in (*self.columns.values(), *self.parts.values()):
            values[: live.size] = values[live]
        self.num_rows = live.size
        self._head = 0
        self._lowest, self._lowest_bound = [], -math.inf
        return moved

    # Looking things up

    def row_of(self, arrival: int) -> int:
        """Row of a stored arrival number, flushed or not."""
        if self._noted and arrival >= self._noted_from:
            return self.num_rows + arrival - self._noted_from
        return int(self.columns["arrival"][: self.num_rows].searchsorted(arrival))

    def live_rows(self, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows of those arrival numbers that are stored still, and bool [n]: which these are."""
        stored = self.columns["arrival"][: self.num_rows]
        rows = stored.searchsorted(arrivals)
        found = rows < self.num_rows
        rows[~found] = 0
        if self.num_rows:
            found &= (stored[rows] == arrivals) & self.columns["live"][rows]
        return rows[found], found

    def response_bytes(self, row: int) -> bytes:
        """The response's int32 tokens, of a row that is flushed or not."""
        if row >= self.num_rows:
            return self._unwritten(row)[0].response_tokens.tobytes()
        ((segment, start, end),) = self._pieces(np.array([row]))
        return segment.arenas["tokens"][start:end].tobytes()

    def oldest(self) -> int:
        """The earliest arrival that is live; there must be one."""
        while True:
            live = self._views["live"]
            while self._head < self.num_rows:
                if live[self._head]:
                    return self._head
                self._head += 1
            assert self._noted
            self.flush()

    def lowest(self) -> int:
        """The live row of lowest reward, of equals the earliest arrival; there must be one.

        A sixteenth of the rows is sorted at a time, so that each call costs a logarithm of them.
        """
        while True:
            while self._lowest:
                row = self._lowest[0][1]
                if self._is_live(row):
                    return row
                heappop(self._lowest)
            self.flush()
            live = np.flatnonzero(self.columns["live"][: self.num_rows])
            assert live.size
            rewards = self.columns["reward"][live]
            count = min(live.size, max(_LOWEST, live.size // 16))
            bound = np.partition(rewards, count - 1)[count - 1]
            below = np.flatnonzero(rewards < bound)
            equal = np.flatnonzero(rewards == bound)[: count - below.size]
            chosen = np.concatenate([below, equal])
            pairs = zip(rewards[chosen].tolist(), live[chosen].tolist(), strict=True)
            self._lowest = sorted(pairs)
            self._lowest_bound = float(bound)

    def prompt_of(self, row: int) -> int:
        """The prompt of a row, flushed or not."""
        if row < self.num_rows:
            return self._views["prompt_id"][row]
        return int(self._unwritten(row)[0].prompt_id)

    def evicted_by(self, row: int) -> tuple[int, float]:
        """First version and reward of a row, flushed or not."""
        if row < self.num_rows:
            return self._views["version_start"][row], self._views["reward"][row]
        t, _ = self._unwritten(row)
        return t.version_start, t.reward

    def read(self, rows: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Trajectory]:
        """Trajectories whose arrays are read-only views, but the reference's log-probs a copy.

        Args:
            rows: int64 [n], live and flushed.
            prompts: n arrays, the tokens of each one's prompt; they are used as they are.
        """
        columns = self.columns
        flags = [column for column, _ in _OPTIONAL.values()]
        scalars = [columns[name][rows].tolist() for name in (*_SCALARS, *flags)]
        names = list(self.parts)
        part_values = [self.parts[name][rows].tolist() for name in names]
        parts = zip(*part_values, strict=True) if names else iter([()] * len(rows))
        assert columns["live"][rows].all()
        trajectories = []
        for piece, prompt_tokens, part, row in zip(
            self._pieces(rows), prompts, parts, zip(*scalars, strict=True), strict=True
        ):
            segment, first, last = piece
            prompt_id, reward, start, end, reference, cut, old, offsets = row
            views = segment.views
            behavior = views["behavior"][first:last]
            trajectories.append(
                Trajectory(
                    prompt_id=prompt_id,
                    prompt_tokens=prompt_tokens,
                    response_tokens=views["tokens"][first:last],
                    behavior_logprobs=behavior,
                    old_logprobs=views["old"][first:last] if old else behavior,
                    # The only array that is written again, by set_reference.
                    reference_logprobs=segment.arenas["reference"][first:last].copy(),
                    reference_version=reference,
                    reward=reward,
                    # NaN, which alone differs from itself, stands for a part that isn't there.
                    reward_parts={n: v for n, v in zip(names, part, strict=True) if v == v},
                    version_start=start,
                    version_end=end,
                    truncated=cut,
                    version_offsets=views["offsets"][first:last] if offsets else None,
                )
            )
        return trajectories

    # Places of tokens

    def _unwritten(self, row: int) -> tuple[Trajectory, int]:
        entry = self._noted[row - self.num_rows]
        assert entry is not None
        return entry

    def _is_live(self, row: int) -> bool:
        if row >= self.num_rows:
            return self._noted[row - self.num_rows] is not None
        return bool(self._views["live"][row])

    def _pieces(self, rows: np.ndarray) -> Iterator[tuple[Segment, int, int]]:
        """Where the tokens of each row lie: segment, start and end."""
        starts = self.columns["start"][rows]
        ends = starts + self.columns["length"][rows]
        numbers = self.columns["segment"][rows].tolist()
        for number, start, end in zip(numbers, starts.tolist(), ends.tolist(), strict=True):
            yield self.segments[number], start, end

    def _runs(self, rows: np.ndarray) -> Iterator[tuple[Segment, int, int]]:
        """The same in fewer pieces: rows whose tokens follow one another are taken together."""
        starts = self.columns["start"][rows]
        ends = starts + self.columns["length"][rows]
        numbers = self.columns["segment"][rows]
        breaks = (numbers[1:] != numbers[:-1]) | (starts[1:] != ends[:-1])
        first = np.flatnonzero(np.append(rows.size > 0, breaks))
        last = np.append(first[1:], rows.size)[: first.size] - 1
        bounds = numbers[first].tolist(), starts[first].tolist(), ends[last].tolist()
        for number, start, end in zip(*bounds, strict=True):
            yield self.segments[number], start, end

    def _place(
        self, rows: np.ndarray, lengths: np.ndarray
    ) -> Iterator[tuple[int, int, Segment, int, int]]:
        """Give rows places for their tokens, as ``Segments.place``, which see; adds the end."""
        ends = np.cumsum(lengths)
        for first, last, number, start in self.segments.place(lengths):
            piece = slice(first, last)
            places = start + ends[piece] - ends[first] + lengths[first]  # [last - first] the ends
            self.columns["segment"][rows[piece]] = number
            self.columns["start"][rows[piece]] = places - lengths[piece]
            yield first, last, self.segments[number], start, int(places[-1])

    def _reclaim(self) -> None:
        """Empty segments of which least is live, until the garbage is within its bound."""
        segments = self.segments
        bound = self.live_tokens // _GARBAGE + segments.segment_tokens
        while segments.garbage(self.live_tokens) > bound:
            number = segments.emptiest()
            source = segments[number]
            mine = self.columns["segment"][: self.num_rows] == number
            rows = np.flatnonzero(mine & self.columns["live"][: self.num_rows])
            # Pieces are read off before the rows are given new places.
            pieces = list(self._pieces(rows))
            lengths = self.columns["length"][rows].astype(np.int64)
            for first, last, target, start, end in self._place(rows, lengths):
                for name in OPTIONAL.keys() & source.arenas.keys():
                    target.reserve(name)
                for name, arena in source.arenas.items():
                    arrays = [arena[a:b] for _, a, b in pieces[first:last]]
                    np.concatenate(arrays, out=target.arenas[name][start:end])
            segments.free(number)

    def _reserve_rows(self, count: int) -> None:
        """Make room for ``count`` more rows."""
        needed = self.num_rows + count
        if needed > self.columns["live"].shape[0]:
            size = needed + needed // _GARBAGE + 16
            for columns in (self.columns, self.parts):
                for name, values in columns.items():
                    # One at a time: the old and the new of one coexist, not of all.
                    columns[name] = np.empty(size, values.dtype)
                    columns[name][: self.num_rows] = values[: self.num_rows]
            self._views = {name: values.data for name, values in self.columns.items()}

    # State

    def state_arrays(self) -> dict[str, np.ndarray]:
        """Copies of everything, in order of arrival; dead rows must have been closed up.

        Returns:
            The columns by name; "parts" float64 [R, parts]; "tokens", "behavior" and "reference"
            [T], one response after another; "old" and "offsets" likewise, of those rows only
            for which "old_differs" and "versions_differ".
        """
        n = self.num_rows
        assert n == self.num_live
        arrays = {name: self.columns[name][:n].copy() for name in _SAVED}
        arrays["parts"] = np.empty((n, len(self.parts)))
        for i, values in enumerate(self.parts.values()):
            arrays["parts"][:, i] = values[:n]
        rows = np.arange(n)
        for name, dtype in ARENAS.items():
            arrays[name] = np.empty(self.live_tokens, dtype)
            _join(arrays[name], (s.arenas[name][a:b] for s, a, b in self._runs(rows)))
        for name, (column, _) in _OPTIONAL.items():
            rows = np.flatnonzero(arrays[column])
            arrays[name] = np.empty(int(arrays["length"][rows].sum()), OPTIONAL[name])
            _join(arrays[name], (s.arenas[name][a:b] for s, a, b in self._runs(rows)))
        return arrays

    @classmethod
    def from_state(
        cls, max_tokens: int, arrays: dict[str, np.ndarray], part_names: Sequence[str]
    ) -> "Store":
        """A store with the contents of ``state_arrays``, which ``check_state`` has found sound."""
        store = cls(max_tokens)
        n = store.num_rows = store.num_live = arrays["arrival"].shape[0]
        store.columns = {name: np.zeros(n, dtype) for name, dtype in _COLUMNS.items()}
        for name in _SAVED:
            store.columns[name][:] = arrays[name]
        store.columns["live"][:] = True
        store._views = {name: values.data for name, values in store.columns.items()}
        store.parts = {name: arrays["parts"][:, i].copy() for i, name in enumerate(part_names)}
        store.live_tokens = arrays["tokens"].shape[0]
        lengths = arrays["length"].astype(np.int64)
        ends = np.cumsum(lengths)
        own_ends = {
            name: np.cumsum(np.where(arrays[column], lengths, 0))
            for name, (column, _) in _OPTIONAL.items()
        }
        for first, last, segment, start, end in store._place(np.arange(n), lengths):
            piece = slice(int(ends[first] - lengths[first]), int(ends[last - 1]))
            for name in ARENAS:
                segment.arenas[name][start:end] = arrays[name][piece]
            for name, (column, _) in _OPTIONAL.items():
                for row in (first + np.flatnonzero(arrays[column][first:last])).tolist():
                    length, own_end = int(lengths[row]), own_ends[name][row]
                    place = start + int(ends[row]) - length - piece.start
                    values = arrays[name][own_end - length : own_end]
                    segment.reserve(name)[place : place + length] = values
        return store


def check_state(arrays: dict[str, np.ndarray], num_parts: int) -> None:
    """Raise ValueError unless ``state_arrays``'s arrays are there and agree with one another."""
    dtypes: dict[str, Any] = {name: _COLUMNS[name] for name in _SAVED} | ARENAS
    dtypes |= {"parts": np.float64} | OPTIONAL
    require_arrays(arrays, dtypes)
    rows = arrays["arrival"].shape[0]
    tokens = arrays["tokens"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {name: (rows,) for name in _SAVED}
    shapes |= {name: (tokens,) for name in ARENAS}
    shapes["parts"] = (rows, num_parts)
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"buffer state: {name} has shape {arrays[name].shape}, not {shape}")
    require_lengths("length", arrays["length"], tokens, least=1)
    for name, (column, _) in _OPTIONAL.items():
        size = arrays["length"][arrays[column]].sum()
        if arrays[name].shape != (size,):
            raise ValueError(f"buffer state: {name} has shape {arrays[name].shape}, not {(size,)}")
    if rows and (np.diff(arrays["arrival"]).min(initial=1) < 1 or arrays["arrival"][0] < 0):
        raise ValueError("buffer state: arrival is not strictly ascending from 0 or more")


def require_arrays(arrays: dict[str, np.ndarray], dtypes: dict[str, Any]) -> None:
    """Raise ValueError unless a saved state has arrays of these names and dtypes."""
    for name, dtype in dtypes.items():
        if name not in arrays or arrays[name].dtype != dtype:
            raise ValueError(f"buffer state: {name} is missing or is not {np.dtype(dtype)}")


def require_lengths(name: str, lengths: np.ndarray, total: int, least: int) -> None:
    """Raise ValueError unless lengths are at least ``least`` and sum to ``total``."""
    if lengths.size and (lengths.min() < least or lengths.max() > total):
        raise ValueError(f"buffer state: {name} has values outside {least}..{total}")
    if lengths.sum(dtype=np.int64) != total:
        raise ValueError(f"buffer state: {name} sums to {lengths.sum()}, not {total}")


def all_valid(trajectories: Sequence[Trajectory]) -> bool:
    """Whether all keep the rules of ``trajectory.check``, as far as a quick look can tell.

    False means that each must be checked by itself, as numbers of other types can be valid too.
    """

    def values(name: str) -> list:
        return list(map(attrgetter(name), trajectories))

    def all_of(kind: type, items: Iterable) -> bool:
        return set(map(type, items)) <= {kind}

    if not trajectories:
        return True
    lengths = {}
    for name, dtype in _ARRAYS.items():
        arrays = values(name)
        if not all_of(np.ndarray, arrays):
            return False
        if set(map(attrgetter("dtype", "ndim"), arrays)) != {(dtype, 1)}:
            return False
        lengths[name] = list(map(len, arrays))
    responses = lengths["response_tokens"]
    if min(responses) < 1:
        return False
    del lengths["prompt_tokens"]
    if any(items != responses for items in lengths.values()):
        return False
    integers = {name: values(name) for name in _INTEGERS}
    for numbers in integers.values():
        if not all_of(int, numbers) or min(numbers) < -(2**63) or max(numbers) >= 2**63:
            return False
    if min(integers["reference_version"]) < -1:
        return False
    # Of several versions each token's is to be looked at.
    if integers["version_start"] != integers["version_end"]:
        return False
    if not all_of(type(None), values("version_offsets")):
        return False
    parts = values("reward_parts")
    numbers = [*values("reward"), *chain.from_iterable(p.values() for p in parts)]
    names = chain.from_iterable(parts)
    return (
        all_of(float, numbers)
        and all(map(math.isfinite, numbers))
        and all_of(str, names)
        and all_of(bool, values("truncated"))
    )


def _old_differs(t: Trajectory) -> bool:
    old, behavior = t.old_logprobs, t.behavior_logprobs
    # By bytes, because NaN marks what is not known and isn't equal to itself.
    return old is not behavior and old.tobytes() != behavior.tobytes()


def _join(out: np.ndarray, pieces: Iterator[np.ndarray]) -> None:
    end = 0
    for piece in pieces:
        out[end : end + piece.shape[0]] = piece
        end += piece.shape[0]
    assert end == out.shape[0]
