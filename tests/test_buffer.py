"""Buffer semantics one by one, draw frequencies against formulas, and a slow obvious model."""

import functools
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

import buffer as buffer_module
import store as store_module
from buffer import Buffer, Entries, Group, Rule, softmax_of_reward, uniform
from prompt_choice import VARIANCE_FLOOR
from trajectory import Trajectory, offsets_of

PROMPT = 2  # tokens of each prompt made here, unless told otherwise


def make(
    prompt_id: int,
    token: int,
    *,
    version: int = 0,
    reward: float = 0.0,
    length: int = 1,
    **more: object,
) -> Trajectory:
    """A response that its first token tells apart from the others of its prompt."""
    tokens = np.full(length, token, np.int32)
    offsets = offsets_for(token, length)
    fields: dict = {
        "prompt_id": prompt_id,
        "prompt_tokens": np.full(PROMPT, prompt_id, np.int32),
        "response_tokens": tokens,
        "behavior_logprobs": -tokens.astype(np.float32),
        "old_logprobs": None,
        "reference_logprobs": -2 * tokens.astype(np.float32),
        "reference_version": 0,
        "reward": reward,
        "reward_parts": {"correct": reward},
        "version_start": version,
        "version_end": version + int(offsets[-1]),
        "truncated": False,
        "version_offsets": offsets if offsets[-1] else None,
    }
    fields |= more
    if fields["old_logprobs"] is None:  # as usual, the very array of the behavior log-probs
        fields["old_logprobs"] = fields["behavior_logprobs"]
    return Trajectory(**fields)


def offsets_for(token: int, length: int) -> np.ndarray:
    """Longer responses of some tokens were sampled by several versions."""
    return np.linspace(0, token % 3 if length > 1 else 0, length).astype(np.int32)


def make_buffer(
    *,
    max_tokens: int = 10**6,
    deduplicate: bool = True,
    recency_prob: float = 0.0,
    rule: Rule = uniform,
    seed: int = 0,
    capacity_per_prompt: int = 100,
    fill_groups: bool = False,
    **options: Any,
) -> Buffer:
    return Buffer(
        max_tokens=max_tokens,
        deduplicate=deduplicate,
        recency_prob=recency_prob,
        rule=rule,
        seed=seed,
        capacity_per_prompt=capacity_per_prompt,
        fill_groups=fill_groups,
        **options,
    )


def contents(buffer: Buffer) -> dict[int, list[int]]:
    """First token of every stored response by prompt, in order of arrival."""
    arrays = buffer.state_dict()["arrays"]
    starts = np.cumsum(arrays["length"]) - arrays["length"]
    result: dict[int, list[int]] = {}
    for prompt_id, token in zip(
        arrays["prompt_id"].tolist(), arrays["tokens"][starts].tolist(), strict=True
    ):
        result.setdefault(prompt_id, []).append(token)
    return result


def tokens_of(group: Group) -> list[int]:
    return [int(t.response_tokens[0]) for t in group.trajectories]


def drawn(groups: list[Group]) -> list:
    return [(g.prompt_id, tokens_of(g), g.uses) for g in groups]


def window(buffer: Buffer, prompt_id: int) -> set[int]:
    """Tokens of a prompt that m = 1 can draw; the buffer's draws go on unchanged."""
    state = buffer.state_dict()
    probe = make_buffer(recency_prob=1.0, deduplicate=buffer.deduplicate)
    probe.load_state_dict(state)
    for _ in range(probe.num_prompts):
        for group in probe.draw(1, 1000):
            if group.prompt_id == prompt_id:
                return set(tokens_of(group))
    return set()


# Contents


def test_what_is_drawn_is_what_was_added() -> None:
    added = make(
        3,
        5,
        length=4,
        version=6,
        reference_version=4,
        reward=0.25,
        reward_parts={"a": 0.5, "b": -0.25},
        truncated=True,
        behavior_logprobs=np.array([-0.0, -np.inf, np.nan, -1.0], np.float32),
    )
    buffer = make_buffer()
    buffer.add([added, make(3, 6, reward_parts={})])
    (group,) = buffer.draw(1, 2)
    back = {int(t.response_tokens[0]): t for t in group.trajectories}
    assert back[6].reward_parts == {}
    for name in (
        "prompt_id",
        "reward",
        "reward_parts",
        "version_start",
        "version_end",
        "reference_version",
        "truncated",
    ):
        assert getattr(back[5], name) == getattr(added, name), name
    for name in (
        "prompt_tokens",
        "response_tokens",
        "behavior_logprobs",
        "reference_logprobs",
    ):
        array, expected = getattr(back[5], name), getattr(added, name)
        assert array.dtype == expected.dtype and array.tobytes() == expected.tobytes(), name


def test_drawn_arrays_survive_later_changes_of_the_buffer() -> None:
    buffer = make_buffer(max_tokens=PROMPT + 10)
    buffer.add([make(0, 1, length=5), make(0, 2, length=5)])
    (group,) = buffer.draw(1, 2)
    buffer.add([make(0, token, length=5) for token in range(10, 40)])
    assert sorted(t.response_tokens.tolist() for t in group.trajectories) == [[1] * 5, [2] * 5]
    for t in group.trajectories:
        token = int(t.response_tokens[0])
        assert t.behavior_logprobs.tolist() == [-token] * 5
        assert t.reference_logprobs.tolist() == [-2 * token] * 5
        for array in (t.prompt_tokens, t.response_tokens, t.behavior_logprobs, t.old_logprobs):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 0


def old_logprobs(values: list[float]) -> np.ndarray:
    return np.array(values, np.float32)


def test_old_logprobs_take_no_memory_until_some_differ() -> None:
    buffer = make_buffer()
    equal = np.array([-1.0, np.nan], np.float32)
    buffer.add([make(0, 1, length=2), make(0, 2, length=2)])
    buffer.add([make(0, 3, length=2, behavior_logprobs=equal, old_logprobs=equal.copy())])
    assert all("old" not in s.arenas for s in buffer._store.segments.all())
    assert buffer.state_dict()["arrays"]["old"].shape == (0,)
    for t in buffer.draw(1, 3)[0].trajectories:
        assert t.old_logprobs is t.behavior_logprobs
    buffer.add([make(0, 4, length=2, old_logprobs=old_logprobs([-5, -6]))])
    assert any("old" in s.arenas for s in buffer._store.segments.all())
    assert buffer.state_dict()["arrays"]["old"].tolist() == [-5, -6]


def test_old_logprobs_come_back_bit_for_bit() -> None:
    """Also those that differ from the behavior log-probs only in how a NaN or a zero is written."""
    behavior = np.array([np.nan, 0.0, -1.0], np.float32)
    pairs = {
        1: (behavior, np.array([np.nan, -0.0, -1.0], np.float32)),
        2: (behavior, np.array([-2.0, -0.5, -np.inf], np.float32)),
        3: (behavior, behavior),
        4: (behavior, behavior.copy()),
    }
    buffer = make_buffer()
    for token, (sampled, old) in pairs.items():
        buffer.add([make(0, token, length=3, behavior_logprobs=sampled, old_logprobs=old)])
    loaded = make_buffer()
    loaded.load_state_dict(saved(buffer))
    for source in (buffer, loaded):
        (group,) = source.draw(1, 4)
        for t in group.trajectories:
            token = int(t.response_tokens[0])
            sampled, old = pairs[token]
            assert t.behavior_logprobs.tobytes() == sampled.tobytes()
            assert t.old_logprobs.tobytes() == old.tobytes()
            assert (t.old_logprobs is t.behavior_logprobs) == (token in (3, 4))


def test_many_at_once_are_stored_as_one_by_one() -> None:
    """Duplicates and evictions of what came earlier in the same call included."""
    rng = np.random.default_rng(0)
    ours, theirs = scenario_buffer(1), scenario_buffer(1)
    for step in range(40):
        batch = [
            make(
                int(rng.integers(6)),
                int(rng.integers(8)),
                version=int(rng.integers(step + 1)),
                reward=float(rng.integers(4)),
                length=int(rng.integers(1, 6)),
            )
            for _ in range(int(rng.integers(1, 60)))
        ]
        ours.new_window()
        theirs.new_window()
        ours.add(batch)
        for t in batch:
            theirs.add([t])
        assert drawn(ours.draw(3, 4)) == drawn(theirs.draw(3, 4))
        first, second = ours.state_dict(), theirs.state_dict()
        assert first["meta"] == second["meta"]
        for name, array in first["arrays"].items():
            assert array.tolist() == second["arrays"][name].tolist(), name


