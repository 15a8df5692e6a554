"""Exploration, and the log-probs a searcher ships: a transformers engine or a recording one."""

from __future__ import annotations

import dataclasses
import doctest
import time
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from types import SimpleNamespace
from typing import Any

import digits
import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import searcher
from comm import Kind, Ranks
from engine import Completion, EngineConfig, EngineOptions, HFEngine, Sampling
from model import (
    Layout,
    load_policy,
    load_tokenizer,
    prepare_for_packing,
    response_logprobs,
)
from rewards import LocalScorer, RewardConfig, RewardWorkers, Scored
from searcher import (
    ExploreConfig,
    Group,
    Groups,
    SearcherConfig,
    SearcherParts,
    explored,
    generate,
    own_prompts,
    prompt_stream,
    score,
    search,
    ship,
)
from trajectory import Trajectory, check, unpack
from weights import WeightUpdate

CPU = torch.device("cpu")
PAPER = ExploreConfig(temperature_prob=0.3, top_p_prob=0.3)
CALLS = 5000


def draws(cfg: SearcherConfig, *, seed: Any = 0, count: int = CALLS) -> list[Sampling]:
    rng = np.random.default_rng(seed)
    return [explored(cfg, rng, max_tokens=9) for _ in range(count)]


# --------------------------------------------------------------------------- exploration


def test_examples() -> None:
    results = doctest.testmod(searcher)
    assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize("top_p", [1.0, 0.95])
def test_without_exploration_every_generation_samples_as_configured(top_p: float) -> None:
    cfg = SearcherConfig(responses_per_prompt=3, temperature=0.7, top_p=top_p)
    want = Sampling(n=3, temperature=0.7, top_p=top_p, max_tokens=9)
    assert draws(cfg, count=500) == [want] * 500


def within_binomial(count: int, prob: float) -> bool:
    """Four standard deviations of CALLS draws."""
    return abs(count - CALLS * prob) < 4 * np.sqrt(CALLS * prob * (1 - prob))


def test_as_often_as_the_paper_and_independently() -> None:
    samplings = draws(SearcherConfig(temperature=0.7, explore=PAPER))
    hot = np.array([s.temperature != 0.7 for s in samplings])
    cut = np.array([s.top_p != 1.0 for s in samplings])
    assert within_binomial(hot.sum(), 0.3) and within_binomial(cut.sum(), 0.3)
    assert within_binomial((hot & cut).sum(), 0.09)
    # one call after another tells nothing
    assert within_binomial((hot[1:] & hot[:-1]).sum(), 0.09)


@pytest.mark.parametrize(
    ("explore", "temperatures", "top_ps"),
    [
        (ExploreConfig(), (0.7, 1.1), (0.7, 1.0)),
        (
            ExploreConfig(temperature_low=0.5, temperature_high=2.0, top_p_low=0.3, top_p_high=0.4),
            (0.5, 2.0),
            (0.3, 0.4),
        ),
    ],
)
def test_values_are_uniform_over_their_range(
    explore: ExploreConfig, temperatures: tuple[float, float], top_ps: tuple[float, float]
) -> None:
    explore.temperature_prob = explore.top_p_prob = 1.0
    samplings = draws(SearcherConfig(temperature=0.7, explore=explore))
    for values, (low, high) in (
        ([s.temperature for s in samplings], temperatures),
        ([s.top_p for s in samplings], top_ps),
    ):
        assert low - 1e-12 <= min(values) and max(values) <= high + 1e-12
        counts, _ = np.histogram(values, bins=20, range=(low, high))
        chi_square = ((counts - CALLS / 20) ** 2 / (CALLS / 20)).sum()
        assert chi_square < 19 + 5 * np.sqrt(2 * 19)  # five standard deviations
    places = np.corrcoef([s.temperature for s in samplings], [s.top_p for s in samplings])
    assert abs(places[0, 1]) < 4 / np.sqrt(CALLS)


