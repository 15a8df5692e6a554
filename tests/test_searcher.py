"""Exploration, and the log-probs a searcher ships: a transformers engine or a recording one."""

from __future__ import annotations

import doctest
from dataclasses import dataclass, field
from typing import Any

import digits
import numpy as np
import pytest
import tiny
import torch

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
from searcher import ExploreConfig, SearcherConfig, SearcherParts, explored, score, search
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

    def send(self, trainer: int, kind: Kind, payload: Any) -> None:
        self.sent.append((trainer, kind, payload))

    def close(self) -> None:
        pass


@dataclass
class RecordingEngine:
    """Every prompt gets the same responses; version i is followed by i + 1, up to the last."""

    last: int = 0
    version: int = -1
    calls: list[Any] = field(default_factory=list)

    def generate(self, prompts: list[np.ndarray], sampling: Sampling) -> list[list[Completion]]:
        self.calls.append(sampling)
        return [
            [
                Completion(
                    tokens=np.array([3 + i % 2, tiny.EOS], dtype=np.int32),
                    logprobs=np.array([-1.0 - i % 2, -0.5], dtype=np.float32),
                    truncated=False,
                )
                for i in range(sampling.n)
            ]
            for _ in prompts
        ]

    def score_responses(
        self, prompts: list[np.ndarray], responses: list[np.ndarray], *, temperature: float
    ) -> list[np.ndarray]:
        self.calls.append((len(prompts), temperature, self.version))
        return [np.full(len(r), -float(r[0]), dtype=np.float32) for r in responses]

    def update(self, *, wait_for: int | None, timeout_s: float) -> WeightUpdate:
        self.version += 1
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
        **changes,
    }
    return SearcherParts(**options)


# --------------------------------------------------------------------------- the loop


def run_search(path: str, *, rank: int = 1, seed: int = 3) -> RecordingEngine:
    ranks = Ranks(rank=rank, world_size=3, local_rank=rank, local_world_size=3, num_trainers=1)
    engine = RecordingEngine(last=40)
    parts = make_parts(path, engine, ranks=ranks, seed=seed, reference=None)
    cfg = SearcherConfig(responses_per_prompt=4, temperature=0.7, explore=PAPER)
    search(cfg, parts, prompts_in_flight=2, lockstep=False)
    return engine


def test_the_loop_explores_by_seed_and_searcher(tiny_llama: str) -> None:
    calls = run_search(tiny_llama).calls
    samplings = [call for call in calls if isinstance(call, Sampling)]
    assert len(samplings) == 40 and all(s.n == 4 and s.max_tokens == 8 for s in samplings)
    assert 10 < len(set(samplings)) < 40, "explored and plain generations must both be seen"
    assert run_search(tiny_llama).calls == calls
    assert run_search(tiny_llama, rank=2).calls != calls
    assert run_search(tiny_llama, seed=4).calls != calls


def test_explored_responses_are_scored_before_the_weights_change(tiny_llama: str) -> None:
    """And plain ones are not scored at all."""
    calls = run_search(tiny_llama).calls
    version = -1
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        if isinstance(call, Sampling):
            version += 1
            plain = call.temperature == 0.7 and call.top_p == 1.0
            assert isinstance(following, tuple) != plain
        else:
            # two prompts of two different responses each: repeated ones are scored once
            assert call == (4, 0.7, version)


def test_shipped_trajectories_carry_the_scores(tiny_llama: str) -> None:
    engine = RecordingEngine(last=1)
    parts = make_parts(tiny_llama, engine, reference=None)
    cfg = SearcherConfig(
        responses_per_prompt=4, temperature=0.7, explore=ExploreConfig(temperature_prob=1.0)
    )
    search(cfg, parts, prompts_in_flight=2, lockstep=False)
    (message,) = [m for _, kind, m in parts.channel.sent if kind is Kind.TRAJECTORIES]
    trajectories = unpack(message)
    assert len(trajectories) == 8
    for t in trajectories:
        assert t.old_logprobs.tolist() == [-float(t.response_tokens[0])] * 2
        assert t.behavior_logprobs[1] == -0.5
        assert t.reference_version == -1 and np.isnan(t.reference_logprobs).all()