def test_what_was_added_may_be_overwritten_by_its_owner() -> None:
    t = make(0, 1, length=3)
    buffer = make_buffer()
    buffer.add([t, make(0, 2)])
    for array in (t.response_tokens, t.behavior_logprobs, t.reference_logprobs):
        array[:] = 7
    (back,) = [t for t in buffer.draw(1, 2)[0].trajectories if len(t.response_tokens) == 3]
    assert back.response_tokens.tolist() == [1] * 3
    assert back.behavior_logprobs.tolist() == [-1] * 3
    assert back.reference_logprobs.tolist() == [-2] * 3


def test_numbers_of_other_types_are_stored_too() -> None:
    odd = make(np.int64(3), 5, version=np.int64(2), reward=np.float32(0.5), truncated=np.True_)
    for eviction in ("oldest", "lowest_reward"):
        buffer = make_buffer(eviction=eviction, max_staleness=5)
        buffer.add([odd, make(3, 6, version=4, reward=1)])
        (group,) = buffer.draw(1, 2)
        (back,) = [t for t in group.trajectories if t.response_tokens[0] == 5]
        values = (back.prompt_id, back.version_start, back.reward, back.truncated)
        assert values == (3, 2, 0.5, True)
        assert [type(v) for v in values] == [int, int, float, bool]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_id", 2**63),
        ("version_start", -(2**63) - 1),
        ("version_end", 1.0),
        ("reference_version", -2),
        ("version_start", 2),  # after version_end
        ("truncated", 1),
        ("reward", math.nan),
        ("reward", "1"),
        ("reward_parts", {"a": math.inf}),
        ("reward_parts", {3: 1.0}),
        ("response_tokens", np.zeros(0, np.int32)),
        ("response_tokens", np.zeros((1, 1), np.int32)),
        ("response_tokens", [1]),
        ("prompt_tokens", np.zeros(2, np.int64)),
        ("behavior_logprobs", np.zeros(2, np.float32)),
        ("old_logprobs", np.zeros(2, np.float32)),
        ("reference_logprobs", np.zeros(1)),
        ("reference_logprobs", np.zeros(1, ">f4")),
    ],
)
def test_broken_record_is_named_and_those_before_it_are_kept(name: str, value: object) -> None:
    buffer = make_buffer()
    broken = make(0, 3)
    setattr(broken, name, value)
    with pytest.raises(ValueError, match=name.removesuffix("_parts")):
        buffer.add([make(0, 1), make(0, 2), broken, make(0, 4)])
    assert contents(buffer) == {0: [1, 2]} and buffer.num_received == 2


def test_capacity_evicts_the_oldest_version_then_the_earliest_arrival() -> None:
    buffer = make_buffer(capacity_per_prompt=3)
    buffer.add([make(0, 1, version=5), make(0, 2, version=4), make(0, 3, version=4)])
    buffer.add([make(1, 9, version=0)])  # another prompt has a bound of its own
    buffer.add([make(0, 4, version=6)])
    assert contents(buffer) == {0: [1, 3, 4], 1: [9]}
    buffer.add([make(0, 5, version=6)])
    assert contents(buffer) == {0: [1, 4, 5], 1: [9]}
    assert (buffer.num_evicted, buffer.num_dropped) == (2, 0)


def test_newcomer_older_than_all_of_a_full_prompt_is_dropped() -> None:
    buffer = make_buffer(capacity_per_prompt=2)
    buffer.add([make(0, 1, version=5), make(0, 2, version=5), make(0, 3, version=4)])
    assert contents(buffer) == {0: [1, 2]}
    assert (buffer.num_evicted, buffer.num_dropped) == (0, 1)
    buffer.add([make(0, 4, version=5)])  # of equal version the earliest arrival goes
    assert contents(buffer) == {0: [2, 4]}


def test_duplicate_replaces_the_older_record_and_is_unused_again() -> None:
    buffer = make_buffer(capacity_per_prompt=2)
    buffer.add([make(0, 1, reward=1.0), make(0, 2), make(1, 1)])
    buffer.draw(2, 2)
    (group,) = buffer.draw(1, 2)
    assert group.uses == [1, 1]
    buffer.add([make(0, 1, reward=7.0, version=-5)])  # newest by arrival, whatever its version
    assert contents(buffer) == {0: [2, 1], 1: [1]}  # the same tokens of prompt 1 are no duplicate
    (group,) = buffer.draw(1, 2)
    uses = dict(zip(tokens_of(group), group.uses, strict=True))
    rewards = {int(t.response_tokens[0]): t.reward for t in group.trajectories}
    assert uses == {1: 0, 2: 2} and rewards[1] == 7.0
    assert (buffer.num_duplicates, buffer.num_evicted, buffer.num_received) == (1, 0, 4)


def test_duplicates_are_kept_when_asked_and_different_lengths_are_no_duplicates() -> None:
    buffer = make_buffer(deduplicate=False)
    buffer.add([make(0, 1), make(0, 1), make(0, 1)])
    assert contents(buffer) == {0: [1, 1, 1]} and buffer.num_duplicates == 0
    buffer = make_buffer()
    buffer.add([make(0, 1, length=1), make(0, 1, length=2)])
    assert contents(buffer) == {0: [1, 1]}


def test_responses_that_share_a_hash_are_both_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffer_module, "_response_hash", lambda response: 0)
    buffer = make_buffer(capacity_per_prompt=3)
    buffer.add([make(0, token) for token in (1, 2, 3, 3, 4)])
    assert contents(buffer) == {0: [2, 3, 4]}
    buffer.add([make(0, 5), make(0, 6)])
    assert contents(buffer) == {0: [4, 5, 6]}
    buffer = make_buffer(max_tokens=2 * PROMPT + 2)
    buffer.add([make(0, 1), make(0, 2), make(1, 1)])  # the last evicts the first of prompt 0
    buffer.add([make(0, 2)])  # still known, though the evicted one had the same hash
    assert contents(buffer) == {1: [1], 0: [2]} and buffer.num_duplicates == 1


def test_max_tokens_evicts_the_earliest_arrivals_of_any_prompt() -> None:
    buffer = make_buffer(max_tokens=20)  # prompts count once
    buffer.add([make(0, 1, length=4, version=9), make(1, 2, length=4), make(0, 3, length=4)])
    assert buffer.num_tokens == 12 + 2 * PROMPT
    buffer.add([make(1, 4, length=4)])
    assert contents(buffer) == {0: [1, 3], 1: [2, 4]} and buffer.fill == 1.0
    buffer.add([make(1, 5, length=5)])
    assert contents(buffer) == {0: [3], 1: [4, 5]}  # 1 then 2 went: 20 - 8 + 5
    assert buffer.num_tokens == 17 and buffer.num_evicted == 2
    buffer.add([make(2, 6, length=18)])  # all others go, and their prompts with them
    assert contents(buffer) == {2: [6]} and buffer.num_prompts == 1 and buffer.num_tokens == 20
    buffer.add([make(2, 7, length=18)])  # its own prompt's last item goes, the prompt stays paid
    assert contents(buffer) == {2: [7]} and buffer.num_tokens == 20


def test_lowest_reward_goes_first_from_a_full_prompt() -> None:
    buffer = make_buffer(capacity_per_prompt=3, eviction="lowest_reward")
    buffer.add([make(0, 1, reward=1.0), make(0, 2, reward=0.5), make(0, 3, reward=0.5)])
    buffer.add([make(0, 4, reward=0.25)])  # itself the lowest
    assert contents(buffer) == {0: [1, 2, 3]}
    assert (buffer.num_evicted, buffer.num_dropped) == (0, 1)
    buffer.add([make(0, 5, reward=0.5)])  # among equals the earliest goes
    assert contents(buffer) == {0: [1, 3, 5]}
    buffer.add([make(0, 6, reward=9.0, version=-3), make(0, 7, reward=9.0)])
    assert contents(buffer) == {0: [1, 6, 7]}
    buffer.add([make(0, 1, reward=-9.0)])  # a duplicate replaces, whatever its reward
    assert contents(buffer) == {0: [6, 7, 1]} and buffer.num_duplicates == 1
    buffer.add([make(0, 8, reward=-8.0)])
    assert contents(buffer) == {0: [6, 7, 8]} and buffer.num_evicted == 4


def test_lowest_reward_goes_first_from_the_whole_store() -> None:
    buffer = make_buffer(max_tokens=3 * PROMPT + 4, eviction="lowest_reward")
    buffer.add([make(p, p, reward=r) for p, r in ((0, 2.0), (1, 1.0), (2, 1.0))])
    buffer.add([make(0, 3, reward=0.0)])  # there is room
    buffer.add([make(0, 4, reward=-1.0)])  # the newcomer stays, whatever its reward
    assert contents(buffer) == {0: [0, 4], 1: [1], 2: [2]}
    buffer.add([make(0, 5, reward=3.0)])
    assert contents(buffer) == {0: [0, 5], 1: [1], 2: [2]}
    buffer.add([make(0, 6, reward=3.0)])  # among equals the earliest; its prompt goes with it
    assert contents(buffer) == {0: [0, 5, 6], 2: [2]}
    assert buffer.num_tokens == 2 * PROMPT + 4 and buffer.num_evicted == 3


