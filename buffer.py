"""The rank-local prioritized replay buffer (arXiv 2503.18929, section 4.2) and its sampling rules.

``Buffer.add`` takes the trajectories that arrived, ``Buffer.new_window`` marks a publication of
weights, ``Buffer.draw`` gives groups of responses to train on: a slot is filled from what arrived
since the last publication with probability ``recency_prob``, else from the whole store by a rule.
Everything lies in flat numpy arrays (``_Store``). One thread may use a buffer; nothing here locks.

To add a sampling rule, write a function ``(entries, k, rng) -> indices [k]`` here and a
``conf/buffer/<name>.yaml`` with ``_target_: buffer.<function>`` and ``_partial_: true``.
Letters: n items of one prompt, k drawn of them, R rows (trajectories) of the store, T tokens.
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

import numpy as np

from trajectory import Trajectory, check

MIN_GROUP = 2  # VarGrad estimates log Z from the group's other responses, so one is not enough


@dataclass(slots=True, kw_only=True, frozen=True)
class Entries:
    """What a sampling rule sees of one prompt's items, in order of arrival; read-only."""

    rewards: np.ndarray  # float64 [n]
    versions: np.ndarray  # int64 [n], weights version of the first token
    arrivals: np.ndarray  # int64 [n], ascending; the number of trajectories stored before this one

    def __len__(self) -> int:
        return self.rewards.shape[0]


@dataclass(slots=True, kw_only=True)
class Group:
    """Responses of one prompt, drawn together; made by ``Buffer.draw``."""

    prompt_id: int
    trajectories: list[Trajectory]  # copies; only the prompt's tokens are shared, and read-only
    uses: list[int]  # how often each had been drawn before this draw


Rule = Callable[[Entries, int, np.random.Generator], np.ndarray]


def uniform(entries: Entries, k: int, rng: np.random.Generator) -> np.ndarray:
    """Draw k items with equal probability, without replacement.

    Args:
        entries: the n items of a prompt.
        k: how many to draw, 1 <= k <= n.
        rng: the buffer's generator.

    Returns:
        int64 [k], distinct indices in 0..n-1, in random order.
    """
    return rng.permutation(len(entries))[:k]


def softmax_of_reward(
    entries: Entries, k: int, rng: np.random.Generator, *, inverse_temperature: float
) -> np.ndarray:
    """Draw k items one after another, each by a softmax over the rewards of those that are left.

    P(i) = exp(inverse_temperature * r_i) / sum_j exp(inverse_temperature * r_j), arXiv 2503.18929,
    section 4.2; 0 is uniform. The k largest of log P(i) + Gumbel noise, in falling order, are
    exactly k such successive draws without replacement (Kool, van Hoof and Welling 2019, arXiv
    1903.06059, section 2.3), and the normalizer of P cancels in that order.

    Args:
        entries: the n items of a prompt.
        k: how many to draw, 1 <= k <= n.
        rng: the buffer's generator.
        inverse_temperature: per unit of reward; negative prefers low rewards.

    Returns:
        int64 [k], distinct indices in 0..n-1, in the order drawn.

    Raises:
        ValueError: ``inverse_temperature`` is not finite.
    """
    if not math.isfinite(inverse_temperature):
        raise ValueError(
            f"softmax_of_reward: inverse_temperature must be finite, got {inverse_temperature}"
        )
    logits = inverse_temperature * entries.rewards
    # Near the maximum, where it matters, the noise must not drown in the rounding of large logits.
    keys = logits - logits.max() + rng.gumbel(size=len(entries))  # [n]
    return np.argsort(-keys, kind="stable")[:k]