def test_a_seed_decides_the_draws_and_settings_do_not_move_each_other() -> None:
    cfg = SearcherConfig(temperature=0.7, explore=PAPER)
    first = draws(cfg, seed=[5, 2, 0], count=100)
    assert draws(cfg, seed=[5, 2, 0], count=100) == first
    assert draws(cfg, seed=[5, 2, 1], count=100) != first
    only_top_p = SearcherConfig(temperature=0.7, explore=ExploreConfig(top_p_prob=0.3))
    cut = draws(only_top_p, seed=[5, 2, 0], count=100)
    assert [s.top_p for s in cut] == [s.top_p for s in first]
    assert {s.temperature for s in cut} == {0.7}


# --------------------------------------------------------------------------- parts


class Control:
    timeout_s = startup_timeout_s = 5.0

    def progress(self, what: str, limit_s: float | None = None) -> None:
        pass

    def alive(self) -> None:
        pass


@dataclass
class Channel:
    sent: list[tuple[int, Kind, Any]] = field(default_factory=list)
    waited_s: float = 0.0

    def send(self, trainer: int, kind: Kind, payload: Any) -> None:
        self.sent.append((trainer, kind, payload))

    def close(self) -> None:
        pass


@dataclass
class RecordingEngine:
    """Every prompt gets the same responses; version i is followed by i + 1, up to the last.

    A group takes as many steps as `steps_of` says; `calls` tells in which order things were asked.
    """

    last: int = 0
    version: int = -1
    steps_of: Any = lambda key: 1
    policy_temperature: float = 0.7
    between_updates: int = 1  # steps after which the next version has come
    calls: list[Any] = field(default_factory=list)
    left: dict[int, int] = field(default_factory=dict)  # key -> steps until it is complete
    begun: dict[int, tuple[Sampling, int]] = field(default_factory=dict)
    since_update: int = 0

    def add(
        self, key: int, prompt: np.ndarray, sampling: Sampling, *, seed: int | None = None
    ) -> None:
        self.calls.append(sampling)
        self.left[key] = self.steps_of(key)
        self.begun[key] = (sampling, self.version)

    def step(self) -> list[tuple[int, list[Completion]]]:
        self.since_update += 1
        self.calls.append(("step", len(self.left)))
        for key in self.left:
            self.left[key] -= 1
        done = [key for key, left in self.left.items() if left == 0]
        for key in done:
            del self.left[key]
        return [(key, self.completions(key)) for key in done]

    def completions(self, key: int) -> list[Completion]:
        sampling, version = self.begun[key]
        explored = sampling.temperature != self.policy_temperature or sampling.top_p != 1.0
        spans = [(version, 0)] + ([(self.version, 1)] if self.version != version else [])
        return [
            Completion(
                tokens=np.array([3 + i % 2, tiny.EOS], dtype=np.int32),
                logprobs=np.array([-1.0 - i % 2, -0.5], dtype=np.float32),
                old_logprobs=np.full(2, -3.0, np.float32) if explored else None,
                versions=spans,
                truncated=False,
            )
            for i in range(sampling.n)
        ]

    def has_update(self) -> bool:
        return self.since_update >= self.between_updates

    def drop(self) -> None:
        self.calls.append(("drop", len(self.left)))
        self.left.clear()

    def update(self, *, wait_for: int | None, timeout_s: float) -> WeightUpdate | None:
        if wait_for is None and not self.has_update():
            return None
        self.since_update = 0
        self.version += 1
        self.calls.append(("update", self.version, len(self.left)))
        final = self.version == self.last
        return WeightUpdate(version=self.version, evaluate=False, final=final, meta={}, load_s=0.0)


def make_parts(path: str, engine: Any, **changes: Any) -> SearcherParts:
    task, tokenizer = digits.Digits(), load_tokenizer(path)
    problems = task.problems("train")[:12]
    ranks = Ranks(rank=1, world_size=2, local_rank=1, local_world_size=2, num_trainers=1)
    options: dict[str, Any] = {
        "ranks": ranks,
        "control": Control(),
        "channel": Channel(),
        "engine": engine,
        "reference": load_policy(path, device=CPU, dtype=torch.float32),
        "autocast": None,
        "tokenizer": tokenizer,
        "task": task,
        "scorer": LocalScorer(task, penalty=0.0),
        "problems": problems,
        "prompt_tokens": [
            np.array(tokenizer(p.prompt)["input_ids"], dtype=np.int32) for p in problems
        ],
        "held_out": [],
        "held_out_tokens": [],
        "probe_tokens": [],
        "max_logprob_gap": 1.0,
        "eval_measures": True,
        "max_response_tokens": 8,
        "seed": 3,
        "completed": np.zeros(len(problems), dtype=np.int64),
        **changes,
    }
    return SearcherParts(**options)