def test_lowest_reward_of_many_is_found_through_additions_and_removals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "_LOWEST", 3)
    rng = np.random.default_rng(0)
    size = 300
    buffer = make_buffer(
        max_tokens=PROMPT + size, capacity_per_prompt=10**6, eviction="lowest_reward"
    )
    expected: list[tuple[float, int]] = []
    for token in range(2000):
        reward = float(rng.integers(0, 40 + token // 20))  # rising, with ties
        buffer.add([make(0, token, reward=reward)])
        if len(expected) == size:
            expected.remove(min(expected))
        expected.append((reward, token))
        if token % 7 == 0 and len(expected) == size:  # a duplicate removes one from the middle
            reward, twin = expected.pop(int(rng.integers(size)))
            buffer.add([make(0, twin, reward=reward)])
            expected.append((reward, twin))
        if token % 100 == 0:
            # Equal rewards leave in order of arrival, which a duplicate renews: compare by reward.
            rewards = sorted(buffer.state_dict()["arrays"]["reward"].tolist())
            assert rewards == sorted(r for r, _ in expected)


def test_stale_items_expire_and_late_ones_are_not_stored() -> None:
    buffer = make_buffer(max_staleness=2, recency_prob=1.0)
    versions = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1}
    buffer.add([make(0, token, version=version) for token, version in versions.items()])
    buffer.add([make(1, 1, version=0)])
    assert buffer.num_prompts == 2
    buffer.expire(2)  # nothing is older than 0
    assert buffer.num_expired == 0
    buffer.expire(4)
    assert contents(buffer) == {0: [3, 4]} and buffer.num_prompts == 1
    assert buffer.num_tokens == PROMPT + 2 and buffer.num_expired == 4
    buffer.expire(3)  # the newest counts
    buffer.add([make(0, 6, version=1), make(0, 3, version=1), make(0, 7, version=2)])
    assert contents(buffer) == {0: [3, 4, 7]} and buffer.num_expired == 6
    assert buffer.num_received == 9 and buffer.num_duplicates == 0
    buffer.expire(100)
    assert contents(buffer) == {} and buffer.draw(1, 2) == [] and not buffer.ready(1)
    buffer.add([make(0, 8, version=98), make(0, 9, version=98)])
    assert [sorted(tokens_of(g)) for g in buffer.draw(2, 2)] == [[8, 9]]


def test_nothing_expires_without_max_staleness() -> None:
    buffer = make_buffer()
    buffer.add([make(0, 1)])
    buffer.expire(1000)
    buffer.add([make(0, 2)])
    assert contents(buffer) == {0: [1, 2]} and buffer.num_expired == 0


def test_memory_of_expiry_is_bounded_by_what_is_stored() -> None:
    buffer = make_buffer(max_staleness=10**9, capacity_per_prompt=2)
    for token in range(5000):
        buffer.add([make(0, token, version=token)])
    assert buffer._expiry.size < 2000
    buffer.expire(4999 + 10**9)
    assert contents(buffer) == {0: [4999]} and buffer.num_expired == 1


def test_memory_of_what_expired_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_SEGMENT_TOKENS", 100)
    buffer = make_buffer(max_staleness=0, capacity_per_prompt=1000)
    # Of 30 tokens, which have segments of their own where they don't fit, and of 1.
    buffer.add([make(0, token, length=30 if token % 2 else 1) for token in range(200)])
    assert buffer._store.segments.allocated_tokens >= 3100
    buffer.expire(1)
    assert sum(s.size for s in buffer._store.segments.all()) <= 2 * 100
    differing = {"version": 1, "old_logprobs": np.zeros(1, np.float32)}
    buffer.add([make(0, token, **differing) for token in range(500)])
    buffer.expire(2)
    buffer.add([make(0, token, version=2) for token in range(500)])
    with_old = ["old" in segment.arenas for segment in buffer._store.segments.all()]
    assert len(with_old) >= 5 and sum(with_old) <= 1  # the one that was open all the time


def test_loading_applies_a_smaller_staleness() -> None:
    buffer = make_buffer(max_staleness=5)
    buffer.add([make(0, token, version=token) for token in range(10)])
    buffer.expire(9)
    assert contents(buffer) == {0: [4, 5, 6, 7, 8, 9]}
    other = make_buffer(max_staleness=2)
    other.load_state_dict(saved(buffer))
    assert contents(other) == {0: [7, 8, 9]} and other.num_expired == 7
    other.add([make(0, 11, version=6)])
    assert other.num_expired == 8


def test_reference_is_replaced_in_the_stored_items_alone() -> None:
    buffer = make_buffer(capacity_per_prompt=3)
    buffer.add([make(0, token, length=token, reference_version=1) for token in (1, 2, 3)])
    (group,) = buffer.draw(1, 3)
    by_token = {
        int(t.response_tokens[0]): (item, t)
        for item, t in zip(group.items, group.trajectories, strict=True)
    }
    assert {token: item for token, (item, _) in by_token.items()} == {1: 0, 2: 1, 3: 2}
    buffer.add([make(0, 4, length=4, version=5)])  # evicts item 0
    new = [np.full(token, 10 * token, np.float32) for token in (3, 1, 2)]
    buffer.set_reference([2, 0, 1], new, 7)
    buffer.set_reference([], [], 9)
    for t in group.trajectories:  # what was drawn before does not change
        token = int(t.response_tokens[0])
        assert t.reference_logprobs.tolist() == [-2 * token] * token and t.reference_version == 1
    loaded = make_buffer()
    loaded.load_state_dict(saved(buffer))
    for source in (buffer, loaded):
        (group,) = source.draw(1, 3)
        got = {
            int(t.response_tokens[0]): (t.reference_logprobs.tolist(), t.reference_version)
            for t in group.trajectories
        }
        assert got == {2: ([20.0] * 2, 7), 3: ([30.0] * 3, 7), 4: ([-8.0] * 4, 0)}
        for t in group.trajectories:
            assert t.response_tokens.tolist() == [t.response_tokens[0]] * len(t.response_tokens)
            assert (t.behavior_logprobs == -t.response_tokens[0]).all()


@pytest.mark.parametrize(
    ("items", "logprobs", "version", "message"),
    [
        ([0], [], 1, "0 arrays for 1 items"),
        ([0, 1], [np.zeros(2, np.float32), np.zeros(1, np.float32)], 1, "item 1 has 2 tokens"),
        ([0, 1], [np.zeros(2, np.float32), np.zeros(2)], 1, "item 1.*float64"),
        ([0, 1], [np.zeros(2, np.float32), np.zeros((2, 1), np.float32)], 1, "item 1.*shape"),
        ([0, 2], [np.zeros(2, np.float32)] * 2, 1, "items must be in 0..1"),
        ([0, -1], [np.zeros(2, np.float32)] * 2, 1, "items must be in 0..1"),
        ([0], [np.zeros(2, np.float32)], -1, "version"),
    ],
)
def test_wrong_reference_is_refused_whole(
    items: list, logprobs: list, version: int, message: str
) -> None:
    buffer = make_buffer()
    buffer.add([make(0, 1, length=2), make(0, 2, length=2)])
    before = buffer.state_dict()["arrays"]["reference"].tolist()
    with pytest.raises(ValueError, match=message):
        buffer.set_reference(items, logprobs, version)
    assert buffer.state_dict()["arrays"]["reference"].tolist() == before


def test_trajectory_longer_than_the_whole_buffer_is_dropped() -> None:
    buffer = make_buffer(max_tokens=10)
    buffer.add([make(0, 1, length=3), make(0, 2, length=9)])
    assert contents(buffer) == {0: [1]} and buffer.num_dropped == 1


def test_a_prompt_id_has_one_prompt() -> None:
    buffer = make_buffer()
    buffer.add([make(4, 1)])
    with pytest.raises(ValueError, match="prompt 4.*prompt_tokens"):
        buffer.add([make(4, 2, prompt_tokens=np.array([8], np.int32))])
    with pytest.raises(ValueError, match="response_tokens"):
        buffer.add([make(4, 2, response_tokens=np.array([8]))])
    assert contents(buffer) == {4: [1]} and buffer.num_received == 1


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"capacity_per_prompt": 1}, "buffer.capacity_per_prompt"),
        ({"max_tokens": 0}, "buffer.max_tokens"),
        ({"recency_prob": 1.5}, "buffer.recency_prob"),
        ({"recency_prob": float("nan")}, "buffer.recency_prob"),
        ({"eviction": "newest"}, "buffer.eviction"),
        ({"max_staleness": -1}, "buffer.max_staleness"),
        ({"prompt_priority": "hard"}, "buffer.prompt_priority"),
        ({"prompt_temperature": 0.0}, "buffer.prompt_temperature"),
        ({"prompt_temperature": float("inf")}, "buffer.prompt_temperature"),
    ],
)
def test_settings_out_of_range_are_named(changes: dict, key: str) -> None:
    with pytest.raises(ValueError, match=key):
        make_buffer(**changes)


