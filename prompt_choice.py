"""Which prompt is drawn next: each in its turn, or by the rewards of its stored responses.

``InTurn`` and ``ByReward`` have the same methods and know prompts by their ids alone; the buffer
tells them which prompts can be drawn. ``fresh`` and ``used`` are their whole saved state.
"""

import sys
from collections.abc import Iterable, Sequence

import numpy as np

# Added to every prompt's variance, as a part of the mean variance over all prompts: one draw in
# 101 by reward_variance is uniform over all prompts, so that none is forgotten.
VARIANCE_FLOOR = 0.01


class InTurn:
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

    def _remove_fresh(self, prompt_id: int) -> int:
        """Put the last fresh prompt where this one is; where that was."""
        position = self._position.pop(prompt_id)
        last = self.fresh.pop()
        if last != prompt_id:
            self.fresh[position] = last
            self._position[last] = position
        return position


class ByReward(InTurn):
    """A set of prompts drawn by a weight that follows from the rewards of their responses.

    ``reward_variance``: the population variance of the rewards, plus ``VARIANCE_FLOOR`` times the
    mean variance over all prompts; where all variances are 0, uniform. ``difficulty``:
    exp(-mean reward / temperature). All prompts stay fresh.

    The owner asks ``changed`` before a draw and answers with ``set_rewards``, so that the weights
    are a function of what is stored and not of the way there.
    """

    def __init__(self, members: Iterable[int] = (), *, kind: str, temperature: float) -> None:
        super().__init__()
        self.changed: dict[int, None] = {}  # members whose rewards must be looked at, in order
        self._kind = kind
        self._temperature = temperature
        self._values = np.zeros(16)  # [members and more] variance, or log of the weight
        self._cumulative: np.ndarray | None = None  # [members] of the weights; None: to be made
        for prompt_id in members:
            self.set_member(prompt_id, True)

    def set_member(self, prompt_id: int, member: bool) -> None:
        """Let a prompt take part or not; whenever it does, its rewards may have changed."""
        super().set_member(prompt_id, member)
        if member:
            self.changed[prompt_id] = None
        else:
            self.changed.pop(prompt_id, None)

    def set_rewards(self, rewards: np.ndarray, counts: Sequence[int]) -> None:
        """Give the rewards of the prompts in ``changed``, in their order, which empties it.

        Args:
            rewards: float64 [sum of counts], one prompt's after another's.
            counts: how many each has, at least 1.
        """
        sizes = np.array(counts)
        starts = np.cumsum(sizes) - sizes
        # Relative to the prompt's first one: equal rewards then have a variance of exactly 0.
        first = rewards[starts]
        with np.errstate(over="ignore", invalid="ignore"):
            shifted = rewards - np.repeat(first, sizes)
            means = np.add.reduceat(shifted, starts) / sizes
            if self._kind == "difficulty":
                values = -(first + means) / self._temperature
            else:
                deviations = shifted - np.repeat(means, sizes)
                values = np.add.reduceat(deviations**2, starts) / sizes
        # Rewards near the largest float overflow; they still get a finite weight.
        largest = sys.float_info.max
        values = np.nan_to_num(values, nan=largest, posinf=largest, neginf=-largest)
        self._values[[self._position[prompt_id] for prompt_id in self.changed]] = values
        self.changed = {}
        self._cumulative = None

    def draw(self, rng: np.random.Generator, taken: set[int]) -> int | None:
        """A prompt by weight among those not in ``taken``; None if none is left."""
        assert not self.changed
        if sum(p in self._position for p in taken) == len(self.fresh):
            return None
        if self._cumulative is None:
            self._cumulative = np.cumsum(self._weights())
        cumulative = self._cumulative
        for _ in range(16):  # trying again until one is free is to draw among the free ones
            position = int(np.searchsorted(cumulative, rng.random() * cumulative[-1], "right"))
            if position < len(self.fresh) and self.fresh[position] not in taken:
                return self.fresh[position]
        weights = self._weights()
        weights[[self._position[p] for p in taken if p in self._position]] = 0
        if weights.sum() == 0:  # those that are left are all too unlikely for a float
            weights = np.array([float(p not in taken) for p in self.fresh])
        return self.fresh[int(rng.choice(len(self.fresh), p=weights / weights.sum()))]

    def _weights(self) -> np.ndarray:
        """float64 [members], of which the largest is about 1."""
        values = self._values[: len(self.fresh)]
        if self._kind == "difficulty":
            with np.errstate(over="ignore"):
                return np.exp(values - values.max())
        largest = values.max()
        if largest == 0:
            return np.ones(values.shape[0])
        relative = values / largest
        return relative + VARIANCE_FLOOR * relative.mean()

    def _add_fresh(self, prompt_id: int) -> None:
        super()._add_fresh(prompt_id)
        if len(self.fresh) > self._values.shape[0]:
            self._values = np.resize(self._values, 2 * self._values.shape[0])
        self._cumulative = None

    def _remove_fresh(self, prompt_id: int) -> int:
        position = super()._remove_fresh(prompt_id)
        self._values[position] = self._values[len(self.fresh)]
        self._cumulative = None
        return position
