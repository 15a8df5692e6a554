"""Buffer semantics one by one, draw frequencies against formulas, and a slow obvious model."""

import functools
import json
import math
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import numpy as safetensors_numpy

import buffer as buffer_module
from buffer import Buffer, Entries, Group, Rule, softmax_of_reward, uniform
from trajectory import Trajectory

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
        "version_end": version + 1,
        "truncated": False,
    }
    fields |= more
    if fields["old_logprobs"] is None:  # as usual, the very array of the behavior log-probs
        fields["old_logprobs"] = fields["behavior_logprobs"]
    return Trajectory(**fields)


def make_buffer(
    *,
    max_tokens: int = 10**6,
    deduplicate: bool = True,
    recency_prob: float = 0.0,
    rule: Rule = uniform,
    seed: int = 0,
    capacity_per_prompt: int = 100,
    fill_groups: bool = False,
) -> Buffer:
    return Buffer(
        max_tokens=max_tokens,
        deduplicate=deduplicate,
        recency_prob=recency_prob,
        rule=rule,
        seed=seed,
        capacity_per_prompt=capacity_per_prompt,
        fill_groups=fill_groups,
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
    assert not group.trajectories[0].prompt_tokens.flags.writeable


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


def assert_frequencies(counts: Counter, probabilities: dict) -> None:
    """Pearson's chi-square statistic within 4 standard deviations of its mean."""
    total = sum(counts.values())
    assert set(counts) <= set(probabilities)
    assert math.isclose(sum(probabilities.values()), 1)
    statistic = sum((counts[x] - total * p) ** 2 / (total * p) for x, p in probabilities.items())
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
    uses: int = 0


@dataclass
class Model:
    """What the buffer must hold, kept as plain lists."""

    capacity: int
    max_tokens: int
    deduplicate: bool
    prompts: dict[int, list[Item]] = field(default_factory=dict)
    arrival: int = 0
    pending: bool = False
    duplicates: int = 0
    evicted: int = 0
    dropped: int = 0

    def tokens(self) -> int:
        return sum(PROMPT + sum(i.key[1] for i in items) for items in self.prompts.values())

    def add(self, prompt_id: int, token: int, length: int, version: int, reward: float) -> None:
        if PROMPT + length > self.max_tokens:
            self.dropped += 1
            return
        items = self.prompts.get(prompt_id, [])
        kept = [i for i in items if not (self.deduplicate and i.key == (token, length))]
        if len(kept) == self.capacity and version < min(i.version for i in kept):
            self.dropped += 1
            return
        self.duplicates += len(items) - len(kept)
        new = Item((token, length), version, reward, self.arrival, True)
        self.arrival += 1
        if self.pending:
            self.pending = False
            for i in [*kept, *(i for its in self.prompts.values() for i in its)]:
                i.recent = False
        kept.append(new)
        if len(kept) > self.capacity:
            kept.remove(min(kept, key=lambda i: (i.version, i.arrival)))
            self.evicted += 1
        self.prompts[prompt_id] = kept
        while self.tokens() > self.max_tokens:
            _, owner = min((i.arrival, p) for p, its in self.prompts.items() for i in its)
            self.prompts[owner].pop(0)
            if not self.prompts[owner]:
                del self.prompts[owner]
            self.evicted += 1

    def draw(self, groups: list[Group]) -> None:
        """Check a draw against what could be drawn, and count it."""
        for group in groups:
            items: dict[tuple[int, int], list[Item]] = {}
            for i in self.prompts[group.prompt_id]:
                items.setdefault(i.key, []).append(i)
            for t, uses in zip(group.trajectories, group.uses, strict=True):
                twins = items[int(t.response_tokens[0]), t.response_tokens.shape[0]]
                match = [i for i in twins if (i.version, i.reward) == (t.version_start, t.reward)]
                match = [i for i in match if i.uses == uses]
                assert match
                match[0].uses += 1  # twins that differ in nothing but arrival are exchangeable


# prompt_id, token, length, version: few of each, so that duplicates and full prompts are common
ADD = st.tuples(
    st.just("add"), st.integers(0, 4), st.integers(0, 3), st.integers(1, 5), st.integers(0, 4)
)
DRAW = st.tuples(st.just("draw"), st.integers(1, 3), st.integers(2, 4))
OPERATIONS = st.lists(
    st.one_of(ADD, ADD, ADD, DRAW, st.just(("window",)), st.just(("reload",))), max_size=60
)


@settings(deadline=None, database=None, max_examples=200)
@given(
    OPERATIONS, st.integers(2, 4), st.integers(4, 40), st.booleans(), st.sampled_from([0, 0.5, 1])
)
def test_contents_match_a_slow_model(
    operations: list[tuple], capacity: int, max_tokens: int, deduplicate: bool, m: float
) -> None:
    def new() -> Buffer:
        return make_buffer(
            capacity_per_prompt=capacity,
            max_tokens=max_tokens,
            deduplicate=deduplicate,
            recency_prob=m,
        )

    buffer, model = new(), Model(capacity, max_tokens, deduplicate)
    received = 0
    for number, operation in enumerate(operations):
        if operation[0] == "add":
            _, prompt_id, token, length, version = operation
            reward = float(number)  # tells every arrival apart
            buffer.add([make(prompt_id, token, version=version, reward=reward, length=length)])
            model.add(prompt_id, token, length, version, reward)
            received += 1
        elif operation[0] == "window":
            buffer.new_window()
            model.pending = True
        elif operation[0] == "draw":
            groups = buffer.draw(operation[1], operation[2])
            eligible = [p for p, items in model.prompts.items() if len(items) >= 2]
            assert len(groups) == min(operation[1], len(eligible))
            assert len({g.prompt_id for g in groups}) == len(groups)
            if m == 1 and groups:
                recent = {p: [i for i in its if i.recent] for p, its in model.prompts.items()}
                if any(len(its) >= 2 for its in recent.values()):
                    rewards = {i.reward for i in recent[groups[0].prompt_id]}
                    assert {t.reward for t in groups[0].trajectories} <= rewards
            model.draw(groups)
        else:
            state = saved(buffer)
            buffer = new()
            buffer.load_state_dict(state)
    state = buffer.state_dict()
    arrays, meta = state["arrays"], state["meta"]
    starts = np.cumsum(arrays["length"]) - arrays["length"]
    got: dict[int, list[tuple]] = {}
    for row, start in enumerate(starts.tolist()):
        length = int(arrays["length"][row])
        token = int(arrays["tokens"][start])
        piece = slice(start, start + length)
        assert (arrays["tokens"][piece] == token).all()
        assert (arrays["behavior"][piece] == -token).all()
        assert (arrays["reference"][piece] == -2 * token).all()
        assert arrays["parts"][row, 0] == arrays["reward"][row]
        got.setdefault(int(arrays["prompt_id"][row]), []).append(
            (
                (token, length),
                int(arrays["version_start"][row]),
                float(arrays["reward"][row]),
                int(arrays["arrival"][row]),
                bool(arrays["arrival"][row] >= meta["_window_start"]),
                int(arrays["uses"][row]),
            )
        )
    assert got == {
        p: [(i.key, i.version, i.reward, i.arrival, i.recent, i.uses) for i in items]
        for p, items in model.prompts.items()
    }
    assert sum(len(items) for items in got.values()) == buffer.num_trajectories
    assert buffer.num_prompts == len(model.prompts)
    assert buffer.num_tokens == model.tokens() <= max_tokens
    assert buffer.num_duplicates == model.duplicates
    assert buffer.num_evicted == model.evicted
    assert buffer.num_dropped == model.dropped
    stored = buffer.num_trajectories
    lost = buffer.num_duplicates + buffer.num_evicted + buffer.num_dropped
    assert buffer.num_received == received == stored + lost
    if stored:
        assert any(i[4] for items in got.values() for i in items)  # the window is never empty


@pytest.mark.parametrize("copy_tokens", [100, 1 << 18])  # below, and far above, one response
def test_long_use_keeps_tokens_whole_and_memory_bounded(
    copy_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer_module, "_COPY_TOKENS", copy_tokens)
    rng = np.random.default_rng(0)
    buffer = make_buffer(max_tokens=20_000, capacity_per_prompt=10)
    for version in range(60):
        buffer.add(
            make(int(rng.integers(50)), token=version * 100 + i, version=version, length=int(n))
            for i, n in enumerate(rng.integers(1, 200, 100))
        )
        for group in buffer.draw(7, 5):
            for t in group.trajectories:
                assert (t.response_tokens == t.response_tokens[0]).all()
                assert (t.behavior_logprobs == -t.response_tokens[0]).all()
                assert (t.reference_logprobs == -2 * t.response_tokens[0]).all()
    assert buffer.num_tokens <= 20_000
    assert buffer._store.arenas["tokens"].shape[0] <= 20_000 * 4 // 3 + 1
    assert buffer._store.rows.shape[0] <= 2 * 500