# The recency window


def test_window_is_reset_by_the_first_addition_after_a_publication() -> None:
    buffer = make_buffer()
    buffer.add([make(0, 1), make(0, 2)])
    buffer.new_window()
    assert window(buffer, 0) == {1, 2}  # until something arrives the old window holds
    buffer.add([make(0, 3), make(0, 4)])
    assert window(buffer, 0) == {3, 4}
    buffer.add([make(0, 5)])
    assert window(buffer, 0) == {3, 4, 5}


def test_addition_that_stores_nothing_does_not_reset_the_window() -> None:
    buffer = make_buffer(capacity_per_prompt=2)
    buffer.add([make(0, 1, version=5), make(0, 2, version=5)])
    buffer.new_window()
    buffer.add([make(0, 3, version=1)])
    assert window(buffer, 0) == {1, 2}


def test_duplicates_and_evicted_items_are_not_counted_in_the_window() -> None:
    buffer = make_buffer(capacity_per_prompt=3)
    buffer.add([make(0, 1), make(0, 2), make(0, 3)])
    buffer.new_window()
    buffer.add([make(0, 1), make(0, 1), make(0, 1)])  # one item, however often it arrives
    buffer.add([make(0, 2)])
    assert window(buffer, 0) == {1, 2}
    buffer.add([make(0, 4), make(0, 5), make(0, 6), make(0, 7)])
    assert window(buffer, 0) == {5, 6, 7}


# Drawing


def test_m_one_draws_from_the_window_and_m_zero_from_all() -> None:
    for m, tokens in ((1.0, {3, 4}), (0.0, {1, 2, 3, 4})):
        buffer = make_buffer(recency_prob=m)
        buffer.add([make(0, 1), make(0, 2), make(1, 1), make(1, 2)])
        buffer.new_window()
        buffer.add([make(0, 3), make(0, 4)])
        seen = {
            token
            for _ in range(50)
            for group in buffer.draw(1, 2)
            if group.prompt_id == 0
            for token in tokens_of(group)
        }
        assert seen == tokens


def test_window_without_eligible_prompt_falls_back_to_the_store_and_its_rule() -> None:
    calls = []

    def rule(entries: Entries, k: int, rng: np.random.Generator) -> np.ndarray:
        calls.append(len(entries))
        return uniform(entries, k, rng)

    buffer = make_buffer(recency_prob=1.0, rule=rule)
    buffer.add([make(0, 1), make(0, 2)])
    buffer.new_window()
    buffer.add([make(0, 3), make(1, 1)])  # one item of each: no group of two in the window
    (group,) = buffer.draw(3, 3)
    assert group.prompt_id == 0 and sorted(tokens_of(group)) == [1, 2, 3] and calls == [3]


def test_window_that_is_used_up_within_a_draw_falls_back_too() -> None:
    buffer = make_buffer(recency_prob=1.0)
    buffer.add([make(p, token) for p in (0, 1, 2) for token in (1, 2)])
    buffer.new_window()
    buffer.add([make(0, 3), make(0, 4)])
    for _ in range(20):
        groups = buffer.draw(2, 2)
        assert groups[0].prompt_id == 0 and set(tokens_of(groups[0])) == {3, 4}
        assert groups[1].prompt_id in (1, 2)


@pytest.mark.parametrize("m", [0.0, 1.0])
def test_prompts_are_drawn_without_replacement_in_rounds(m: float) -> None:
    buffer = make_buffer(recency_prob=m)
    buffer.add([make(p, token) for p in range(5) for token in (1, 2)])
    orders = set()
    for _ in range(20):
        order = tuple(buffer.draw(1, 2)[0].prompt_id for _ in range(5))
        assert sorted(order) == [0, 1, 2, 3, 4]
        orders.add(order)
    assert len(orders) > 10  # and in a new order each round


def test_new_prompts_join_the_round_and_known_ones_keep_their_turn() -> None:
    buffer = make_buffer(capacity_per_prompt=2)
    buffer.add([make(p, token) for p in (0, 1) for token in (1, 2)])
    first = buffer.draw(1, 2)[0].prompt_id
    # The drawn prompt loses items to a duplicate and to its capacity, but it was drawn already.
    buffer.add([make(first, 1), make(first, 3), make(2, 1), make(2, 2)])
    rest = {buffer.draw(1, 2)[0].prompt_id for _ in range(2)}
    assert rest == {0, 1, 2} - {first}


def test_prompt_whose_newcomer_pushes_out_its_own_item_keeps_its_turn() -> None:
    tried = 0
    for seed in range(20):
        buffer = make_buffer(max_tokens=2 * PROMPT + 4, seed=seed)
        buffer.add([make(p, token) for p in (0, 1) for token in (1, 2)])
        if buffer.draw(1, 2)[0].prompt_id == 0:
            buffer.add([make(0, 3)])  # for a moment the prompt has a single item
            assert contents(buffer) == {0: [2, 3], 1: [1, 2]}
            assert buffer.draw(1, 2)[0].prompt_id == 1
            tried += 1
    assert tried > 5


def test_a_prompt_occurs_once_in_a_draw_even_across_rounds_and_windows() -> None:
    buffer = make_buffer(recency_prob=0.5)
    buffer.add([make(p, token) for p in range(4) for token in (1, 2)])
    buffer.new_window()
    buffer.add([make(p, token) for p in (0, 1, 2) for token in (3, 4)])
    for _ in range(100):
        prompts = [g.prompt_id for g in buffer.draw(3, 2)]
        assert len(prompts) == len(set(prompts)) == 3
    assert len(buffer.draw(9, 2)) == 4  # fewer groups than asked, not a prompt twice


def test_prompts_with_one_item_are_not_drawn_nor_ready() -> None:
    buffer = make_buffer(recency_prob=0.5)
    assert buffer.draw(2, 2) == [] and not buffer.ready(1)
    buffer.add([make(0, 1), make(1, 1), make(1, 2)])
    assert buffer.ready(1) and not buffer.ready(2)
    assert [g.prompt_id for g in buffer.draw(2, 2)] == [1]
    buffer.add([make(0, 2)])
    assert buffer.ready(2)


def test_fewer_than_k_items_give_a_smaller_group_or_a_filled_one() -> None:
    for m in (0.0, 1.0):
        buffer = make_buffer(recency_prob=m)
        buffer.add([make(0, token) for token in (1, 2, 3)])
        (group,) = buffer.draw(1, 5)
        assert sorted(tokens_of(group)) == [1, 2, 3]
        buffer = make_buffer(recency_prob=m, fill_groups=True)
        buffer.add([make(0, token) for token in (1, 2, 3)])
        (group,) = buffer.draw(1, 8)
        counts = Counter(tokens_of(group))
        assert len(group.trajectories) == 8 and set(counts) == {1, 2, 3}
        assert group.uses == [0] * 8
        (group,) = buffer.draw(1, 3)
        assert dict(zip(tokens_of(group), group.uses, strict=True)) == counts
    with pytest.raises(ValueError, match="k=1"):
        buffer.draw(1, 1)
    for m in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="buffer.recency_prob"):
            buffer.draw(1, 2, recency_prob=m)


@pytest.mark.parametrize(
    "wrong", [[0, 0], [0, 2], [-1, 0], [0], [0.0, 1.0], [[0, 1]], [True, False]]
)
def test_rule_that_breaks_its_contract_is_named(wrong: list) -> None:
    buffer = make_buffer(rule=lambda entries, k, rng: np.array(wrong))
    buffer.add([make(0, 1), make(0, 2)])
    with pytest.raises(ValueError, match="buffer.rule"):
        buffer.draw(1, 2)