# --------------------------------------------------------------------------- rewards


def test_a_reward_that_fails_costs_its_response_and_is_counted(tiny_llama: str) -> None:
    """Real workers: responses of token 3 leave their process, those of token 4 are right."""
    engine = RecordingEngine(last=2)
    node = {"_target_": "reward_tasks.LeavesAtZero"}
    scorer = RewardWorkers(node, RewardConfig(num_workers=1, penalty=-2.0))
    parts = make_parts(tiny_llama, engine, reference=None, scorer=scorer)
    search(SearcherConfig(responses_per_prompt=4), parts, prompts_in_flight=2, lockstep=False)
    scorer.close()
    messages = [unpack(m) for _, kind, m in parts.channel.sent if kind is Kind.TRAJECTORIES]
    assert len(messages) == 2
    for trajectories in messages:
        for t in trajectories:
            fails = t.response_tokens[0] == 3
            assert t.reward_parts == ({"penalty": -2.0} if fails else {"value": 1.0})
            assert t.reward == (-2.0 if fails else 1.0)
    reports = [m for _, kind, m in parts.channel.sent if kind is Kind.REPORT]
    assert [r["outcomes"] for r in reports if "outcomes" in r] == [{"ok": 4, "crash": 4}] * 2


class Recorder:
    """A scorer that keeps what it is given."""

    def __init__(self, engine: RecordingEngine, *facts: str) -> None:
        self.facts, self.engine = facts, engine
        self.given: list[Any] = []

    def submit(self, problems: Any, responses: list[str], **facts: Any) -> Any:
        self.given.append((list(responses), facts, len(self.engine.calls)))
        return [Scored(parts={"value": 1.0}) for _ in responses]

    def collect(self, scores: Any, *, on_progress: Any) -> Any:
        return scores


def test_workers_score_while_logprobs_are_computed_unless_they_need_them(tiny_llama: str) -> None:
    sampling = Sampling(n=2, temperature=0.9, max_tokens=8)  # the engine computes log-probs too
    for facts in ((), ("reference_logprob",)):
        engine = RecordingEngine()
        scorer = Recorder(engine, *facts)
        parts = make_parts(tiny_llama, engine, scorer=scorer)
        groups = engine.generate([parts.prompt_tokens[0]], sampling)
        (first, second), _ = score(SearcherConfig(), parts, [0], groups, sampling, version=0)
        ((texts, given, calls),) = scorer.given
        assert texts == ["0", "1"] and given["num_tokens"] == [2, 2]
        assert given["truncated"] == [False, False]
        assert calls == (2 if facts else 1)  # after the engine's log-probs, or before
        want = [float(t.reference_logprobs.sum()) for t in (first, second)]
        assert given.get("reference_logprob") == (want if facts else None)


# --------------------------------------------------------------------------- log-probs


def make_engine(path: str) -> HFEngine:
    options = EngineOptions(
        path=path,
        stop_token_ids=[tiny.EOS],
        pad_token_id=tiny.PAD,
        max_model_len=tiny.MAX_LENGTH,
        dtype=torch.float32,
        device=CPU,
        seed=1,
    )
    return HFEngine(EngineConfig(name="hf", max_num_seqs=16), options)


def generated(
    path: str, cfg: SearcherConfig, sampling: Sampling, **changes: Any
) -> tuple[SearcherParts, list[Trajectory]]:
    parts = make_parts(path, make_engine(path), **changes)
    ids = [2, 5, 7]
    groups = parts.engine.generate([parts.prompt_tokens[i] for i in ids], sampling)
    trajectories, outcomes = score(cfg, parts, ids, groups, sampling, version=4)
    assert outcomes == {"ok": len(ids) * sampling.n}
    assert [t.prompt_id for t in trajectories] == [i for i in ids for _ in range(sampling.n)]
    for t in trajectories:
        check(t)
        assert (t.version_start, t.version_end) == (4, 4)
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