# --------------------------------------------------------------------------- the prompts


def prompts_of(index: int, num_searchers: int, completed: np.ndarray, seed: int = 3) -> Any:
    """What the stream of prompts reads of a searcher's parts."""
    ranks = Ranks(
        rank=1 + index,
        world_size=1 + num_searchers,
        local_rank=0,
        local_world_size=1,
        num_trainers=1,
    )
    return SimpleNamespace(
        ranks=ranks, problems=[None] * len(completed), completed=completed, seed=seed
    )


def test_every_prompt_comes_once_an_epoch_in_new_orders() -> None:
    parts = prompts_of(1, 2, np.zeros(9, np.int64))
    assert own_prompts(parts).tolist() == [1, 3, 5, 7]
    epochs = list(islice(prompt_stream(parts), 40))
    orders = [epochs[start : start + 4] for start in range(0, 40, 4)]
    assert all(sorted(order) == [1, 3, 5, 7] for order in orders)
    assert len(set(map(tuple, orders))) > 3
    other_seed = prompts_of(1, 2, np.zeros(9, np.int64), seed=4)
    assert list(islice(prompt_stream(other_seed), 40)) != epochs


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_a_stream_that_was_cut_gives_every_prompt_as_often_as_a_whole_one(data: Any) -> None:
    """Cut anywhere, with prompts under way, several times, on other numbers of searchers."""
    num_prompts = data.draw(st.integers(1, 12))
    shipped = np.zeros(num_prompts, np.int64)
    for _ in range(data.draw(st.integers(1, 3))):
        num_searchers = data.draw(st.integers(1, min(num_prompts, 3)))
        began = shipped.copy()
        for index in range(num_searchers):
            stream = prompt_stream(prompts_of(index, num_searchers, began))
            for prompt_id in islice(stream, data.draw(st.integers(0, 30))):
                under_way = data.draw(st.booleans()) and data.draw(st.booleans())
                shipped[prompt_id] += not under_way
    num_searchers = data.draw(st.integers(1, min(num_prompts, 3)))
    epochs = int(shipped.max()) + 1
    given_out: Counter[int] = Counter()
    for index in range(num_searchers):
        parts = prompts_of(index, num_searchers, shipped)
        ids = own_prompts(parts)
        missing = ids[shipped[ids] == shipped[ids].min()].tolist()
        stream = prompt_stream(parts)
        first = list(islice(stream, len(missing)))
        assert sorted(first) == missing, "what the oldest epoch lacks comes first"
        left = int((epochs - shipped[ids]).sum()) - len(first)
        given_out.update([*first, *islice(stream, left)])
        # and the next epoch is whole again
        assert sorted(islice(stream, len(ids))) == ids.tolist()
    assert [shipped[p] + given_out[p] for p in range(num_prompts)] == [epochs] * num_prompts


@pytest.mark.parametrize("count", [0, 1, 4, 6, 17])
def test_a_stream_of_shipped_prompts_goes_on_in_its_order(count: int) -> None:
    whole = list(islice(prompt_stream(prompts_of(0, 2, np.zeros(9, np.int64))), 60))
    completed = np.bincount(whole[:count], minlength=9)
    resumed = islice(prompt_stream(prompts_of(0, 2, completed)), 60 - count)
    assert list(resumed) == whole[count:]


# --------------------------------------------------------------------------- the loop


def run_search(path: str, *, rank: int = 1, seed: int = 3) -> RecordingEngine:
    ranks = Ranks(rank=rank, world_size=3, local_rank=rank, local_world_size=3, num_trainers=1)
    engine = RecordingEngine(last=40)
    parts = make_parts(path, engine, ranks=ranks, seed=seed, reference=None)
    cfg = SearcherConfig(responses_per_prompt=4, temperature=0.7, explore=PAPER)
    search(cfg, parts, prompts_in_flight=2)
    return engine