def test_rule_sees_the_items_in_order_of_arrival_and_cannot_write() -> None:
    seen: list[Entries] = []

    def rule(entries: Entries, k: int, rng: np.random.Generator) -> np.ndarray:
        seen.append(entries)
        return np.arange(k)[::-1]

    buffer = make_buffer(rule=rule)
    buffer.add([make(9, 0)])
    buffer.add([make(0, t, version=10 - t, reward=t / 2) for t in (3, 1, 2)])
    (group,) = buffer.draw(1, 2)
    assert tokens_of(group) == [1, 3]
    assert seen[0].rewards.tolist() == [1.5, 0.5, 1.0]
    assert seen[0].versions.tolist() == [7, 9, 8]
    assert seen[0].arrivals.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        seen[0].rewards[0] = 1


# Frequencies. Seeds are fixed: a test that passes once always does.


def chi_square(counts: Counter, probabilities: dict) -> float:
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    assert math.isclose(sum(probabilities.values()), 1)
    return sum((counts[x] - total * p) ** 2 / (total * p) for x, p in probabilities.items())


def assert_frequencies(counts: Counter, probabilities: dict) -> None:
    """Pearson's chi-square statistic within 4 standard deviations of its mean."""
    statistic = chi_square(counts, probabilities)
    freedom = len(probabilities) - 1
    assert abs(statistic - freedom) < 4 * math.sqrt(2 * freedom), statistic


REWARDS = np.array([0.0, 1.0, 2.0, 1.0, -1.0])


def entries_of(rewards: np.ndarray) -> Entries:
    n = rewards.shape[0]
    return Entries(rewards=rewards, versions=np.zeros(n, np.int64), arrivals=np.arange(n))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits)
    return weights / weights.sum()


@pytest.mark.parametrize("inverse_temperature", [0.0, 1.0, -0.5])
def test_softmax_of_reward_draws_one_item_by_the_formula(inverse_temperature: float) -> None:
    rng = np.random.default_rng(1)
    rule = functools.partial(softmax_of_reward, inverse_temperature=inverse_temperature)
    counts = Counter(int(rule(entries_of(REWARDS), 1, rng)[0]) for _ in range(20_000))
    assert_frequencies(counts, dict(enumerate(softmax(inverse_temperature * REWARDS))))


@pytest.mark.parametrize("shift", [0.0, 1e3, -1e300])
def test_softmax_of_reward_draws_two_without_replacement_by_the_two_step_formula(
    shift: float,
) -> None:
    rng = np.random.default_rng(2)
    rewards = REWARDS + shift  # at -1e300 all rewards round to the same one
    p = softmax(rewards - rewards.max())
    counts = Counter(
        tuple(softmax_of_reward(entries_of(rewards), 2, rng, inverse_temperature=1.0).tolist())
        for _ in range(20_000)
    )
    n = len(p)
    expected = {(i, j): p[i] * p[j] / (1 - p[i]) for i in range(n) for j in range(n) if i != j}
    assert_frequencies(counts, expected)


def test_softmax_of_reward_draws_three_one_after_another() -> None:
    rng = np.random.default_rng(6)
    p = softmax(0.5 * REWARDS)
    counts = Counter(
        tuple(softmax_of_reward(entries_of(REWARDS), 3, rng, inverse_temperature=0.5).tolist())
        for _ in range(30_000)
    )
    expected = {
        (i, j, k): p[i] * p[j] / (1 - p[i]) * p[k] / (1 - p[i] - p[j])
        for i, j, k in permutations(range(5), 3)
    }
    assert_frequencies(counts, expected)


def test_softmax_of_reward_refuses_an_infinite_temperature() -> None:
    with pytest.raises(ValueError, match="inverse_temperature"):
        softmax_of_reward(
            entries_of(REWARDS), 1, np.random.default_rng(0), inverse_temperature=math.inf
        )


def test_uniform_draws_every_ordered_pair_equally_often() -> None:
    rng = np.random.default_rng(3)
    counts = Counter(tuple(uniform(entries_of(REWARDS), 2, rng).tolist()) for _ in range(20_000))
    assert_frequencies(counts, {(i, j): 1 / 20 for i in range(5) for j in range(5) if i != j})