class _Cycle:
    """A set of prompts that are drawn in turn: none comes again before all others have come.

    ``fresh`` are still to come, in no particular order; ``used`` wait for the next round, which
    starts when nothing fresh can be drawn. All operations take constant time, but for a new round.
    """

    def __init__(self, fresh: Iterable[int] = (), used: Iterable[int] = ()) -> None:
        self.fresh = list(fresh)
        self.used = dict.fromkeys(used)
        self._position = {prompt_id: i for i, prompt_id in enumerate(self.fresh)}

    def __len__(self) -> int:
        return len(self.fresh) + len(self.used)

    def set_member(self, prompt_id: int, member: bool) -> None:
        """Let a prompt take part or not; one that is new here is fresh, others keep their turn."""
        if not member:
            self.used.pop(prompt_id, None)
            if prompt_id in self._position:
                self._remove_fresh(prompt_id)
        elif prompt_id not in self._position and prompt_id not in self.used:
            self._add_fresh(prompt_id)

    def draw(self, rng: np.random.Generator, taken: set[int]) -> int | None:
        """The next prompt, uniform over the fresh ones not in ``taken``; None if none is left."""
        if sum(p in self._position for p in taken) == len(self.fresh):
            if sum(p in self.used for p in taken) == len(self.used):
                return None
            for prompt_id in self.used:
                self._add_fresh(prompt_id)
            self.used = {}
        while True:  # a fresh prompt that isn't taken exists, and taken is no longer than one draw
            prompt_id = self.fresh[int(rng.integers(len(self.fresh)))]
            if prompt_id not in taken:
                break
        self._remove_fresh(prompt_id)
        self.used[prompt_id] = None
        return prompt_id

    def _add_fresh(self, prompt_id: int) -> None:
        self._position[prompt_id] = len(self.fresh)
        self.fresh.append(prompt_id)

    def _remove_fresh(self, prompt_id: int) -> None:
        position = self._position.pop(prompt_id)
        last = self.fresh.pop()
        if last != prompt_id:
            self.fresh[position] = last
            self._position[last] = position


_ROW = np.dtype(
    [
        ("prompt_id", np.int64),
        ("start", np.int64),  # of its tokens in the arenas
        ("length", np.int64),
        ("reward", np.float64),
        ("version_start", np.int64),
        ("version_end", np.int64),
        ("uses", np.int64),
        ("truncated", np.bool_),
        ("live", np.bool_),
    ],
    align=True,
)
# Columns of a row that a saved state holds as they are; ``start`` and ``live`` follow from them.
_SAVED = ("prompt_id", "length", "reward", "version_start", "version_end", "uses", "truncated")
_ARENAS = (("tokens", np.int32), ("behavior", np.float32), ("reference", np.float32))
_COPY_TOKENS = 1 << 18  # tokens moved at a time by a compaction