def test_the_loop_explores_by_seed_and_searcher(tiny_llama: str) -> None:
    calls = run_search(tiny_llama).calls
    samplings = [call for call in calls if isinstance(call, Sampling)]
    assert len(samplings) == 80 and all(s.n == 4 and s.max_tokens == 8 for s in samplings)
    assert 20 < len(set(samplings)) < 80, "explored and plain prompts must both be seen"
    assert run_search(tiny_llama).calls == calls
    assert run_search(tiny_llama, rank=2).calls != calls
    assert run_search(tiny_llama, seed=4).calls != calls


def shipped(parts: SearcherParts) -> list[Trajectory]:
    messages = [m for _, kind, m in parts.channel.sent if kind is Kind.TRAJECTORIES]
    return [t for message in messages for t in unpack(message)]


def reports(parts: SearcherParts, name: str) -> list[Any]:
    values = [m for _, kind, m in parts.channel.sent if kind is Kind.REPORT]
    return [v[name] for v in values if name in v]


def test_shipped_trajectories_carry_both_logprobs(tiny_llama: str) -> None:
    engine = RecordingEngine(last=1)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(
        responses_per_prompt=4, temperature=0.7, explore=ExploreConfig(temperature_prob=1.0)
    )
    search(cfg, parts, prompts_in_flight=2)
    trajectories = shipped(parts)
    assert len(trajectories) == 8
    for t in trajectories:
        assert t.old_logprobs.tolist() == [-3.0] * 2
        assert t.behavior_logprobs[1] == -0.5
        assert t.reference_version == -1 and np.isnan(t.reference_logprobs).all()


# --------------------------------------------------------------------------- never waiting


def test_a_long_group_holds_back_no_other(tiny_llama: str) -> None:
    """The first prompt takes 30 steps, others one: the engine stays full, others are shipped."""
    engine = RecordingEngine(last=2, steps_of=lambda key: 1 if key else 30, between_updates=20)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, score_every_s=0.0)
    search(cfg, parts, prompts_in_flight=3)
    full = [under_way for _, under_way in events(engine, "step")]
    assert full == [3] * 40
    long = [t for t in shipped(parts) if t.version_start != t.version_end]
    assert len(shipped(parts)) == 2 * (30 * 2 + 1 + 10 * 3)  # the finished ones, all of them
    # the long one saw the update at step 20 and says which token is whose
    assert [t.versions.tolist() for t in long] == [[0, 1]] * 2
    assert ("update", 1, 1) in engine.calls  # with a group in flight


def events(engine: RecordingEngine, name: str) -> list[tuple]:
    return [call for call in engine.calls if isinstance(call, tuple) and call[0] == name]


def test_between_lets_what_is_under_way_end_first(tiny_llama: str) -> None:
    engine = RecordingEngine(last=2, steps_of=lambda key: 1 + key % 5, between_updates=7)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, score_every_s=0.0)
    search(cfg, parts, prompts_in_flight=3, between=True)
    assert events(engine, "update") == [("update", version, 0) for version in range(3)]
    assert all(t.version_start == t.version_end for t in shipped(parts))
    assert min(under_way for _, under_way in events(engine, "step")) < 3  # the price: it drains


def test_lockstep_ships_one_round_a_version_and_says_so_at_its_end(tiny_llama: str) -> None:
    engine = RecordingEngine(last=3, steps_of=lambda key: 1 + key % 3)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, score_every_s=0.0)
    search(cfg, parts, prompts_in_flight=4, lockstep=True)
    assert reports(parts, "round") == [0, 1, 2]
    assert reports(parts, "generated") == [8, 8, 8]
    assert [t.version_start for t in shipped(parts)] == [0] * 8 + [1] * 8 + [2] * 8


def test_the_end_drops_what_is_in_flight_and_ships_what_is_finished(tiny_llama: str) -> None:
    engine = RecordingEngine(last=1, steps_of=lambda key: 1 if key < 2 else 100, between_updates=5)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, score_every_s=3600.0)
    search(cfg, parts, prompts_in_flight=3)
    assert engine.calls[-1] == ("drop", 3)
    assert len(shipped(parts)) == 4  # though no more came to be scored with them