def test_share_of_slots_drawn_from_the_window_is_m() -> None:
    ruled = 0

    def rule(entries: Entries, k: int, rng: np.random.Generator) -> np.ndarray:
        nonlocal ruled
        ruled += 1
        return uniform(entries, k, rng)

    buffer = make_buffer(recency_prob=0.3, rule=rule)
    buffer.add([make(p, token) for p in range(10) for token in range(4)])
    buffer.new_window()
    buffer.add([make(p, token) for p in range(8) for token in (10, 11, 12)])
    slots = 6000
    for _ in range(slots // 3):
        buffer.draw(3, 2)
    assert_frequencies(Counter(rule=ruled, window=slots - ruled), {"rule": 0.7, "window": 0.3})


def test_recency_share_is_that_of_the_draw() -> None:
    buffer = make_buffer(recency_prob=0.9)
    buffer.add([make(p, token) for p in range(4) for token in range(2)])
    buffer.new_window()
    buffer.add([make(p, token) for p in range(10, 14) for token in range(2)])
    for m in (0.0, 0.25, 1.0, None):
        # The window has prompts 10 to 13, the whole store these and four more.
        share = 0.9 if m is None else m
        recent = share + (1 - share) / 2
        counts: Counter = Counter()
        for _ in range(3000):
            (group,) = buffer.draw(1, 2, recency_prob=m)
            counts[group.prompt_id >= 10] += 1
        if m == 1.0:
            assert counts == {True: 3000}
        elif m == 0.0:
            assert abs(counts[True] - 1500) <= 4  # in turn, so almost without chance
        else:
            p = {True: recent, False: 1 - recent}
            # In turn, the store's half is steadier than chance: only too far off is a failure.
            assert chi_square(counts, p) < 16


def test_prompts_in_turn_come_in_every_order_equally_often() -> None:
    buffer = make_buffer(seed=7)
    buffer.add([make(p, token) for p in range(4) for token in (1, 2)])
    orders = Counter(tuple(g.prompt_id for g in buffer.draw(4, 2)) for _ in range(4000))
    assert_frequencies(orders, dict.fromkeys(permutations(range(4)), 1 / 24))


# Prompt, its rewards: variances 1/4, 2, 0, 0; means 1/2, 0, 1, -1
PRIORITY_REWARDS = {0: [0, 1], 1: [-2, 0, 2, 0], 2: [1, 1], 3: [-1, -1, -1]}


def priority_buffer(kind: str, **options: Any) -> Buffer:
    buffer = make_buffer(prompt_priority=kind, prompt_temperature=2.0, seed=5, **options)
    # The way there must not count: other rewards first, then these, and a prompt that goes again.
    buffer.add([make(p, token, reward=9.0 * token) for p in PRIORITY_REWARDS for token in (1, 2)])
    buffer.draw(2, 2)
    for prompt_id, rewards in PRIORITY_REWARDS.items():
        for token, reward in enumerate(rewards, 1):
            buffer.add([make(prompt_id, token, reward=float(reward), version=1)])
            buffer.draw(2, 2)
    buffer.add([make(9, 1, reward=100.0)])  # one item: not drawn
    return buffer


def priority_weights(kind: str) -> dict[int, float]:
    if kind == "difficulty":
        weights = {p: math.exp(-np.mean(r) / 2.0) for p, r in PRIORITY_REWARDS.items()}
    else:
        variances = {p: float(np.var(r)) for p, r in PRIORITY_REWARDS.items()}
        floor = VARIANCE_FLOOR * float(np.mean(list(variances.values())))
        weights = {p: v + floor for p, v in variances.items()}
    total = sum(weights.values())
    return {p: w / total for p, w in weights.items()}


@pytest.mark.parametrize("kind", ["reward_variance", "difficulty"])
def test_prompt_priority_draws_by_its_weights(kind: str) -> None:
    buffer = priority_buffer(kind)
    counts = Counter(buffer.draw(1, 2)[0].prompt_id for _ in range(10_000))
    assert_frequencies(counts, priority_weights(kind))


@pytest.mark.parametrize("kind", ["reward_variance", "difficulty"])
def test_prompt_priority_draws_distinct_prompts_one_after_another(kind: str) -> None:
    buffer = priority_buffer(kind)
    counts = Counter(tuple(g.prompt_id for g in buffer.draw(2, 2)) for _ in range(10_000))
    p = priority_weights(kind)
    expected = {(i, j): p[i] * p[j] / (1 - p[i]) for i in p for j in p if i != j}
    assert_frequencies(counts, expected)
    assert sorted(g.prompt_id for g in buffer.draw(9, 2)) == [0, 1, 2, 3]


def test_prompt_priority_keeps_its_weights_when_a_prompt_goes() -> None:
    buffer = make_buffer(prompt_priority="difficulty", max_staleness=0)
    for p, reward in enumerate((0.5, 1.0, 0.0, -1.0)):
        buffer.add([make(p, token, reward=reward, version=min(p, 1)) for token in (1, 2)])
    buffer.draw(1, 2)
    buffer.expire(1)  # prompt 0
    counts = Counter(buffer.draw(1, 2)[0].prompt_id for _ in range(10_000))
    p = softmax(-np.array([1.0, 0.0, -1.0]))
    assert_frequencies(counts, dict(enumerate(p, 1)))


@pytest.mark.parametrize("kind", ["reward_variance", "difficulty"])
def test_prompt_priority_leaves_the_window_in_turn(kind: str) -> None:
    buffer = priority_buffer(kind)
    buffer.new_window()
    buffer.add([make(p, token, reward=5.0) for p in (20, 21) for token in (1, 2)])
    for _ in range(10):
        pair = [buffer.draw(1, 2, recency_prob=1.0)[0].prompt_id for _ in range(2)]
        assert sorted(pair) == [20, 21]
    # With m = 1/2 and the prompts of the window out of reach of the weights (difficulty aside).
    weights = priority_weights(kind)
    counts: Counter = Counter()
    for _ in range(8000):
        prompt_id = buffer.draw(1, 2, recency_prob=0.5)[0].prompt_id
        if prompt_id < 20:
            counts[prompt_id] += 1
    if kind == "reward_variance":  # two prompts more lower the mean variance and so the floor
        floor = VARIANCE_FLOOR * 2.25 / 6
        variances = {p: float(np.var(r)) for p, r in PRIORITY_REWARDS.items()}
        weights = {p: v + floor for p, v in variances.items()}
        weights = {p: w / sum(weights.values()) for p, w in weights.items()}
    assert_frequencies(counts, weights)


@pytest.mark.parametrize("kind", ["reward_variance", "difficulty"])
@pytest.mark.parametrize("scale", [0.0, 0.1, 1e200, 1e308])
def test_prompt_priority_bears_equal_and_huge_rewards(kind: str, scale: float) -> None:
    buffer = make_buffer(prompt_priority=kind)
    for p, count in enumerate((3, 6, 10)):  # the mean of ten times 0.1 is not 0.1 in floats
        buffer.add([make(p, token, reward=scale) for token in range(count)])
    counts = Counter(buffer.draw(1, 2)[0].prompt_id for _ in range(3000))
    assert_frequencies(counts, dict.fromkeys(range(3), 1 / 3))
    buffer.add([make(0, 20, reward=-scale)])
    for _ in range(20):  # whatever the weights are, all prompts can come
        assert sorted(g.prompt_id for g in buffer.draw(3, 2)) == [0, 1, 2]
    if scale:  # prompt 0 has by far the largest variance, and the lowest mean
        first = Counter(buffer.draw(1, 2)[0].prompt_id for _ in range(200))
        assert first[0] > 60


def test_buffer_draws_items_by_its_rule() -> None:
    rule = functools.partial(softmax_of_reward, inverse_temperature=1.0)
    buffer = make_buffer(rule=rule, seed=4)
    buffer.add([make(0, i, reward=float(r)) for i, r in enumerate(REWARDS)])
    p = softmax(REWARDS)
    counts = Counter(tuple(tokens_of(buffer.draw(1, 2)[0])) for _ in range(5000))
    pairs = [(i, j) for i in range(5) for j in range(5) if i != j]
    assert_frequencies(counts, {(i, j): p[i] * p[j] / (1 - p[i]) for i, j in pairs})


# Determinism and state


def scenario(buffer: Buffer, rng: np.random.Generator, steps: int) -> list:
    result = []
    for step in range(steps):
        if step % 3 == 0:
            buffer.new_window()
        buffer.add(
            make(
                int(rng.integers(6)),
                int(rng.integers(20)),
                version=step,
                reward=float(rng.normal()),
                length=int(rng.integers(1, 6)),
            )
            for _ in range(7)
        )
        result.append(drawn(buffer.draw(3, 4)))
    return result


def scenario_buffer(seed: int) -> Buffer:
    return make_buffer(
        max_tokens=150,
        capacity_per_prompt=9,
        recency_prob=0.5,
        seed=seed,
        rule=functools.partial(softmax_of_reward, inverse_temperature=0.5),
    )


def test_draws_depend_on_the_seed_and_the_calls_alone() -> None:
    runs = [scenario(scenario_buffer(seed), np.random.default_rng(0), 30) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def saved(buffer: Buffer) -> dict:
    """A state after a trip through the formats that checkpoints use."""
    state = buffer.state_dict()
    return {
        "arrays": safetensors_numpy.load(safetensors_numpy.save(state["arrays"])),
        "meta": json.loads(json.dumps(state["meta"])),
    }


def test_state_continues_with_the_same_draws() -> None:
    for stop in (0, 1, 7, 20):
        straight, rng = scenario_buffer(1), np.random.default_rng(0)
        scenario(straight, rng, stop)
        straight.new_window()
        resumed = scenario_buffer(99)
        scenario(resumed, np.random.default_rng(5), 3)  # whatever it held is replaced
        resumed.load_state_dict(saved(straight))
        rest_rng = np.random.default_rng(stop)
        rest = scenario(straight, np.random.default_rng(stop), 20)
        assert scenario(resumed, rest_rng, 20) == rest
        for name in ("received", "duplicates", "evicted", "dropped", "tokens", "prompts"):
            assert getattr(resumed, f"num_{name}") == getattr(straight, f"num_{name}"), name


def test_saving_does_not_change_later_draws_and_copies_the_contents() -> None:
    watched, plain = scenario_buffer(1), scenario_buffer(1)
    rngs = np.random.default_rng(0), np.random.default_rng(0)
    for _ in range(5):
        before = watched.state_dict()
        tokens = before["arrays"]["tokens"].tobytes()
        assert scenario(watched, rngs[0], 4) == scenario(plain, rngs[1], 4)
        assert before["arrays"]["tokens"].tobytes() == tokens


def test_loaded_contents_shrink_to_smaller_bounds() -> None:
    big = make_buffer()
    big.add([make(p, token, version=token) for p in (0, 1) for token in range(10)])
    small = make_buffer(capacity_per_prompt=3)
    small.load_state_dict(big.state_dict())
    assert contents(small) == {0: [7, 8, 9], 1: [7, 8, 9]} and small.num_evicted == 14
    small = make_buffer(capacity_per_prompt=3, max_tokens=8)
    small.load_state_dict(big.state_dict())
    assert contents(small) == {0: [9], 1: [7, 8, 9]} and small.num_tokens == 8
    assert small.ready(1) and not small.ready(2)
    assert [g.prompt_id for g in small.draw(2, 2)] == [1]


def dealt(states: list[dict], size: int, **options: Any) -> list[Buffer]:
    """Buffers of `size` trainers, filled from the states of others."""
    buffers = [make_buffer(**options) for _ in range(size)]
    for rank, buffer in enumerate(buffers):
        buffer.load_shares(states, lambda prompt_id, rank=rank: prompt_id % size == rank)
    return buffers


def records(buffer: Buffer) -> list[tuple]:
    """All that is stored of every response, in order of arrival."""
    arrays = buffer.state_dict()["arrays"]
    rows, _ = buffer._store.live_rows(arrays["arrival"])
    prompts = [np.frombuffer(buffer._prompts[p].tokens, np.int32) for p in arrays["prompt_id"]]
    return [
        (
            *(t.prompt_id, t.prompt_tokens.tobytes(), t.response_tokens.tobytes(), t.reward),
            *(t.behavior_logprobs.tobytes(), t.old_logprobs.tobytes(), tuple(t.reward_parts)),
            *(t.reference_logprobs.tobytes(), t.reference_version, t.truncated),
            *(t.version_start, t.version_end, offsets_of(t).tobytes(), uses),
        )
        for t, uses in zip(buffer._store.read(rows, prompts), arrays["uses"].tolist(), strict=True)
    ]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2), (2, 7)])
def test_shares_hold_every_response_once_with_its_uses(before: int, after: int) -> None:
    sources = [scenario_buffer(rank) for rank in range(before)]
    for rank, source in enumerate(sources):
        rng = np.random.default_rng(rank)
        for step in range(6):
            source.new_window()
            source.add(
                make(
                    before * int(rng.integers(3)) + rank,
                    int(rng.integers(20)),
                    version=step,
                    reward=float(rng.normal()),
                    length=int(rng.integers(1, 6)),
                )
                for _ in range(7)
            )
            source.draw(3, 4)
    want = Counter(record for source in sources for record in records(source))
    assert max(record[-1] for record in want) > 1
    buffers = dealt([saved(source) for source in sources], after)
    assert Counter(record for buffer in buffers for record in records(buffer)) == want
    for rank, buffer in enumerate(buffers):
        assert all(prompt_id % after == rank for prompt_id in contents(buffer))
        assert buffer.num_received == buffer.num_trajectories
        if buffer.ready(1):
            buffer.draw(1, 2)


