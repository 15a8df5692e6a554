"""The rank-local prioritized replay buffer (arXiv 2503.18929, section 4.2) and its sampling rules.

``Buffer.add`` takes the trajectories that arrived, ``Buffer.new_window`` marks a publication of
weights, ``Buffer.draw`` gives groups of responses to train on: a slot is filled from what arrived
since the last publication with probability ``recency_prob``, else from the whole store by a rule.
Everything lies in flat numpy arrays (store.py); prompt_choice.py says which prompt is next. One
thread may use a buffer; nothing here locks.

To add a sampling rule, write a function ``(entries, k, rng) -> indices [k]`` here and a
``conf/buffer/<name>.yaml`` with ``_target_: buffer.<function>`` and ``_partial_: true``.
Letters: n items of one prompt, k drawn of them, R rows (trajectories) of the store, T tokens.
"""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice
from typing import Any

import numpy as np

from prompt_choice import ByReward, InTurn
from store import FLUSH_ROWS, Store, all_valid, check_state, require_arrays, require_lengths
from trajectory import Trajectory, check

MIN_GROUP = 2  # VarGrad estimates log Z from the group's other responses, so one is not enough
_EVICTIONS = ("oldest", "lowest_reward")
_PRIORITIES = ("none", "reward_variance", "difficulty")


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
    # Nothing changes what is in them; but their arrays are read-only views of a part of the store,
    # which they keep in memory, so that a copy should be made of what is to live long.
    trajectories: list[Trajectory]
    uses: list[int]  # how often each had been drawn before this draw
    items: list[int]  # arrival number of each, by which ``Buffer.set_reference`` knows it


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


@dataclass(slots=True)
class _Prompt:
    """The stored items of one prompt in the order in which they would be evicted."""

    tokens: bytes  # int32 tokens of the prompt, stored once
    keys: array  # what the order is by, version or reward, ascending
    rows: array = field(default_factory=lambda: array("q"))  # of the store; ascending among equals
    item_of: dict[int, int] = field(default_factory=dict)  # hash of a response -> arrival number

    def insert(self, key: float, row: int) -> None:
        """Add an item that arrived after all others."""
        position = bisect_right(self.keys, key)
        self.keys.insert(position, key)
        self.rows.insert(position, row)

    def find(self, key: float, row: int) -> int:
        """Position of an item in the order of eviction."""
        first = bisect_left(self.keys, key)
        return bisect_left(self.rows, row, first, bisect_right(self.keys, key, first))

    def remove(self, position: int) -> None:
        self.keys.pop(position)
        self.rows.pop(position)