class Reluctant:
    """A scorer whose first job gets its rewards when the last is handed over."""

    facts = ()

    def __init__(self, jobs: int) -> None:
        self.jobs, self.submitted = jobs, []

    def submit(self, problems: Any, responses: list[str], **facts: Any) -> Future:
        future: Future = Future()
        self.submitted.append((future, len(responses)))
        ready = self.submitted[1:] if len(self.submitted) < self.jobs else self.submitted
        for waiting, count in ready:
            if not waiting.done():
                waiting.set_result([Scored(parts={"value": float(id(waiting))})] * count)
        return future

    def collect(self, scores: Future, *, on_progress: Any) -> list[Scored]:
        return scores.result(timeout=5)


def test_a_slow_reward_delays_neither_generation_nor_other_rewards(tiny_llama: str) -> None:
    engine = RecordingEngine(last=1, between_updates=6)
    scorer = Reluctant(jobs=6)
    parts = make_parts(tiny_llama, engine, reference=None, scorer=scorer)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, score_every_s=0.0)
    search(cfg, parts, prompts_in_flight=1)
    rewards = [t.reward for t in shipped(parts)]
    order = [float(id(future)) for future, _ in scorer.submitted]
    assert rewards == [r for r in [*order[1:5], order[0], order[5]] for _ in range(2)]
    assert parts.clock.seconds().get("rewards", 0.0) < 1.0


def test_groups_are_scored_together_when_they_fill_a_micro_batch(tiny_llama: str) -> None:
    engine = RecordingEngine(last=1, between_updates=8)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(
        responses_per_prompt=2,
        temperature=0.7,
        score_every_s=3600.0,
        reference_tokens_per_micro_batch=16,  # four groups of two responses of two tokens
    )
    search(cfg, parts, prompts_in_flight=1)
    assert reports(parts, "generated") == [8, 8]


def test_responses_that_the_time_limit_ended_are_counted(tiny_llama: str) -> None:
    class Late(RecordingEngine):
        def completions(self, key: int) -> list[Completion]:
            assert self.begun[key][0].max_seconds == 3.0
            first, *others = super().completions(key)
            return [dataclasses.replace(first, truncated=True, timed_out=True), *others]

    parts = make_parts(tiny_llama, Late(last=1), reference=None)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, max_response_seconds=3.0)
    search(cfg, parts, prompts_in_flight=4)
    assert reports(parts, "cut") == [4]
    assert sum(t.truncated for t in shipped(parts)) == 4


def test_seconds_from_step_to_first_token_are_reported_once(tiny_llama: str) -> None:
    class Dated(RecordingEngine):
        def update(self, **options: Any) -> WeightUpdate | None:
            update = super().update(**options)
            if update is not None:
                update.meta["published_at"] = time.time() - 100.0
            return update

    parts = make_parts(tiny_llama, Dated(last=2, between_updates=3), reference=None)
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7)
    search(cfg, parts, prompts_in_flight=1)
    seconds = reports(parts, "step_to_token_s")
    assert len(seconds) == 2 and all(100 < s < 110 for s in seconds)


# --------------------------------------------------------------------------- rewards


def test_a_reward_that_fails_costs_its_response_and_is_counted(tiny_llama: str) -> None:
    """Real workers: responses of token 3 leave their process, those of token 4 are right."""
    engine = RecordingEngine(last=2)
    node = {"_target_": "reward_tasks.LeavesAtZero"}
    scorer = RewardWorkers(node, RewardConfig(num_workers=1, penalty=-2.0))
    parts = make_parts(tiny_llama, engine, reference=None, scorer=scorer)
    search(SearcherConfig(responses_per_prompt=4), parts, prompts_in_flight=2, lockstep=True)
    scorer.close()
    messages = [unpack(m) for _, kind, m in parts.channel.sent if kind is Kind.TRAJECTORIES]
    assert len(messages) == 2
    for trajectories in messages:
        for t in trajectories:
            fails = t.response_tokens[0] == 3
            assert t.reward_parts == ({"penalty": -2.0} if fails else {"value": 1.0})
            assert t.reward == (-2.0 if fails else 1.0)
    assert reports(parts, "outcomes") == [{"ok": 4, "crash": 4}] * 2