def test_what_was_recent_is_recent_in_a_share() -> None:
    """Although another source's older responses have higher arrival numbers."""
    first, second = make_buffer(), make_buffer()
    first.add([make(0, token) for token in range(8)])
    first.new_window()
    first.add([make(0, token) for token in (20, 21)])
    second.add([make(1, token) for token in (1, 2, 3)])
    second.new_window()
    second.add([make(1, token) for token in (30, 31)])
    (together,) = dealt([saved(first), saved(second)], 1)
    assert window(together, 0) == {20, 21} and window(together, 1) == {30, 31}
    assert contents(together)[0] == [*range(8), 20, 21]
    together.new_window()
    together.add([make(0, token) for token in (40, 41)])
    assert window(together, 0) == {40, 41}


def test_shares_keep_to_the_bounds_of_their_owner() -> None:
    source = make_buffer()
    source.add([make(0, token, version=token) for token in range(10)])
    (small,) = dealt([saved(source)], 1, capacity_per_prompt=3)
    assert contents(small) == {0: [7, 8, 9]}
    assert records(small) == records(source)[7:]
    (small,) = dealt([saved(source)], 1, max_tokens=6)
    assert contents(small) == {0: [6, 7, 8, 9]} and small.num_tokens == 6


def test_shares_replace_what_was_there() -> None:
    """`mode=offline` reads its data before it goes on from a checkpoint."""
    source = make_buffer()
    source.add([make(0, token) for token in (1, 2)])
    buffers = [make_buffer(), make_buffer()]
    buffers[1].add([make(0, token) for token in (1, 8, 9)] + [make(5, 3), make(5, 4)])
    for buffer in buffers:
        buffer.load_shares([saved(source)], lambda prompt_id: True)
    assert contents(buffers[1]) == {0: [1, 2]} and buffers[1].num_received == 2
    assert not buffers[1].ready(2)
    draws = [[drawn(buffer.draw(1, 2)) for _ in range(9)] for buffer in buffers]
    assert draws[0] == draws[1]


def test_a_share_of_nothing_is_empty_and_a_damaged_state_is_refused() -> None:
    source = make_buffer()
    source.add([make(0, token) for token in (1, 2)])
    mine, empty = dealt([saved(make_buffer()), saved(source)], 2)
    assert contents(mine) == {0: [1, 2]}
    assert contents(empty) == {} and not empty.ready(1)
    state = saved(source)
    state["arrays"]["length"] = state["arrays"]["length"] + 1
    with pytest.raises(ValueError, match="buffer state: length"):
        dealt([state], 1)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("tokens", lambda a: a[:-1]),
        ("tokens", lambda a: a.astype(np.int64)),
        ("length", lambda a: a + 1),
        ("length", lambda a: -a),
        ("reward", lambda a: a[:-1]),
        ("parts", lambda a: a[:, :0]),
        ("arrival", lambda a: a[::-1]),
        ("arrival", lambda a: a + 10**6),
        ("prompt.length", lambda a: a * 2),
        ("prompt.id", lambda a: a + 1),
        ("everything.fresh", lambda a: a[:-1]),
        ("window.used", lambda a: np.append(a, 77)),
        ("old", lambda a: np.append(a, a.dtype.type(0))),
        ("old_differs", lambda a: ~a),
        ("reference_version", lambda a: a[1:]),
        ("meta._newest_version", None),
        ("window.fresh", None),
        ("meta.rng", {"bit_generator": "PCG64"}),
        ("meta.rng", 1),
        ("meta.num_evicted", None),
    ],
)
def test_damaged_state_is_refused_and_the_buffer_kept(name: str, change: object) -> None:
    buffer = make_buffer()
    buffer.add([make(p, token) for p in (0, 1, 2) for token in (1, 2, 3)])
    buffer.draw(1, 2)
    state = saved(buffer)
    target = state["meta"] if name.startswith("meta.") else state["arrays"]
    name = name.removeprefix("meta.")
    if change is None:
        del target[name]
    else:
        target[name] = change(target[name]) if callable(change) else change
    other = make_buffer()
    other.add([make(5, 1), make(5, 2)])
    with pytest.raises(ValueError, match="buffer state"):
        other.load_state_dict(state)
    assert contents(other) == {5: [1, 2]} and other.draw(1, 2)[0].prompt_id == 5


# A slow obvious model


@dataclass
class Item:
    key: tuple[int, int]  # token and length, which tell a response apart
    version: int
    reward: float
    arrival: int
    recent: bool
    old: float | None  # each token's old log-prob; None: the behavior log-prob
    uses: int = 0
    reference: float = 0.0
    reference_version: int = 0


@dataclass
class Model:
    """What the buffer must hold, kept as plain lists."""

    capacity: int
    max_tokens: int
    deduplicate: bool
    eviction: str
    max_staleness: int | None
    prompts: dict[int, list[Item]] = field(default_factory=dict)
    arrival: int = 0
    pending: bool = False
    newest: int | None = None
    duplicates: int = 0
    evicted: int = 0
    expired: int = 0
    dropped: int = 0

    def tokens(self) -> int:
        return sum(PROMPT + sum(i.key[1] for i in items) for items in self.prompts.values())

    def items(self) -> dict[int, tuple[int, Item]]:
        return {i.arrival: (p, i) for p, items in self.prompts.items() for i in items}

    def stale(self, version: int) -> bool:
        if self.max_staleness is None or self.newest is None:
            return False
        return version < self.newest - self.max_staleness

    def remove(self, prompt_id: int, item: Item) -> None:
        self.prompts[prompt_id].remove(item)
        if not self.prompts[prompt_id]:
            del self.prompts[prompt_id]

    def add(self, t: Trajectory) -> None:
        token, length = int(t.response_tokens[0]), len(t.response_tokens)
        if PROMPT + length > self.max_tokens:
            self.dropped += 1
            return
        if self.stale(t.version_start):
            self.expired += 1
            return
        by_version = self.eviction == "oldest"
        old = float(t.old_logprobs[0])
        new = Item(
            (token, length),
            t.version_start,
            t.reward,
            self.arrival,
            True,
            None if t.old_logprobs is t.behavior_logprobs else old,
            reference=float(t.reference_logprobs[0]),
        )
        items = self.prompts.get(t.prompt_id, [])
        kept = [i for i in items if not (self.deduplicate and i.key == new.key)]
        # The newcomer arrived last, so that among equals it never goes.
        kept.append(new)
        first = min(kept, key=lambda i: (i.version if by_version else i.reward, i.arrival))
        if len(kept) > self.capacity and first is new:
            self.dropped += 1
            return
        self.duplicates += len(items) - len(kept) + 1
        self.arrival += 1
        if self.pending:
            self.pending = False
            for i in [*kept, *(i for its in self.prompts.values() for i in its)]:
                i.recent = i is new
        self.prompts[t.prompt_id] = kept
        if len(kept) > self.capacity:
            self.remove(t.prompt_id, first)
            self.evicted += 1
        while self.tokens() > self.max_tokens:
            owner, item = min(
                (pair for pair in self.items().values() if pair[1] is not new),
                key=lambda pair: (0 if by_version else pair[1].reward, pair[1].arrival),
            )
            self.remove(owner, item)
            self.evicted += 1

    def expire(self, version: int) -> None:
        self.newest = version if self.newest is None else max(version, self.newest)
        for prompt_id, item in self.items().values():
            if self.stale(item.version):
                self.remove(prompt_id, item)
                self.expired += 1

    def draw(self, groups: list[Group], num_prompts: int, k: int, m: float) -> None:
        """Check a draw against what could be drawn, and count it."""
        eligible = [p for p, items in self.prompts.items() if len(items) >= 2]
        assert len(groups) == min(num_prompts, len(eligible))
        assert len({g.prompt_id for g in groups}) == len(groups)
        for number, group in enumerate(groups):
            stored = {i.arrival: i for i in self.prompts[group.prompt_id]}
            assert len(set(group.items)) == len(group.items)
            windows = [
                sum(i.recent for i in items) >= 2
                and p not in [g.prompt_id for g in groups[:number]]
                for p, items in self.prompts.items()
            ]
            if m == 1 and any(windows):
                recent = [i for i in stored.values() if i.recent]
                assert {stored[a].recent for a in group.items} == {True}
                assert len(group.items) == min(k, len(recent))
            elif m == 0 or not any(windows):
                assert len(group.items) == min(k, len(stored))
            for t, uses, arrival in zip(group.trajectories, group.uses, group.items, strict=True):
                i = stored[arrival]
                length = len(t.response_tokens)
                assert (t.prompt_id, t.version_start, t.reward) == (
                    group.prompt_id,
                    i.version,
                    i.reward,
                )
                assert i.key == (t.response_tokens[0], length) and uses == i.uses
                assert t.reference_version == i.reference_version
                assert t.reference_logprobs.tolist() == [i.reference] * length
                offsets = offsets_for(int(t.response_tokens[0]), length)
                assert t.versions.tolist() == (i.version + offsets).tolist()
                assert (t.version_offsets is None) == (not offsets.any())
                assert t.version_end == i.version + offsets[-1]
                assert (t.old_logprobs is t.behavior_logprobs) == (i.old is None)
                if i.old is not None:
                    assert t.old_logprobs.tolist() == [i.old] * length
                i.uses += 1