class _Store:
    """Trajectories in flat arrays: rows in order of arrival, their tokens in the same order.

    A trajectory is known by its arrival number, which never changes, while its row moves when the
    store is compacted; ``rows_of`` finds it by binary search. Removal only marks a row, and the
    space comes back when an array is full and a quarter of it is garbage. That keeps the arenas at
    about 4/3 of the live tokens, 16 bytes for each, and every token is moved about 3 times in all.
    """

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.num_rows = 0  # live or not
        self.num_live = 0
        self.end = 0  # tokens written to each arena
        self.live_tokens = 0  # response tokens of live rows
        self.arrivals = np.empty(16, np.int64)  # [R], ascending
        self.rows = np.empty(16, _ROW)
        self.parts: dict[str, np.ndarray] = {}  # name -> float64 [R], NaN: no such part
        self.arenas = {name: np.empty(0, dtype) for name, dtype in _ARENAS}  # [T]
        self._head = 0  # no row before it is live

    def append(self, t: Trajectory, arrival: int) -> None:
        length = t.response_tokens.shape[0]
        self._reserve(length)
        row, start, end = self.num_rows, self.end, self.end + length
        self.arenas["tokens"][start:end] = t.response_tokens
        self.arenas["behavior"][start:end] = t.behavior_logprobs
        self.arenas["reference"][start:end] = t.reference_logprobs
        self.arrivals[row] = arrival
        self.rows[row] = (
            *(t.prompt_id, start, length, t.reward, t.version_start, t.version_end, 0),
            *(t.truncated, True),
        )
        for name in t.reward_parts.keys() - self.parts.keys():
            self.parts[name] = np.full(self.rows.shape[0], np.nan)
        for name, values in self.parts.items():
            values[row] = t.reward_parts.get(name, np.nan)
        self.num_rows += 1
        self.num_live += 1
        self.end = end
        self.live_tokens += length

    def remove(self, arrival: int) -> None:
        row = int(self.rows_of(arrival))
        assert self.rows["live"][row]
        self.rows["live"][row] = False
        self.num_live -= 1
        self.live_tokens -= int(self.rows["length"][row])

    def rows_of(self, arrivals: int | Sequence[int]) -> np.ndarray:
        """Row of each arrival number, which must be one that is stored."""
        return np.searchsorted(self.arrivals[: self.num_rows], arrivals)

    def oldest(self) -> tuple[int, int]:
        """Prompt and arrival number of the earliest arrival that is stored; there must be one."""
        live = self.rows["live"]
        while not live[self._head]:
            self._head += 1
        return int(self.rows["prompt_id"][self._head]), int(self.arrivals[self._head])

    def response_bytes(self, arrival: int) -> bytes:
        row = self.rows[int(self.rows_of(arrival))]
        start = int(row["start"])
        return self.arenas["tokens"][start : start + int(row["length"])].tobytes()

    def entries(self, rows: np.ndarray) -> Entries:
        columns = (self.rows["reward"][rows], self.rows["version_start"][rows], self.arrivals[rows])
        for column in columns:
            column.flags.writeable = False
        return Entries(rewards=columns[0], versions=columns[1], arrivals=columns[2])

    def read(self, rows: np.ndarray, prompt_tokens: np.ndarray) -> list[Trajectory]:
        """Trajectories of one prompt; their arrays are copies, as a compaction moves the tokens."""
        part_names = list(self.parts)
        part_values = [self.parts[name][rows].tolist() for name in part_names]
        parts = list(zip(*part_values, strict=True)) if part_names else [()] * len(rows)
        trajectories = []
        for row, values in zip(self.rows[rows].tolist(), parts, strict=True):
            prompt_id, start, length, reward, version_start, version_end, _, truncated, live = row
            assert live
            tokens = slice(start, start + length)
            trajectories.append(
                Trajectory(
                    prompt_id=prompt_id,
                    prompt_tokens=prompt_tokens,
                    response_tokens=self.arenas["tokens"][tokens].copy(),
                    behavior_logprobs=self.arenas["behavior"][tokens].copy(),
                    reference_logprobs=self.arenas["reference"][tokens].copy(),
                    reward=reward,
                    reward_parts={
                        n: v for n, v in zip(part_names, values, strict=True) if not math.isnan(v)
                    },
                    version_start=version_start,
                    version_end=version_end,
                    truncated=truncated,
                )
            )
        return trajectories

    def compact(self) -> None:
        """Move the live rows and their tokens together, in place, keeping their order."""
        live = np.flatnonzero(self.rows["live"][: self.num_rows])
        starts, lengths = self.rows["start"][live], self.rows["length"][live]
        ends = np.cumsum(lengths)  # the new ends
        first = 0
        while first < live.size:
            written = int(ends[first] - lengths[first])
            # At least one response, else as many as fit in a piece.
            last = max(first + 1, int(np.searchsorted(ends, written + _COPY_TOKENS, "right")))
            piece = slice(first, last)
            size = int(ends[last - 1]) - written
            # Token j of the piece lies at its response's start + its offset in that response.
            shift = starts[piece] - (ends[piece] - lengths[piece] - written)
            source = np.repeat(shift, lengths[piece]) + np.arange(size)  # [size]
            for arena in self.arenas.values():
                # Tokens only move to the front, and the gather is complete before it is written.
                arena[written : written + size] = arena[source]
            first = last
        n = live.size
        self.arrivals[:n] = self.arrivals[live]
        self.rows[:n] = self.rows[live]
        self.rows["start"][:n] = ends - lengths
        for values in self.parts.values():
            values[:n] = values[live]
        self.num_rows = n
        self.end = self.live_tokens
        self._head = 0

    def _reserve(self, tokens: int) -> None:
        """Make room for one more row of ``tokens`` tokens."""
        full = self.num_rows == self.rows.shape[0]
        full_arena = self.end + tokens > self.arenas["tokens"].shape[0]
        if (full and 4 * (self.num_rows - self.num_live) >= self.num_rows) or (
            full_arena and 4 * (self.end - self.live_tokens) >= self.end
        ):
            self.compact()
        if self.num_rows == self.rows.shape[0]:
            size = self.num_rows + self.num_rows // 4 + 1
            self.arrivals = _grown(self.arrivals, size)
            self.rows = _grown(self.rows, size)
            for name, values in self.parts.items():
                self.parts[name] = _grown(values, size)
        needed = self.end + tokens
        if needed > self.arenas["tokens"].shape[0]:
            # When 4/3 of max_tokens are written a quarter is garbage, so more is never needed.
            size = max(needed, min(needed + needed // 4 + 1024, self.max_tokens * 4 // 3 + 1))
            for (
                name
            ) in self.arenas:  # one at a time: the old and the new of one coexist, not of all
                self.arenas[name] = _grown(self.arenas[name], size)


def _grown(array: np.ndarray, size: int) -> np.ndarray:
    grown = np.empty(size, array.dtype)
    grown[: array.shape[0]] = array
    return grown


@dataclass(slots=True)
class _Prompt:
    tokens: bytes  # int32 tokens of the prompt, stored once
    items: list[int] = field(default_factory=list)  # arrival numbers, ascending
    item_of: dict[int, int] = field(default_factory=dict)  # hash of a response -> arrival number


class Buffer:
    """Replay buffer of one trainer rank: bounded, deduplicated, drawn by recency or by a rule.

    Stored: per prompt at most ``capacity_per_prompt`` responses, of which the one with the oldest
    version (of its first token; among equals the earliest arrival) goes first, be it the newcomer;
    over all at most ``max_tokens``, of which the earliest arrivals go first. With ``deduplicate``
    a response whose tokens its prompt already has replaces the older record, counts as newly
    arrived, and has not been used yet, whatever its version.

    The recency window is what arrived since the first trajectory that was stored after the last
    ``new_window()``; it is thus never empty once anything is stored. Being in it is a comparison of
    arrival numbers, so that replaced and evicted items can't be counted.

    Departures from the paper and its code: ``fill_groups`` is off, so that a prompt with fewer than
    k items gives a smaller group, where they fill it up by repeating items; and only prompts with
    at least 2 items to choose from (of the window, when the window is drawn from) are drawn.

    What is drawn is a function of the seed and the sequence of calls, nothing else. Used by one
    thread only.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        deduplicate: bool,
        recency_prob: float,
        rule: Rule,
        seed: int,
        capacity_per_prompt: int = 100,
        fill_groups: bool = False,
    ) -> None:
        """Make an empty buffer.

        Args:
            max_tokens: bound on the stored tokens, responses plus each prompt once.
            deduplicate: keep one record per distinct response of a prompt.
            recency_prob: probability m that a slot is drawn from the recency window, 0..1.
            rule: draws from a prompt's items for the other slots, see ``uniform``.
            seed: of the generator of all draws.
            capacity_per_prompt: most responses kept of a prompt, at least 2.
            fill_groups: give every group k items, by repeating some where a prompt has fewer.

        Raises:
            ValueError: a value is out of its range.
        """
        if capacity_per_prompt < MIN_GROUP:
            raise ValueError(
                f"buffer.capacity_per_prompt must be >= {MIN_GROUP}, got {capacity_per_prompt}"
            )
        if max_tokens < 1:
            raise ValueError(f"buffer.max_tokens must be at least 1, got {max_tokens}")
        if not 0 <= recency_prob <= 1:
            raise ValueError(f"buffer.recency_prob must be in 0..1, got {recency_prob}")
        self.capacity_per_prompt = capacity_per_prompt
        self.max_tokens = max_tokens
        self.deduplicate = deduplicate
        self.recency_prob = recency_prob
        self.rule = rule
        self.fill_groups = fill_groups
        # Counters since the start of the run; all are trajectories.
        self.num_received = 0  # = stored now + duplicates + evicted + dropped
        self.num_duplicates = 0  # replaced an older record of the same response
        self.num_evicted = 0  # stored, then removed to keep the bounds
        self.num_dropped = 0  # never stored: longer than max_tokens, or too old for a full prompt
        self._rng = np.random.default_rng(seed)
        self._store = _Store(max_tokens)
        self._prompts: dict[int, _Prompt] = {}
        self._prompt_tokens = 0
        self._next_arrival = 0
        self._window_start = 0  # items with this arrival number or a later one are in the window
        self._window_pending = False
        # The prompts that can be drawn: of the whole store, and of the window.
        self._everything = _Cycle()
        self._window = _Cycle()

    @property
    def num_trajectories(self) -> int:
        return self._store.num_live

    @property
    def num_prompts(self) -> int:
        return len(self._prompts)

    @property
    def num_tokens(self) -> int:
        """Stored tokens: those of the responses, and of each prompt once."""
        return self._store.live_tokens + self._prompt_tokens

    @property
    def fill(self) -> float:
        """Share of ``max_tokens`` in use, 0..1."""
        return self.num_tokens / self.max_tokens

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Store trajectories in the given order, copying them.

        Raises:
            ValueError: a record breaks its own rules, or its prompt's tokens differ from those
                stored for its prompt_id. Those before it in ``trajectories`` are stored.
        """
        for trajectory in trajectories:
            check(trajectory)
            self._add(trajectory)

    def new_window(self) -> None:
        """Begin a new recency window with the next trajectory stored; till then keep the old."""
        self._window_pending = True

    def ready(self, num_prompts: int) -> bool:
        """Whether ``draw(num_prompts, k)`` would give ``num_prompts`` groups."""
        return len(self._everything) >= num_prompts

    def draw(self, num_prompts: int, k: int) -> list[Group]:
        """Draw responses of ``num_prompts`` different prompts and count the use of each.

        Each slot decides by itself: with probability ``recency_prob`` it takes the next prompt of
        the window and draws of its window items uniformly; otherwise, or if the window has no
        prompt that this draw can still take, it takes the next prompt of the whole store and draws
        of its items by the rule. Window and store each take their prompts in turn, none again
        before the others have come (arXiv 2503.18929, section 4.2). A prompt takes part while it
        has at least 2 items to choose from.

        Args:
            num_prompts: slots, at least 1.
            k: responses per prompt, at least 2.

        Returns:
            At most ``num_prompts`` groups of different prompts; fewer only if the whole store has
            fewer prompts with 2 items. A group has min(k, items) >= 2 different items, or with
            ``fill_groups`` always k, among them each of the items if there are fewer than k.

        Raises:
            ValueError: an argument is too small, or the rule returned something else than k
                distinct indices.
        """
        if num_prompts < 1 or k < MIN_GROUP:
            raise ValueError(
                f"draw needs at least 1 prompt and {MIN_GROUP} responses of each, "
                f"got num_prompts={num_prompts}, k={k}"
            )
        groups: list[Group] = []
        taken: set[int] = set()
        for _ in range(num_prompts):
            prompt_id = None
            recent = bool(self._rng.random() < self.recency_prob)
            if recent:
                prompt_id = self._window.draw(self._rng, taken)
            if prompt_id is None:
                recent = False
                prompt_id = self._everything.draw(self._rng, taken)
            if prompt_id is None:
                break
            taken.add(prompt_id)
            groups.append(self._draw_group(prompt_id, k, recent))
        return groups

    def _draw_group(self, prompt_id: int, k: int, recent: bool) -> Group:
        prompt = self._prompts[prompt_id]
        rows = self._store.rows_of(self._window_items(prompt) if recent else prompt.items)  # [n]
        entries = self._store.entries(rows)
        rule = uniform if recent else self.rule
        chosen = self._apply(rule, entries, min(k, len(entries)))
        if self.fill_groups and k > len(entries):
            # All items are in; each further place is a draw of its own from all of them.
            more = [self._apply(rule, entries, 1) for _ in range(k - len(entries))]
            chosen = np.concatenate([chosen, *more])
        rows = rows[chosen]  # [k]
        uses = self._store.rows["uses"]
        group = Group(
            prompt_id=prompt_id,
            trajectories=self._store.read(rows, np.frombuffer(prompt.tokens, np.int32)),
            uses=uses[rows].tolist(),
        )
        np.add.at(uses, rows, 1)  # counts an item twice where a filled group holds it twice
        return group

    def _apply(self, rule: Rule, entries: Entries, k: int) -> np.ndarray:
        chosen = np.asarray(rule(entries, k, self._rng))
        if chosen.shape != (k,) or chosen.dtype.kind not in "iu":
            raise ValueError(
                f"buffer.rule must return {k} integer indices, got {chosen.dtype} {chosen.shape}"
            )
        if len(set(chosen.tolist())) != k or chosen.min() < 0 or chosen.max() >= len(entries):
            raise ValueError(
                f"buffer.rule must return distinct indices in 0..{len(entries) - 1}, got {chosen}"
            )
        return chosen

    def _window_items(self, prompt: _Prompt) -> list[int]:
        return prompt.items[bisect_left(prompt.items, self._window_start) :]

    def _add(self, t: Trajectory) -> None:
        self.num_received += 1
        prompt_id = int(t.prompt_id)
        prompt = self._prompts.get(prompt_id)
        prompt_bytes = t.prompt_tokens.tobytes()
        if prompt is not None and prompt.tokens != prompt_bytes:
            self.num_received -= 1
            raise ValueError(
                f"trajectory of prompt {prompt_id}: its prompt_tokens differ from those stored; "
                "a prompt_id must always mean the same prompt, formatted and tokenized the same way"
            )
        length, prompt_length = t.response_tokens.shape[0], t.prompt_tokens.shape[0]
        if length + prompt_length > self.max_tokens:
            self.num_dropped += 1
            return

        response = t.response_tokens.tobytes()
        key = _response_hash(response)
        if prompt is not None:
            twin = prompt.item_of.get(key) if self.deduplicate else None
            if twin is not None and self._store.response_bytes(twin) == response:
                self.num_duplicates += 1
                self._remove(prompt_id, twin)
            if len(prompt.items) == self.capacity_per_prompt:
                version, arrival = self._oldest_version(prompt)
                if t.version_start < version:
                    self.num_dropped += 1
                    return
                self.num_evicted += 1
                self._remove(prompt_id, arrival)
        touched = {prompt_id}
        # Evicting may take the prompt's own last item, and the prompt with it: look again each turn
        while (
            self.num_tokens + length + (0 if prompt_id in self._prompts else prompt_length)
            > self.max_tokens
        ):
            owner, arrival = self._store.oldest()
            self.num_evicted += 1
            self._remove(owner, arrival)
            touched.add(owner)

        if self._window_pending:
            self._window_pending = False
            self._window_start = self._next_arrival
            self._window = _Cycle()
        if prompt_id not in self._prompts:
            self._prompts[prompt_id] = _Prompt(prompt_bytes)
            self._prompt_tokens += prompt_length
        prompt = self._prompts[prompt_id]
        arrival = self._next_arrival
        self._next_arrival += 1
        self._store.append(t, arrival)
        prompt.items.append(arrival)
        if self.deduplicate:
            prompt.item_of[key] = arrival
        # Only now: a prompt that loses an item and gets one back must not lose its turn.
        for changed in touched:
            self._update_cycles(changed)

    def _oldest_version(self, prompt: _Prompt) -> tuple[int, int]:
        """Version and arrival number of the item that goes first when the prompt is full."""
        versions = self._store.rows["version_start"][self._store.rows_of(prompt.items)]
        oldest = int(versions.argmin())  # the first, hence the earliest, of equals
        return int(versions[oldest]), prompt.items[oldest]

    def _remove(self, prompt_id: int, arrival: int) -> None:
        prompt = self._prompts[prompt_id]
        if self.deduplicate:
            key = _response_hash(self._store.response_bytes(arrival))
            # If two responses ever share a hash, the entry is the later one's.
            if prompt.item_of.get(key) == arrival:
                del prompt.item_of[key]
        del prompt.items[bisect_left(prompt.items, arrival)]
        self._store.remove(arrival)
        if not prompt.items:
            self._prompt_tokens -= len(prompt.tokens) // 4
            del self._prompts[prompt_id]

    def _update_cycles(self, prompt_id: int) -> None:
        prompt = self._prompts.get(prompt_id)
        items = prompt.items if prompt is not None else []
        recent = len(items) - bisect_left(items, self._window_start)
        self._everything.set_member(prompt_id, len(items) >= MIN_GROUP)
        self._window.set_member(prompt_id, recent >= MIN_GROUP)

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue with the same later draws.

        Returns:
            ``{"arrays": ..., "meta": ...}``: ``arrays`` is a flat dict of numpy arrays that are
            copies (safe to write in another thread), ``meta`` is plain JSON (its generator state
            holds ints of 128 bits). Settings are not in it: those of the loading buffer hold.
        """
        store = self._store
        store.compact()
        n = store.num_rows
        prompts = self._prompts
        arrays = {name: store.rows[name][:n].copy() for name in _SAVED}
        arrays["arrival"] = store.arrivals[:n].copy()
        arrays["parts"] = np.empty((n, len(store.parts)))  # [R, parts]
        for i, values in enumerate(store.parts.values()):
            arrays["parts"][:, i] = values[:n]
        for name, arena in store.arenas.items():
            arrays[name] = arena[: store.end].copy()
        arrays["prompt.id"] = np.array(list(prompts), np.int64)
        arrays["prompt.length"] = np.array([len(p.tokens) // 4 for p in prompts.values()], np.int64)
        arrays["prompt.tokens"] = np.frombuffer(
            b"".join(p.tokens for p in prompts.values()), np.int32
        ).copy()
        for name, cycle in (("everything", self._everything), ("window", self._window)):
            arrays[f"{name}.fresh"] = np.array(cycle.fresh, np.int64)
            arrays[f"{name}.used"] = np.array(list(cycle.used), np.int64)
        meta = {name: getattr(self, name) for name in _COUNTERS}
        meta["part_names"] = list(store.parts)
        meta["window_pending"] = self._window_pending
        meta["rng"] = self._rng.bit_generator.state
        return {"arrays": arrays, "meta": meta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents, counters and generator by those of a saved state.

        Where this buffer's bounds are smaller than the saved one's, what is too much is evicted.

        Raises:
            ValueError: the state is incomplete or contradicts itself; the buffer is then unchanged.
        """
        arrays, meta = state["arrays"], state["meta"]
        _check_state(arrays, meta)
        rng = np.random.default_rng(0)
        try:
            rng.bit_generator.state = meta["rng"]
        except (TypeError, KeyError, ValueError, OverflowError) as error:
            raise ValueError(f"buffer state: rng is not a generator's state: {error}") from error

        n, num_tokens = arrays["arrival"].shape[0], arrays["tokens"].shape[0]
        store = _Store(self.max_tokens)
        store.num_rows = store.num_live = n
        store.end = store.live_tokens = num_tokens
        store.arrivals = arrays["arrival"].copy()
        store.rows = np.zeros(n, _ROW)
        for name in _SAVED:
            store.rows[name] = arrays[name]
        store.rows["start"] = np.cumsum(arrays["length"]) - arrays["length"]
        store.rows["live"] = True
        store.parts = {
            name: arrays["parts"][:, i].copy() for i, name in enumerate(meta["part_names"])
        }
        store.arenas = {name: arrays[name].copy() for name, _ in _ARENAS}

        prompts: dict[int, _Prompt] = {}
        end = 0
        for prompt_id, length in zip(
            arrays["prompt.id"].tolist(), arrays["prompt.length"].tolist(), strict=True
        ):
            prompts[prompt_id] = _Prompt(arrays["prompt.tokens"][end : end + length].tobytes())
            end += length
        for prompt_id, arrival in zip(
            arrays["prompt_id"].tolist(), arrays["arrival"].tolist(), strict=True
        ):
            if prompt_id not in prompts:
                raise ValueError(f"buffer state: prompt {prompt_id} has responses but no tokens")
            prompt = prompts[prompt_id]
            prompt.items.append(arrival)
            if self.deduplicate:
                prompt.item_of[_response_hash(store.response_bytes(arrival))] = arrival
        cycles = []
        window_start = meta["_window_start"]
        for name, since in (("everything", 0), ("window", window_start)):
            cycle = _Cycle(arrays[f"{name}.fresh"].tolist(), arrays[f"{name}.used"].tolist())
            members = [
                prompt_id
                for prompt_id, prompt in prompts.items()
                if len(prompt.items) - bisect_left(prompt.items, since) >= MIN_GROUP
            ]
            if sorted([*cycle.fresh, *cycle.used]) != sorted(members):
                raise ValueError(
                    f"buffer state: {name}.fresh and .used are not the prompts to draw"
                )
            cycles.append(cycle)

        self._rng = rng
        self._store = store
        self._prompts = prompts
        self._prompt_tokens = end
        self._everything, self._window = cycles
        self._window_pending = meta["window_pending"]
        for name in _COUNTERS:
            setattr(self, name, meta[name])
        self._evict_to_bounds()

    def _evict_to_bounds(self) -> None:
        for prompt_id, prompt in list(self._prompts.items()):
            while len(prompt.items) > self.capacity_per_prompt:
                self.num_evicted += 1
                self._remove(prompt_id, self._oldest_version(prompt)[1])
                self._update_cycles(prompt_id)
        while self.num_tokens > self.max_tokens:
            prompt_id, arrival = self._store.oldest()
            self.num_evicted += 1
            self._remove(prompt_id, arrival)
            self._update_cycles(prompt_id)


_COUNTERS = (
    "num_received",
    "num_duplicates",
    "num_evicted",
    "num_dropped",
    "_next_arrival",
    "_window_start",
)


def _response_hash(response: bytes) -> int:
    """64 bits of a response's tokens, the same in every process (unlike Python's hash)."""
    return int.from_bytes(blake2b(response, digest_size=8).digest(), "little")


def _check_state(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Raise ValueError unless a saved state has its arrays, with the sizes that they imply."""
    for name in (*_COUNTERS, "part_names", "window_pending", "rng"):
        if name not in meta:
            raise ValueError(f"buffer state: meta lacks {name}")
    dtypes: dict[str, Any] = {name: _ROW[name] for name in _SAVED} | dict(_ARENAS)
    dtypes |= {"arrival": np.int64, "parts": np.float64, "prompt.tokens": np.int32}
    for name in ("prompt.id", "prompt.length"):
        dtypes[name] = np.int64
    for name in ("everything", "window"):
        dtypes |= {f"{name}.fresh": np.int64, f"{name}.used": np.int64}
    for name, dtype in dtypes.items():
        if name not in arrays or arrays[name].dtype != dtype:
            raise ValueError(f"buffer state: {name} is missing or is not {np.dtype(dtype)}")
    rows = arrays["arrival"].shape[0]
    tokens = arrays["tokens"].shape[0]
    shapes: dict[str, tuple[int, ...]] = {name: (rows,) for name in _SAVED}
    shapes |= {name: (tokens,) for name, _ in _ARENAS}
    shapes["parts"] = (rows, len(meta["part_names"]))
    shapes["prompt.length"] = arrays["prompt.id"].shape
    for name, shape in shapes.items():
        if arrays[name].shape != shape:
            raise ValueError(f"buffer state: {name} has shape {arrays[name].shape}, not {shape}")
    for name, lengths, total, least in (
        ("length", arrays["length"], tokens, 1),
        ("prompt.length", arrays["prompt.length"], arrays["prompt.tokens"].shape[0], 0),
    ):
        if lengths.size and (lengths.min() < least or lengths.max() > total):
            raise ValueError(f"buffer state: {name} has values outside {least}..{total}")
        if lengths.sum() != total:
            raise ValueError(f"buffer state: {name} sums to {lengths.sum()}, not {total}")
    if rows and (np.diff(arrays["arrival"]).min(initial=1) < 1 or arrays["arrival"][0] < 0):
        raise ValueError("buffer state: arrival is not strictly ascending from 0 or more")
    if rows and arrays["arrival"][-1] >= meta["_next_arrival"]:
        raise ValueError("buffer state: arrival goes beyond _next_arrival")