class Recorder:
    """A scorer that keeps what it is given, and when: before or after the reference's log-probs."""

    def __init__(self, *facts: str) -> None:
        self.facts = facts
        self.given: list[Any] = []
        self.passes = 0  # forward passes of the reference so far

    def submit(self, problems: Any, responses: list[str], **facts: Any) -> Future:
        self.given.append((list(responses), facts, self.passes))
        future: Future = Future()
        future.set_result([Scored(parts={"value": 1.0}) for _ in responses])
        return future

    def collect(self, scores: Future, *, on_progress: Any) -> list[Scored]:
        return scores.result()


def test_workers_score_while_logprobs_are_computed_unless_they_need_them(tiny_llama: str) -> None:
    sampling = Sampling(n=2, temperature=0.7, max_tokens=8)
    for facts in ((), ("reference_logprob",)):
        engine, scorer = RecordingEngine(), Recorder(*facts)
        parts = make_parts(tiny_llama, engine, scorer=scorer)

        def count(*_: Any, scorer: Recorder = scorer) -> None:
            scorer.passes += 1

        parts.reference.base_model.register_forward_pre_hook(count)
        first, second = score_and_ship(SearcherConfig(), parts, engine, [0], sampling)
        ((texts, given, passes),) = scorer.given
        assert texts == ["0", "1"] and given["num_tokens"] == [2, 2]
        assert given["truncated"] == [False, False]
        assert passes == (1 if facts else 0)
        want = [float(t.reference_logprobs.sum()) for t in (first, second)]
        assert given.get("reference_logprob") == (want if facts else None)


def score_and_ship(
    cfg: SearcherConfig, parts: SearcherParts, engine: Any, ids: list[int], sampling: Sampling
) -> list[Trajectory]:
    """What comes of the prompts' responses when all is shipped."""
    groups = Groups()
    for key, prompt_id in enumerate(ids):
        groups.open[key] = Group(key=key, prompt_id=prompt_id, sampling=sampling)
        engine.add(key, parts.prompt_tokens[prompt_id], sampling)
    while groups.open:
        generate(parts, groups)
    score(cfg, parts, groups, everything=True)
    ship(parts, groups, 4, everything=True)
    return shipped(parts)


# --------------------------------------------------------------------------- log-probs


def make_engine(path: str, policy_temperature: float | None = None) -> HFEngine:
    options = EngineOptions(
        path=path,
        stop_token_ids=[tiny.EOS],
        pad_token_id=tiny.PAD,
        max_model_len=tiny.MAX_LENGTH,
        dtype=torch.float32,
        device=CPU,
        seed=1,
        policy_temperature=policy_temperature,
    )
    return HFEngine(EngineConfig(name="hf", max_num_seqs=16), options)


def generated(
    path: str, cfg: SearcherConfig, sampling: Sampling, **changes: Any
) -> tuple[SearcherParts, list[Trajectory]]:
    engine = make_engine(path, cfg.temperature)
    parts = make_parts(path, engine, **changes)
    ids = [2, 5, 7]
    trajectories = score_and_ship(cfg, parts, engine, ids, sampling)
    assert reports(parts, "outcomes") == [{"ok": len(ids) * sampling.n}]
    assert [t.prompt_id for t in trajectories] == [i for i in ids for _ in range(sampling.n)]
    for t in trajectories:
        check(t)
        assert (t.version_start, t.version_end) == (-1, -1)  # it has taken no weights
    return parts, trajectories


def logprobs(model: torch.nn.Module, t: Trajectory, temperature: float) -> np.ndarray:
    with torch.no_grad():
        return response_logprobs(
            model, [t.prompt_tokens], [t.response_tokens], temperature=temperature
        ).numpy()


def nucleus_logprobs(
    model: torch.nn.Module, t: Trajectory, temperature: float, top_p: float
) -> np.ndarray:
    """After temperature and top-p, in plain numpy, float64 [T]; -inf: cut by top-p."""
    tokens = torch.tensor([*t.prompt_tokens.tolist(), *t.response_tokens.tolist()])
    with torch.no_grad():
        logits = model(input_ids=tokens[None]).logits[0, len(t.prompt_tokens) - 1 : -1]  # [T, V]
    values = []
    for scaled, token in zip(logits.double().numpy() / temperature, t.response_tokens, strict=True):
        probs = np.exp(scaled - scaled.max())
        probs /= probs.sum()
        order = np.argsort(-probs)
        kept = order[: int((probs[order].cumsum() < top_p).sum()) + 1]  # the least to reach top_p
        values.append(np.log(probs[token] / probs[kept].sum()) if token in kept else -np.inf)
    return np.array(values)