# prompt_id, token, length, version, reward, whether the old log-probs differ: few of each, so that
# duplicates, full prompts and ties are common
TRAJECTORY = st.tuples(
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(0, 4),
    st.integers(-1, 2),
    st.sampled_from([False, False, False, True]),
)
ADD = st.tuples(st.just("add"), st.lists(TRAJECTORY, min_size=1, max_size=8))
DRAW = st.tuples(
    st.just("draw"), st.integers(1, 3), st.integers(2, 4), st.sampled_from([None, 0.0, 0.5, 1.0])
)
OPERATIONS = st.lists(
    st.one_of(
        ADD,
        ADD,
        ADD,
        DRAW,
        st.just(("window",)),
        st.just(("reload",)),
        st.tuples(st.just("expire"), st.integers(0, 6)),
        st.tuples(st.just("reference"), st.lists(st.integers(0, 40), max_size=4, unique=True)),
    ),
    max_size=40,
)


@pytest.fixture
def small_store() -> Iterator[None]:
    """Segments of a few responses, so that they are emptied, freed and filled again."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store_module, "_SEGMENT_TOKENS", 48)
        patch.setattr(store_module, "_LOWEST", 2)
        yield


@settings(
    deadline=None,
    database=None,
    max_examples=400,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # its patch may last
)
@given(
    operations=OPERATIONS,
    capacity=st.integers(2, 4),
    max_tokens=st.integers(4, 60),
    deduplicate=st.booleans(),
    m=st.sampled_from([0, 0.5, 1]),
    eviction=st.sampled_from(["oldest", "lowest_reward"]),
    max_staleness=st.sampled_from([None, 0, 2]),
    priority=st.sampled_from(["none", "reward_variance", "difficulty"]),
)
def test_contents_match_a_slow_model(
    small_store: None,
    operations: list[tuple],
    capacity: int,
    max_tokens: int,
    deduplicate: bool,
    m: float,
    eviction: str,
    max_staleness: int | None,
    priority: str,
) -> None:
    def new() -> Buffer:
        return make_buffer(
            capacity_per_prompt=capacity,
            max_tokens=max_tokens,
            deduplicate=deduplicate,
            recency_prob=m,
            rule=functools.partial(softmax_of_reward, inverse_temperature=1.0),
            eviction=eviction,
            max_staleness=max_staleness,
            prompt_priority=priority,
        )

    buffer, model = new(), Model(capacity, max_tokens, deduplicate, eviction, max_staleness)
    received = 0
    for number, operation in enumerate(operations):
        if operation[0] == "add":
            batch = []
            for prompt_id, token, length, version, reward, differs in operation[1]:
                old = np.full(length, -0.5, np.float32) if differs else None
                t = make(prompt_id, token, version=version, length=length, old_logprobs=old)
                t.reward = float(reward)
                t.reward_parts = {"correct": t.reward} if token > 1 else {}
                batch.append(t)
            buffer.add(batch)
            for t in batch:
                model.add(t)
            received += len(batch)
        elif operation[0] == "window":
            buffer.new_window()
            model.pending = True
        elif operation[0] == "expire":
            buffer.expire(operation[1])
            model.expire(operation[1])
        elif operation[0] == "reference":
            items = [i for i in operation[1] if i < model.arrival]
            stored = model.items()
            lengths = [stored[i][1].key[1] if i in stored else 3 for i in items]
            buffer.set_reference(items, [np.full(n, number, np.float32) for n in lengths], number)
            for i in items:
                if i in stored:
                    stored[i][1].reference = stored[i][1].reference_version = number
        elif operation[0] == "draw":
            _, num_prompts, k, override = operation
            groups = buffer.draw(num_prompts, k, recency_prob=override)
            model.draw(groups, num_prompts, k, m if override is None else override)
        else:
            loaded = new()
            loaded.load_state_dict(saved(buffer))
            groups = buffer.draw(3, 3)
            assert drawn(loaded.draw(3, 3)) == drawn(groups)
            model.draw(groups, 3, 3, m)
            buffer = loaded
    check_contents(buffer, model)
    assert buffer.num_received == received


def check_contents(buffer: Buffer, model: Model) -> None:
    state = buffer.state_dict()
    arrays, meta = state["arrays"], state["meta"]
    starts = np.cumsum(arrays["length"]) - arrays["length"]
    old_starts = np.cumsum(arrays["length"] * arrays["old_differs"])
    got: dict[int, list[Item]] = {}
    for row, start in enumerate(starts.tolist()):
        length = int(arrays["length"][row])
        token = int(arrays["tokens"][start])
        piece = slice(start, start + length)
        assert (arrays["tokens"][piece] == token).all()
        assert (arrays["behavior"][piece] == -token).all()
        reference = float(arrays["reference"][start])
        assert (arrays["reference"][piece] == reference).all()
        old = None
        if arrays["old_differs"][row]:
            values = arrays["old"][old_starts[row] - length : old_starts[row]]
            old = float(values[0])
            assert (values == old).all()
        if meta["part_names"]:
            part = arrays["parts"][row, 0]
            assert part == arrays["reward"][row] if token > 1 else np.isnan(part)
        item = Item(
            (token, length),
            int(arrays["version_start"][row]),
            float(arrays["reward"][row]),
            int(arrays["arrival"][row]),
            bool(arrays["arrival"][row] >= meta["_window_start"]),
            old,
            int(arrays["uses"][row]),
            reference,
            int(arrays["reference_version"][row]),
        )
        got.setdefault(int(arrays["prompt_id"][row]), []).append(item)
    assert got == model.prompts
    assert sum(len(items) for items in got.values()) == buffer.num_trajectories
    assert buffer.num_prompts == len(model.prompts)
    assert buffer.num_tokens == model.tokens() <= buffer.max_tokens
    lost = {
        "duplicates": buffer.num_duplicates,
        "evicted": buffer.num_evicted,
        "expired": buffer.num_expired,
        "dropped": buffer.num_dropped,
    }
    assert lost == {name: getattr(model, name) for name in lost}
    assert buffer.num_received == buffer.num_trajectories + sum(lost.values())
    if buffer.num_trajectories and buffer.max_staleness is None:
        assert any(i.recent for items in got.values() for i in items)  # the window is never empty


@pytest.mark.parametrize("eviction", ["oldest", "lowest_reward"])
@pytest.mark.parametrize("segment_tokens", [300, 1 << 20])  # about one response, and many
def test_long_use_keeps_tokens_whole_and_memory_bounded(
    segment_tokens: int, eviction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "_SEGMENT_TOKENS", segment_tokens)
    rng = np.random.default_rng(0)
    buffer = make_buffer(max_tokens=20_000, capacity_per_prompt=10, eviction=eviction)
    for version in range(60):
        batch = []
        for i, n in enumerate(rng.integers(1, 200, 100).tolist()):
            token = version * 100 + i
            old = np.full(n, -3 * token, np.float32) if i % 50 == 0 else None
            more = {"version": version, "reward": float(rng.normal()), "old_logprobs": old}
            batch.append(make(int(rng.integers(50)), token=token, length=n, **more))
        buffer.add(batch)
        for group in buffer.draw(7, 5):
            for t in group.trajectories:
                token = t.response_tokens[0]
                assert (t.response_tokens == token).all()
                assert (t.behavior_logprobs == -token).all()
                assert (t.old_logprobs == (-token if token % 50 else -3 * token)).all()
                assert (t.reference_logprobs == -2 * token).all()
        store = buffer._store
        segments = store.segments
        assert segments.allocated_tokens == sum(s.size for s in segments.all())
        assert sum(s.live for s in segments.all()) == store.live_tokens
        bound = store.live_tokens * 9 / 8 + 2 * segments.segment_tokens
        assert segments.allocated_tokens <= bound
        assert store.columns["live"].shape[0] <= 2000
    assert buffer.num_tokens <= 20_000
    assert buffer.num_evicted > 5000