class Buffer:
    """Replay buffer of one trainer rank: bounded, deduplicated, drawn by recency or by a rule.

    Stored: per prompt at most ``capacity_per_prompt`` responses, of which the one with the oldest
    version (of its first token; among equals the earliest arrival) goes first, be it the newcomer;
    over all at most ``max_tokens``, of which the earliest arrivals go first. With ``eviction``
    "lowest_reward" both bounds let the lowest reward go first, among equals the earliest arrival;
    for ``max_tokens`` the newcomer always stays. With ``deduplicate`` a response whose tokens its
    prompt already has replaces the older record, counts as newly arrived, and has not been used
    yet, whatever its version. ``max_staleness`` bounds by version what ``expire`` leaves,
    ``max_uses`` how often an item is drawn: after the last time it is removed.

    The recency window is what arrived since the first trajectory that was stored after the last
    ``new_window()``; unless it expires it is thus never empty once anything is stored. Being in it
    is a comparison of arrival numbers, so that replaced and evicted items can't be counted.

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
        eviction: str = "oldest",
        max_staleness: int | None = None,
        max_uses: int | None = None,
        prompt_priority: str = "none",
        prompt_temperature: float = 1.0,
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
            eviction: what goes first at a bound, "oldest" or "lowest_reward".
            max_staleness: versions that an item may lag behind the one given to ``expire``, at
                least 0; None: nothing expires.
            max_uses: draws after which an item is removed, at least 1; None: never for that.
            prompt_priority: which prompt the slots outside of the recency window take: "none", each
                in its turn; "reward_variance" or "difficulty", by chance with the weights of
                ``prompt_choice.ByReward``, a prompt at most once in a draw.
            prompt_temperature: of "difficulty", in units of reward, more than 0.

        Raises:
            ValueError: a value is out of its range.
        """
        if capacity_per_prompt < MIN_GROUP:
            raise ValueError(
                f"buffer.capacity_per_prompt must be >= {MIN_GROUP}, got {capacity_per_prompt}"
            )
        if max_tokens < 1:
            raise ValueError(f"buffer.max_tokens must be at least 1, got {max_tokens}")
        _check_recency_prob(recency_prob)
        if eviction not in _EVICTIONS:
            raise ValueError(f"buffer.eviction must be one of {_EVICTIONS}, got {eviction!r}")
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"buffer.max_staleness must be null or >= 0, got {max_staleness}")
        if max_uses is not None and max_uses < 1:
            raise ValueError(f"trainer.max_reuse must be null or >= 1, got {max_uses}")
        if prompt_priority not in _PRIORITIES:
            raise ValueError(
                f"buffer.prompt_priority must be one of {_PRIORITIES}, got {prompt_priority!r}"
            )
        if not (prompt_temperature > 0 and math.isfinite(prompt_temperature)):
            raise ValueError(
                f"buffer.prompt_temperature must be more than 0, got {prompt_temperature}"
            )
        self.capacity_per_prompt = capacity_per_prompt
        self.max_tokens = max_tokens
        self.deduplicate = deduplicate
        self.recency_prob = recency_prob
        self.rule = rule
        self.fill_groups = fill_groups
        self.eviction = eviction
        self.max_staleness = max_staleness
        self.max_uses = max_uses
        self.prompt_priority = prompt_priority
        self.prompt_temperature = prompt_temperature
        # Counters since the start of the run; all are trajectories.
        self.num_received = 0  # = stored now + duplicates + evicted + expired + dropped + used up
        self.num_duplicates = 0  # replaced an older record of the same response
        self.num_evicted = 0  # stored, then removed to keep the bounds
        self.num_expired = 0  # too stale, be it when they came or later
        self.num_dropped = (
            0  # never stored: longer than max_tokens, or first to go from a full prompt
        )
        self.num_used_up = 0  # removed because drawn ``max_uses`` times
        self._rng = np.random.default_rng(seed)
        self._store = Store(max_tokens)
        self._prompts: dict[int, _Prompt] = {}
        self._prompt_tokens = 0
        self._next_arrival = 0
        self._window_start = 0  # items with this arrival number or a later one are in the window
        self._window_pending = False
        self._recent: dict[int, int] = {}  # prompt -> its items in the window
        # The prompts that can be drawn: of the whole store, and of the window.
        self._everything = self._new_choice(())
        self._window = InTurn()
        self._by_version = eviction == "oldest"  # what a prompt's items are evicted by, or reward
        self._newest_version: int | None = None  # that ``expire`` was called with
        self._oldest_allowed: float = -math.inf  # version of what is stored
        self._expiry = _Expiry()

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

    @property
    def num_drawable(self) -> int:
        """Prompts with enough items for a group: the most groups that a draw can give."""
        return len(self._everything)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        """Store trajectories in the given order, copying them; many at once are fastest.

        Raises:
            ValueError: a record breaks its own rules, or its prompt's tokens differ from those
                stored for its prompt_id. Those before it in ``trajectories`` are stored.
        """
        self._add_all(trajectories)

    def _add_all(self, trajectories: Iterable[Trajectory]) -> list[int]:
        """``add``; gives the arrival number of each, or -1 if it was not stored."""
        numbers: list[int] = []
        source = iter(trajectories)
        while chunk := list(islice(source, FLUSH_ROWS)):
            if self._store.should_compact():
                self._compact()
            checked = all_valid(chunk)
            try:
                for trajectory in chunk:
                    if not checked:
                        check(trajectory)
                    number = self._next_arrival
                    self._add(trajectory)
                    numbers.append(number if self._next_arrival > number else -1)
            finally:
                self._store.flush()
        return numbers

    def expire(self, version: int) -> None:
        """Remove what is more than ``max_staleness`` older than a version of the weights.

        That is what has ``version_start < version - max_staleness``; the same is not stored when it
        comes later. Of the versions given the newest counts. Without ``max_staleness`` nothing
        happens. The time taken is that of the items removed.
        """
        if self._newest_version is None or version > self._newest_version:
            self._newest_version = int(version)
        if self.max_staleness is None:
            return
        self._oldest_allowed = self._newest_version - self.max_staleness
        arrivals = np.array(self._expiry.pop_before(self._oldest_allowed), np.int64)
        rows, _ = self._store.live_rows(arrivals)
        for row, prompt_id in zip(
            rows.tolist(), self._store.columns["prompt_id"][rows].tolist(), strict=True
        ):
            self.num_expired += 1
            self._remove(prompt_id, row)
            self._update_choices(prompt_id)

    def set_reference(
        self, items: Sequence[int], logprobs: Sequence[np.ndarray], version: int
    ) -> None:
        """Replace the reference's log-probs of stored items, as after a new reference.

        Args:
            items: arrival numbers, from ``Group.items``; one that is stored no more is passed over.
            logprobs: as many float32 arrays, [T] each, nats, at the training temperature.
            version: weights version of the reference that they are of, at least 0.

        Raises:
            ValueError: an array doesn't fit its item, or another argument is wrong; nothing is
                written then.
        """
        if len(items) != len(logprobs):
            raise ValueError(f"set_reference: {len(logprobs)} arrays for {len(items)} items")
        if not 0 <= version < 2**63:
            raise ValueError(f"set_reference: version must be at least 0, got {version}")
        arrivals = np.array(items, np.int64)  # [n]
        if arrivals.size and not 0 <= arrivals.min() <= arrivals.max() < self._next_arrival:
            raise ValueError(f"set_reference: items must be in 0..{self._next_arrival - 1}")
        for item, values in zip(items, logprobs, strict=True):
            if values.dtype != np.float32 or values.ndim != 1:
                raise ValueError(
                    f"set_reference: item {item} must have a 1-d float32 array, "
                    f"got {values.dtype} with shape {values.shape}"
                )
        rows, found = self._store.live_rows(arrivals)
        stored = [values for values, here in zip(logprobs, found.tolist(), strict=True) if here]
        lengths = self._store.columns["length"][rows].tolist()
        for row, values, length in zip(rows.tolist(), stored, lengths, strict=True):
            if len(values) != length:
                item = self._store.columns["arrival"][row]
                raise ValueError(
                    f"set_reference: item {item} has {length} tokens, got {len(values)} log-probs"
                )
        self._store.set_reference(rows, stored, version)

    def new_window(self) -> None:
        """Begin a new recency window with the next trajectory stored; till then keep the old."""
        self._window_pending = True

    def ready(self, num_prompts: int) -> bool:
        """Whether ``draw(num_prompts, k)`` would give ``num_prompts`` groups."""
        return self.num_drawable >= num_prompts

    def draw(self, num_prompts: int, k: int, *, recency_prob: float | None = None) -> list[Group]:
        """Draw responses of ``num_prompts`` different prompts and count the use of each.

        Each slot decides by itself: with probability ``recency_prob`` it takes the next prompt of
        the window and draws of its window items uniformly; otherwise, or if the window has no
        prompt that this draw can still take, it takes the next prompt of the whole store and draws
        of its items by the rule. Window and store each take their prompts in turn, none again
        before the others have come (arXiv 2503.18929, section 4.2), but the store by weight if
        there is a ``prompt_priority``. A prompt takes part while it has at least 2 items to choose
        from.

        Args:
            num_prompts: slots, at least 1.
            k: responses per prompt, at least 2.
            recency_prob: m for this draw, 0..1; None: the buffer's own.

        Returns:
            At most ``num_prompts`` groups of different prompts; fewer only if the whole store has
            fewer prompts with 2 items. A group has min(k, items) >= 2 different items, or with
            ``fill_groups`` always k, among them each of the items if there are fewer than k.

        Raises:
            ValueError: an argument is out of range, or the rule returned something else than k
                distinct indices.
        """
        if num_prompts < 1 or k < MIN_GROUP:
            raise ValueError(
                f"draw needs at least 1 prompt and {MIN_GROUP} responses of each, "
                f"got num_prompts={num_prompts}, k={k}"
            )
        if recency_prob is None:
            recency_prob = self.recency_prob
        _check_recency_prob(recency_prob)
        slots = self._choose_prompts(num_prompts, recency_prob)
        if not slots:
            return []
        store = self._store
        window_row = store.row_of(self._window_start)
        choices = []  # rows of each slot, [n], in order of arrival
        for prompt_id, recent in slots:
            rows = np.array(self._prompts[prompt_id].rows)
            rows.sort()
            choices.append(rows[rows.searchsorted(window_row) :] if recent else rows)
        # One look at the columns for all slots: it costs more per call than per row.
        entries = self._entries(np.concatenate(choices))
        chosen = []
        end = 0
        for (_, recent), rows in zip(slots, choices, strict=True):
            start, end = end, end + rows.shape[0]
            mine = Entries(
                rewards=entries.rewards[start:end],
                versions=entries.versions[start:end],
                arrivals=entries.arrivals[start:end],
            )
            chosen.append(rows[self._choose_items(mine, k, recent)])
        groups = self._make_groups([prompt_id for prompt_id, _ in slots], chosen)
        if self.max_uses is not None:
            self._remove_used_up(groups)
        return groups

    def _choose_prompts(self, num_prompts: int, recency_prob: float) -> list[tuple[int, bool]]:
        """The prompt of each slot, and whether it is drawn from the window."""
        if isinstance(self._everything, ByReward) and self._everything.changed:
            items = [np.array(self._prompts[p].rows) for p in self._everything.changed]
            for rows in items:
                rows.sort()
            rewards = self._store.columns["reward"][np.concatenate(items)]
            self._everything.set_rewards(rewards, list(map(len, items)))
        slots: list[tuple[int, bool]] = []
        taken: set[int] = set()
        for _ in range(num_prompts):
            prompt_id = None
            recent = bool(self._rng.random() < recency_prob)
            if recent:
                prompt_id = self._window.draw(self._rng, taken)
            if prompt_id is None:
                recent = False
                prompt_id = self._everything.draw(self._rng, taken)
            if prompt_id is None:
                break
            taken.add(prompt_id)
            slots.append((prompt_id, recent))
        return slots

    def _entries(self, rows: np.ndarray) -> Entries:
        columns = self._store.columns
        arrays = [columns[name][rows] for name in ("reward", "version_start", "arrival")]
        for values in arrays:
            values.flags.writeable = False
        return Entries(rewards=arrays[0], versions=arrays[1], arrivals=arrays[2])

    def _choose_items(self, entries: Entries, k: int, recent: bool) -> np.ndarray:
        """Indices of the group's items among a prompt's, int64 [k] or fewer."""
        rule = uniform if recent else self.rule
        chosen = self._apply(rule, entries, min(k, len(entries)))
        if self.fill_groups and k > len(entries):
            # All items are in; each further place is a draw of its own from all of them.
            more = [self._apply(rule, entries, 1) for _ in range(k - len(entries))]
            chosen = np.concatenate([chosen, *more])
        return chosen

    def _apply(self, rule: Rule, entries: Entries, k: int) -> np.ndarray:
        chosen = np.asarray(rule(entries, k, self._rng))
        if chosen.shape != (k,) or chosen.dtype.kind not in "iu":
            raise ValueError(
                f"buffer.rule must return {k} integer indices, got {chosen.dtype} {chosen.shape}"
            )
        indices = chosen.tolist()
        if len(set(indices)) != k or min(indices) < 0 or max(indices) >= len(entries):
            raise ValueError(
                f"buffer.rule must return distinct indices in 0..{len(entries) - 1}, got {chosen}"
            )
        return chosen

    def _make_groups(self, prompt_ids: list[int], chosen: list[np.ndarray]) -> list[Group]:
        """Read the chosen rows of each prompt and count their use."""
        store = self._store
        rows = np.concatenate(chosen)
        prompts = []
        for prompt_id, mine in zip(prompt_ids, chosen, strict=True):
            tokens = np.frombuffer(self._prompts[prompt_id].tokens, np.int32)
            prompts += [tokens] * mine.shape[0]
        trajectories = store.read(rows, prompts)
        uses = store.columns["uses"][rows].tolist()
        items = store.columns["arrival"][rows].tolist()
        np.add.at(store.columns["uses"], rows, 1)  # a filled group can hold an item twice
        groups = []
        end = 0
        for prompt_id, mine in zip(prompt_ids, chosen, strict=True):
            start, end = end, end + mine.shape[0]
            group = Group(
                prompt_id=prompt_id,
                trajectories=trajectories[start:end],
                uses=uses[start:end],
                items=items[start:end],
            )
            groups.append(group)
        return groups

    def _remove_used_up(self, groups: Sequence[Group]) -> None:
        store = self._store
        for group in groups:
            rows, _ = store.live_rows(np.unique(np.array(group.items, np.int64)))
            for row in rows[store.columns["uses"][rows] >= self.max_uses].tolist():
                self.num_used_up += 1
                self._remove(group.prompt_id, row)
            self._update_choices(group.prompt_id)

    def _add(self, t: Trajectory) -> None:
        prompt_id = int(t.prompt_id)
        prompt = self._prompts.get(prompt_id)
        prompt_bytes = t.prompt_tokens.tobytes()
        if prompt is not None and prompt.tokens != prompt_bytes:
            raise ValueError(
                f"trajectory of prompt {prompt_id}: its prompt_tokens differ from those stored; "
                "a prompt_id must always mean the same prompt, formatted and tokenized the same way"
            )
        self.num_received += 1
        length, prompt_length = len(t.response_tokens), len(t.prompt_tokens)
        if length + prompt_length > self.max_tokens:
            self.num_dropped += 1
            return
        if t.version_start < self._oldest_allowed:
            self.num_expired += 1
            return

        store = self._store
        key = t.version_start if self._by_version else t.reward
        response_hash = 0
        if self.deduplicate:
            response = t.response_tokens.tobytes()
            response_hash = _response_hash(response)
        if prompt is not None:
            twin = prompt.item_of.get(response_hash) if self.deduplicate else None
            if twin is not None:
                row = store.row_of(twin)
                if store.response_bytes(row) == response:
                    self.num_duplicates += 1
                    self._remove(prompt_id, row)
            if len(prompt.rows) == self.capacity_per_prompt:
                if key < prompt.keys[0]:
                    self.num_dropped += 1
                    return
                self.num_evicted += 1
                self._remove(prompt_id, prompt.rows[0])
        # Evicting may take the prompt's own last item, and the prompt with it: look again each turn
        room = self.max_tokens - length
        while store.live_tokens + self._prompt_tokens > (
            room if prompt_id in self._prompts else room - prompt_length
        ):
            owner = self._evict_one()
            # Its own prompt waits: one that loses an item and gets one back keeps its turn.
            if owner != prompt_id:
                self._update_choices(owner)

        arrival = self._next_arrival
        self._next_arrival += 1
        if self._window_pending:
            self._window_pending = False
            self._window_start = arrival
            self._window = InTurn()
            self._recent = {}
        if prompt_id not in self._prompts:
            self._prompts[prompt_id] = self._new_prompt(prompt_bytes)
            self._prompt_tokens += prompt_length
        prompt = self._prompts[prompt_id]
        prompt.insert(key, store.append(t, arrival, response_hash))
        if self.deduplicate:
            prompt.item_of[response_hash] = arrival
        self._recent[prompt_id] = self._recent.get(prompt_id, 0) + 1
        if self.max_staleness is not None:
            self._note_expiry(int(t.version_start), arrival)
        self._update_choices(prompt_id)

    def _new_prompt(self, tokens: bytes) -> _Prompt:
        return _Prompt(tokens, array("q" if self._by_version else "d"))

    def _new_choice(self, members: Iterable[int], used: Iterable[int] = ()) -> InTurn:
        if self.prompt_priority == "none":
            return InTurn(members, used)
        return ByReward(
            [*members, *used], kind=self.prompt_priority, temperature=self.prompt_temperature
        )

    def _note_expiry(self, version: int, arrival: int) -> None:
        self._expiry.add(version, arrival)
        # It isn't told of other removals, so that it is made anew now and then.
        if self._expiry.size > 2 * self.num_trajectories + FLUSH_ROWS:
            self._store.flush()
            self._fill_expiry()

    def _fill_expiry(self) -> None:
        columns, n = self._store.columns, self._store.num_rows
        live = np.flatnonzero(columns["live"][:n])
        self._expiry = _Expiry()
        for version, arrival in zip(
            columns["version_start"][live].tolist(), columns["arrival"][live].tolist(), strict=True
        ):
            self._expiry.add(version, arrival)

    def _evict_one(self) -> int:
        """Remove what goes first of the whole store, and return its prompt."""
        store = self._store
        row = store.oldest() if self._by_version else store.lowest()
        prompt_id = store.prompt_of(row)
        self.num_evicted += 1
        self._remove(prompt_id, row)
        return prompt_id

    def _remove(self, prompt_id: int, row: int) -> None:
        prompt = self._prompts[prompt_id]
        position = 0
        if prompt.rows[0] != row:
            version, reward = self._store.evicted_by(row)
            position = prompt.find(version if self._by_version else reward, row)
        prompt.remove(position)
        arrival, response_hash = self._store.remove(row)
        # If two responses ever share a hash, the entry is the later one's.
        if self.deduplicate and prompt.item_of.get(response_hash) == arrival:
            del prompt.item_of[response_hash]
        if arrival >= self._window_start:
            self._recent[prompt_id] -= 1
        if not prompt.rows:
            self._prompt_tokens -= len(prompt.tokens) // 4
            del self._prompts[prompt_id]

    def _update_choices(self, prompt_id: int) -> None:
        """Let a prompt take part in draws or not, after any change of its items."""
        prompt = self._prompts.get(prompt_id)
        items = 0 if prompt is None else len(prompt.rows)
        # With more than MIN_GROUP items it took part before, be the change an item more or fewer.
        if items <= MIN_GROUP or self.prompt_priority != "none":
            self._everything.set_member(prompt_id, items >= MIN_GROUP)
        recent = self._recent.get(prompt_id, 0)
        if recent <= MIN_GROUP:
            self._window.set_member(prompt_id, recent >= MIN_GROUP)

    def _compact(self) -> None:
        moved = self._store.compact()
        for prompt in self._prompts.values():
            rows = np.frombuffer(prompt.rows, np.int64)
            rows[:] = moved[rows]

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to continue with the same later draws.

        Returns:
            ``{"arrays": ..., "meta": ...}``: ``arrays`` is a flat dict of numpy arrays that are
            copies (safe to write in another thread), ``meta`` is plain JSON (its generator state
            holds ints of 128 bits). Settings are not in it: those of the loading buffer hold.
        """
        self._compact()
        prompts = self._prompts
        arrays = self._store.state_arrays()
        arrays["prompt.id"] = np.array(list(prompts), np.int64)
        arrays["prompt.length"] = np.array([len(p.tokens) // 4 for p in prompts.values()], np.int64)
        arrays["prompt.tokens"] = np.frombuffer(
            b"".join(p.tokens for p in prompts.values()), np.int32
        ).copy()
        for name, choice in (("everything", self._everything), ("window", self._window)):
            arrays[f"{name}.fresh"] = np.array(choice.fresh, np.int64)
            arrays[f"{name}.used"] = np.array(list(choice.used), np.int64)
        meta = {name: getattr(self, name) for name in _COUNTERS}
        meta["part_names"] = list(self._store.parts)
        meta["window_pending"] = self._window_pending
        meta["rng"] = self._rng.bit_generator.state
        return {"arrays": arrays, "meta": meta}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the contents, counters and generator by those of a saved state.

        Where this buffer's bounds are smaller than the saved one's, what is too much is evicted,
        and what is too stale expires.

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
        store = Store.from_state(self.max_tokens, arrays, meta["part_names"])
        prompts = self._load_prompts(arrays, store)
        recent = {}
        window_row = store.row_of(meta["_window_start"])
        for prompt_id, prompt in prompts.items():
            recent[prompt_id] = int((np.array(prompt.rows) >= window_row).sum())
        counts = (
            ("everything", {prompt_id: len(prompt.rows) for prompt_id, prompt in prompts.items()}),
            ("window", recent),
        )
        for name, items in counts:
            saved = [*arrays[f"{name}.fresh"].tolist(), *arrays[f"{name}.used"].tolist()]
            if sorted(saved) != sorted(p for p, count in items.items() if count >= MIN_GROUP):
                raise ValueError(
                    f"buffer state: {name}.fresh and .used are not the prompts to draw"
                )

        self._rng = rng
        self._store = store
        self._prompts = prompts
        self._prompt_tokens = arrays["prompt.tokens"].shape[0]
        self._recent = recent
        self._everything = self._new_choice(
            arrays["everything.fresh"].tolist(), arrays["everything.used"].tolist()
        )
        self._window = InTurn(arrays["window.fresh"].tolist(), arrays["window.used"].tolist())
        self._window_pending = meta["window_pending"]
        for name in _COUNTERS:
            setattr(self, name, meta[name])
        if self.max_staleness is not None:
            self._fill_expiry()
        self._shrink_to_bounds()

    def load_shares(self, states: Sequence[dict[str, Any]], mine: Callable[[int], bool]) -> None:
        """Replace the contents by those of the saved states of others, which had other prompts.

        What was in their recency windows comes last, and is in this one's; counts of uses are kept,
        the order in which prompts are drawn and all other counters begin anew.

        Args:
            states: of ``state_dict``.
            mine: whether a prompt id is to be kept here.

        Raises:
            ValueError: a state is incomplete or contradicts itself.
        """
        empty = Buffer(max_tokens=1, deduplicate=False, recency_prob=0.0, rule=uniform, seed=0)
        nothing = empty.state_dict()
        nothing["meta"]["rng"] = self._rng.bit_generator.state
        self.load_state_dict(nothing)
        items: list[tuple[bool, int, int, Trajectory, int]] = []
        for source, state in enumerate(states):
            other = Buffer(
                max_tokens=2**62,
                capacity_per_prompt=2**62,
                deduplicate=False,
                recency_prob=0.0,
                rule=uniform,
                seed=0,
            )
            other.load_state_dict(state)
            store = other._store
            rows = np.arange(store.num_rows)
            owners = store.columns["prompt_id"][rows].tolist()
            kept = [(row, owner) for row, owner in zip(rows, owners, strict=True) if mine(owner)]
            rows = np.array([row for row, _ in kept], np.int64)
            prompts = [np.frombuffer(other._prompts[p].tokens, np.int32) for _, p in kept]
            arrivals = store.columns["arrival"][rows].tolist()
            uses = store.columns["uses"][rows].tolist()
            for arrival, count, t in zip(arrivals, uses, store.read(rows, prompts), strict=True):
                items.append((arrival >= other._window_start, arrival, source, t, count))
        items.sort(key=lambda item: item[:3])
        num_old = sum(not in_window for in_window, *_ in items)
        numbers = self._add_all(t for *_, t, _ in items[:num_old])
        if num_old < len(items):
            self.new_window()
        numbers += self._add_all(t for *_, t, _ in items[num_old:])
        # -1 belongs to none; so does the number of one that has been evicted since
        stored, found = self._store.live_rows(np.array(numbers, np.int64))
        uses = np.array([count for *_, count in items], np.int32)
        self._store.columns["uses"][stored] = uses[found]

    def _load_prompts(self, arrays: dict[str, np.ndarray], store: Store) -> dict[int, _Prompt]:
        prompts: dict[int, _Prompt] = {}
        end = 0
        for prompt_id, length in zip(
            arrays["prompt.id"].tolist(), arrays["prompt.length"].tolist(), strict=True
        ):
            tokens = arrays["prompt.tokens"][end : end + length].tobytes()
            prompts[prompt_id] = self._new_prompt(tokens)
            end += length
        owners = arrays["prompt_id"]
        missing = set(owners.tolist()) - prompts.keys()
        if missing:
            raise ValueError(f"buffer state: prompt {min(missing)} has responses but no tokens")
        keys = arrays["version_start" if self._by_version else "reward"]
        # One prompt after another, each in the order of eviction; the sort keeps that of arrival.
        rows = np.lexsort((keys, owners))
        ends = np.flatnonzero(np.diff(owners[rows])) + 1
        for mine in np.split(rows, ends) if rows.size else ():
            prompt = prompts[int(owners[mine[0]])]
            prompt.rows.frombytes(mine.astype(np.int64).tobytes())
            prompt.keys.frombytes(keys[mine].tobytes())
        if self.deduplicate:
            hashes = store.columns["response_hash"]
            arrivals = arrays["arrival"].tolist()
            for row, prompt_id in enumerate(owners.tolist()):
                hashes[row] = response_hash = _response_hash(store.response_bytes(row))
                prompts[prompt_id].item_of[response_hash] = arrivals[row]
        return prompts

    def _shrink_to_bounds(self) -> None:
        if self._newest_version is not None:
            self.expire(self._newest_version)
        for prompt_id, prompt in list(self._prompts.items()):
            while len(prompt.rows) > self.capacity_per_prompt:
                self.num_evicted += 1
                self._remove(prompt_id, prompt.rows[0])
                self._update_choices(prompt_id)
        while self.num_tokens > self.max_tokens:
            self._update_choices(self._evict_one())


_COUNTERS = (
    "num_received",
    "num_duplicates",
    "num_evicted",
    "num_expired",
    "num_dropped",
    "num_used_up",
    "_next_arrival",
    "_window_start",
    "_newest_version",
)


class _Expiry:
    """Arrival numbers by version, also of items that are stored no more."""

    def __init__(self) -> None:
        self.size = 0
        self._by_version: dict[int, array] = {}
        self._versions: list[int] = []  # a heap

    def add(self, version: int, arrival: int) -> None:
        if version not in self._by_version:
            self._by_version[version] = array("q")
            heappush(self._versions, version)
        self._by_version[version].append(arrival)
        self.size += 1

    def pop_before(self, version: int) -> list[int]:
        """All of versions before this one, in order of arrival; they are forgotten here."""
        arrivals: list[int] = []
        while self._versions and self._versions[0] < version:
            arrivals += self._by_version.pop(heappop(self._versions))
        self.size -= len(arrivals)
        return sorted(arrivals)


def _check_recency_prob(recency_prob: float) -> None:
    if not 0 <= recency_prob <= 1:
        raise ValueError(f"buffer.recency_prob must be in 0..1, got {recency_prob}")


def _response_hash(response: bytes) -> int:
    """64 bits of a response's tokens, which differ between processes and are never saved."""
    return hash(response)


def _check_state(arrays: dict[str, np.ndarray], meta: dict[str, Any]) -> None:
    """Raise ValueError unless a saved state has its arrays, with the sizes that they imply."""
    for name in (*_COUNTERS, "part_names", "window_pending", "rng"):
        if name not in meta:
            raise ValueError(f"buffer state: meta lacks {name}")
    check_state(arrays, len(meta["part_names"]))
    dtypes: dict[str, Any] = {"prompt.id": np.int64, "prompt.length": np.int64}
    dtypes |= {"prompt.tokens": np.int32}
    for name in ("everything", "window"):
        dtypes |= {f"{name}.fresh": np.int64, f"{name}.used": np.int64}
    require_arrays(arrays, dtypes)
    if arrays["prompt.length"].shape != arrays["prompt.id"].shape:
        raise ValueError("buffer state: prompt.length and prompt.id differ in shape")
    require_lengths(
        "prompt.length", arrays["prompt.length"], arrays["prompt.tokens"].shape[0], least=0
    )
    if arrays["arrival"].size and arrays["arrival"][-1] >= meta["_next_arrival"]:
        raise ValueError("buffer state: arrival goes beyond _next_arrival")