@pytest.mark.parametrize("training_temperature", [0.7, 1.0])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.8, 0.9), (0.8, 1.0), (None, 0.9)])
def test_both_distributions_are_recorded(
    tiny_llama: str, training_temperature: float, temperature: float | None, top_p: float
) -> None:
    cfg = SearcherConfig(temperature=training_temperature)
    temperature = temperature or training_temperature
    sampling = Sampling(n=4, temperature=temperature, top_p=top_p, max_tokens=8)
    parts, trajectories = generated(tiny_llama, cfg, sampling)
    assert parts.reference is not None
    apart = 0.0
    for t in trajectories:
        want = logprobs(parts.reference, t, training_temperature)
        np.testing.assert_allclose(t.old_logprobs, want, rtol=0, atol=2e-5)
        sampled = nucleus_logprobs(parts.reference, t, temperature, top_p)
        np.testing.assert_allclose(t.behavior_logprobs, sampled, rtol=0, atol=1e-4)
        apart = max(apart, float(np.abs(t.old_logprobs - t.behavior_logprobs).max()))
        # the reference is the policy that sampled here, at the training temperature
        np.testing.assert_allclose(t.reference_logprobs, want, rtol=0, atol=2e-5)
        assert t.reference_version == 0 and t.old_logprobs.dtype == np.float32
    assert apart > 0.05, "the two distributions are too near to tell"


def test_one_distribution_is_one_array(tiny_llama: str) -> None:
    cfg = SearcherConfig(temperature=0.7)
    _, trajectories = generated(tiny_llama, cfg, Sampling(n=4, temperature=0.7, max_tokens=8))
    assert all(t.old_logprobs is t.behavior_logprobs for t in trajectories)


def test_top_p_of_every_generation_makes_two_distributions(tiny_llama: str) -> None:
    cfg = SearcherConfig(responses_per_prompt=2, temperature=0.7, top_p=0.8)
    sampling = explored(cfg, np.random.default_rng(0), max_tokens=8)
    parts, trajectories = generated(tiny_llama, cfg, sampling)
    assert parts.reference is not None
    for t in trajectories:
        assert t.old_logprobs is not t.behavior_logprobs
        want = logprobs(parts.reference, t, 0.7)
        np.testing.assert_allclose(t.old_logprobs, want, rtol=0, atol=2e-5)


def test_the_reference_reads_packed_rows(tiny_llama: str) -> None:
    cfg = SearcherConfig(temperature=0.7)
    sampling = Sampling(n=4, temperature=0.7, max_tokens=8)
    reference = load_policy(tiny_llama, device=CPU, dtype=torch.float32)
    prepare_for_packing(reference, "auto")
    rows: list[int] = []
    hook = reference.base_model.register_forward_pre_hook(
        lambda module, args, options: rows.append(len(options["input_ids"])), with_kwargs=True
    )
    _, trajectories = generated(
        tiny_llama, cfg, sampling, reference=reference, layout=Layout(packed=True)
    )
    hook.remove()
    assert rows == [1]
    for t in trajectories:
        want = logprobs(reference, t, 0.7)
        np.testing.assert_allclose(t.reference_logprobs, want, rtol=0, atol=2e-5)


def test_without_a_reference_its_logprobs_are_nan(tiny_llama: str) -> None:
    cfg = SearcherConfig(temperature=0.7)
    sampling = Sampling(n=2, temperature=0.7, max_tokens=8)
    _, trajectories = generated(tiny_llama, cfg, sampling, reference=None)
    for t in trajectories:
        assert t.reference_version == -1
        assert t.reference_logprobs.dtype == np.float32
        assert t.reference_logprobs.shape == t.response_tokens.shape
        assert np.isnan(t.reference_logprobs).all()
