"""The stand-in engine keeps its promises, and the bench divides the right seconds."""

import doctest
import inspect
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from bench import overlap
from bench.overlap import (
    REGIMES,
    Size,
    Stub,
    StubEngine,
    Window,
    bound_s,
    compare,
    load_responses,
    make_responses,
    overrides,
    read_window,
    save_responses,
)
from engine import EngineConfig, EngineOptions, HFEngine, Sampling, VLLMEngine
from weights import WeightUpdate

SAMPLING = Sampling(n=2, temperature=1.0, max_tokens=100)


class Clock:
    """Time that passes while somebody sleeps."""

    def __init__(self) -> None:
        self.s = 0.0

    def now(self) -> float:
        return self.s

    def sleep(self, seconds: float) -> None:
        self.s += seconds


def make_engine(
    folder: str, tmp_path: Path, lengths: list[int], *, slots: int, load_s: float = 0.0
) -> tuple[StubEngine, Clock]:
    """A second a token; responses come in the order given."""
    save_responses(tmp_path / "r.npz", [np.full(n, n, dtype=np.int32) for n in lengths])
    options = EngineOptions(
        path=folder,
        stop_token_ids=[1],
        pad_token_id=0,
        max_model_len=64,
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=0,
    )
    clock = Clock()
    stub = Stub(responses=str(tmp_path / "r.npz"), seconds_per_token=1.0, load_s=load_s)
    cfg = EngineConfig(name="hf", max_num_seqs=slots)
    engine = StubEngine(cfg, options, stub, now=clock.now, sleep=clock.sleep)
    engine._order = list(range(len(lengths)))[::-1]
    return engine, clock


def run_until(engine: StubEngine, clock: Clock, end_s: float) -> list[tuple[float, int, list]]:
    """(time, key, completions) of all that `step` gives until then."""
    seen = []
    while clock.s < end_s:
        seen += [(round(clock.s, 1), key, group) for key, group in engine.step()]
        clock.s += 1e-3  # the caller's own work
    return seen


class Staged:
    """A receiver to which weights have come."""

    def __init__(self, version: int, clock: Clock, take_s: float) -> None:
        self.staged_version, self._clock, self._take_s = version, clock, take_s

    def take(self, *, wait_for: int | None, timeout_s: float) -> WeightUpdate:
        self._clock.s += self._take_s
        version, self.staged_version = self.staged_version, -1
        return WeightUpdate(
            version=version, evaluate=False, final=False, meta={}, load_s=self._take_s
        )


def test_a_response_holds_a_slot_for_its_length(tiny_llama, tmp_path):
    engine, clock = make_engine(tiny_llama, tmp_path, [3, 9, 4, 2, 5, 5], slots=2)
    for key in range(3):
        engine.add(key, [5], SAMPLING)
    done = run_until(engine, clock, 30.0)
    # slot a: 3, 4, 2 (from 7 to 9); slot b: 9; then 5 and 5
    assert [(at, key) for at, key, _ in done] == [(9.0, 0), (9.0, 1), (14.0, 2)]
    assert [len(c.tokens) for _, _, group in done for c in group] == [3, 9, 4, 2, 5, 5]
    assert all(np.isnan(c.logprobs).all() for _, _, group in done for c in group)
    assert engine.step() == []


def test_slots_are_taken_at_the_moment_they_are_left(tiny_llama, tmp_path):
    """Also where the caller was away: the engine decodes on by itself."""
    engine, clock = make_engine(tiny_llama, tmp_path, [3, 3, 4, 4], slots=2)
    engine.add(0, [5], SAMPLING)
    engine.add(1, [5], SAMPLING)
    clock.s = 6.9
    assert [key for key, _ in engine.step()] == [0]
    clock.s = 7.0
    assert [key for key, _ in engine.step()] == [1]


def test_weights_take_over_in_the_middle_of_responses(tiny_llama, tmp_path):
    engine, clock = make_engine(tiny_llama, tmp_path, [4, 10, 5, 6], slots=2, load_s=2.0)
    engine._receiver = Staged(0, clock, 0.0)
    assert engine.update().version == 0
    clock.s = 0.0
    engine.add(0, [5], SAMPLING)
    engine.add(1, [5], SAMPLING)
    assert run_until(engine, clock, 5.5) == []  # the first has ended, the third has 1.5 tokens
    assert engine.update() is None
    engine._receiver = Staged(3, clock, 1.0)
    begun = clock.s
    update = engine.update()
    assert (update.version, update.load_s) == (3, 3.0)
    assert update.stall_s == pytest.approx(3.0) and clock.s == pytest.approx(begun + 3.0)
    done = {key: (at, group) for at, key, group in run_until(engine, clock, 40.0)}
    at, (first, second) = done[0]
    assert at == 13.0  # ten tokens, and three seconds in which the engine stood still
    assert list(first.versions) == [(0, 0)] and list(second.versions) == [(0, 0), (3, 5)]
    at, (third, fourth) = done[1]
    assert list(third.versions) == [(0, 0), (3, 1)]
    assert list(fourth.versions) == [(3, 0)] and at == 18.0


def test_weights_that_sample_no_token_leave_no_trace(tiny_llama, tmp_path):
    engine, clock = make_engine(tiny_llama, tmp_path, [4, 4], slots=2)
    engine.add(0, [5], SAMPLING)
    for version, at in ((0, 0.0), (1, 2.5), (2, 2.6)):
        clock.s = at
        engine._receiver = Staged(version, clock, 0.0)
        engine.update()
    [(_, _, group)] = run_until(engine, clock, 5.0)
    assert list(group[0].versions) == [(0, 0), (2, 2)]


def test_it_forgets_truncates_and_evaluates_at_once(tiny_llama, tmp_path):
    engine, clock = make_engine(tiny_llama, tmp_path, [9, 9, 9, 3, 9], slots=2)
    engine.add(0, [5], SAMPLING)
    engine.drop()
    assert run_until(engine, clock, 20.0) == []
    short = Sampling(n=1, temperature=0.0, max_tokens=5)
    groups = engine.generate([[5], [6], [7]], short)
    assert [(len(c.tokens), c.truncated) for [c] in groups] == [(5, True), (3, False), (5, True)]
    assert clock.s < 21.0


def test_it_is_called_as_the_real_engine_is():
    for name in ("add", "step", "drop", "generate", "score", "score_responses", "update"):
        parameters = [
            [(p.name, p.kind) for p in inspect.signature(getattr(c, name)).parameters.values()]
            for c in (StubEngine, VLLMEngine)
        ]
        assert parameters[0] == parameters[1], name
    public = {name for name in vars(VLLMEngine) if not name.startswith("_")}
    assert public <= {name for c in (StubEngine, HFEngine) for name in vars(c)}


def test_install_replaces_the_engine_of_train(monkeypatch):
    import train

    monkeypatch.setattr(train, "make_engine", None)
    monkeypatch.setattr(overlap, "StubEngine", lambda *given: given)
    stub = Stub(responses="", seconds_per_token=1.0)
    overlap.install(stub)
    assert train.make_engine("cfg", "options") == ("cfg", "options", stub)


# --------------------------------------------------------------------------- responses


def test_the_tail_is_heavy_and_the_others_are_the_answers(tmp_path):
    from sft import tiny_tokenizer

    tokenizer = tiny_tokenizer()
    for heavy_tail, want in ((True, 8.0), (False, 2.88)):
        made = make_responses(tokenizer, heavy_tail=heavy_tail)
        lengths = np.array([len(tokens) for tokens in made])
        p50, p99 = np.percentile(lengths, [50, 99])
        assert p99 / p50 == pytest.approx(want, rel=0.02)
        assert lengths.max() <= overlap.MAX_RESPONSE_TOKENS and lengths.min() >= 2
        assert {int(tokens[-1]) for tokens in made} == {tokenizer.eos_token_id}
        assert all(tokenizer.eos_token_id not in tokens[:-1] for tokens in made)
        save_responses(tmp_path / "r.npz", made)
        for before, after in zip(made, load_responses(str(tmp_path / "r.npz")), strict=True):
            np.testing.assert_array_equal(before, after)
    answer = json.loads((overlap.DATA / "train.jsonl").read_text().splitlines()[0])["answer"]
    assert tokenizer.decode(made[0][:-1]) == answer


# --------------------------------------------------------------------------- figures


def window(**values: float) -> Window:
    plain = dict(
        wall_s=10.0,
        tokens=1000.0,
        responses=100,
        generated_tokens=1000.0,
        waiting_s=0.0,
        publish_s=0.0,
        stock_fall=0,
        searcher_idle=0.0,
        staleness=0.0,
    )
    return Window(**{**plain, **values})


@pytest.mark.parametrize(
    ("gen", "train", "sync", "bound"), [(3, 2, 0.5, 3), (2, 2, 0.5, 2.5), (0, 2, 0.5, 2.5)]
)
def test_bound(gen, train, sync, bound):
    assert bound_s(gen, train, sync) == bound


def test_figures_of_a_round():
    """Lock-step: 4 s of generation as it takes, 5.5 s of training, 0.5 of publication."""
    sync = window(wall_s=12.0, waiting_s=6.0, publish_s=0.5, tokens=1000.0)
    ours = window(wall_s=8.8, waiting_s=0.8, tokens=1100.0, generated_tokens=1320.0, publish_s=1.0)
    stub = Stub(responses="", seconds_per_token=0.08)
    figures = compare(sync, ours, stub, slots=16)
    assert figures["gen_s"] == pytest.approx(1100 * 0.08 / 16)  # 5.5
    assert figures["train_s"] == pytest.approx(5.5 * 1.1)  # as many tokens as ours
    assert figures["sync_s"] == pytest.approx(0.5)
    assert figures["fraction_of_bound"] == pytest.approx(6.55 / 8.8)
    assert figures["sync_over_bound"] == pytest.approx(12.0 / 6.0)
    assert figures["sync_over_async"] == pytest.approx(12.0 * 1.1 / 8.8)
    assert figures["async_trainer_idle"] == pytest.approx(0.8 / 8.8)
    assert figures["async_slots_idle"] == pytest.approx(1 - 1320 * 0.08 / 16 / 8.8)
    # a lock-step run that something slowed down says nothing of what training takes
    held_up = compare(window(wall_s=30.0, publish_s=3.0), ours, stub, slots=16)
    assert (held_up["train_s"], held_up["sync_s"]) == (pytest.approx(7.0), pytest.approx(1.0))
    slow = Stub(responses="", seconds_per_token=0.12)
    assert compare(sync, ours, slow, slots=16)["bound_s"] == pytest.approx(8.25)


def test_what_had_been_in_stock_need_not_be_generated():
    assert window(stock_fall=20).gen_s(0.1, slots=10) == pytest.approx(8.0)
    assert window(stock_fall=-20).gen_s(0.1, slots=10) == pytest.approx(10.0)


def test_window_is_read_from_the_metrics(tmp_path):
    """Steps of 2 s, of which the trainer waits for half; 3 warm-up steps take longer."""
    ends = [7.0, 12.0, 17.0, 19.0, 21.0]  # the first step begins at 3
    lines = [{"step": 0, "wall_s": 1.0, "eval/accuracy": 0.0}]
    for step, end in enumerate(ends, start=1):
        lines.append(
            {
                "step": step,
                "wall_s": end,
                "time/step_s": end - ([3.0] + ends)[step - 1],
                "time/trained_tokens_per_s": 100.0 * step / (end - 3.0),
                "time/generated_tokens_per_s": 150.0 * step / (end - 3.0),
                "time/trainer_waiting_round_s": 1.0 * step,
                "time/trainer_waiting_data_s": 0.25 * step,
                "time/publish_s": 0.125,  # mean a step
                "buffer/drawn": 16 * step,
                "buffer/num_trajectories": 40 - 5 * step,
            }
        )
    text = "\n".join(json.dumps(line) for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    summary = {"searcher_idle_fraction": 0.5, "staleness_mean": 2.0}
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    got = read_window(tmp_path, warm_up=3)
    assert (got.wall_s, got.responses, got.stock_fall) == (4.0, 32, 10)
    assert got.tokens == pytest.approx(200.0) and got.generated_tokens == pytest.approx(300.0)
    assert got.waiting_s == pytest.approx(2.5) and got.busy_s == pytest.approx(1.5)
    assert got.publish_s == pytest.approx(0.25)
    assert (got.searcher_idle, got.staleness) == (0.5, 2.0)


def test_regimes_and_overrides_are_valid(tmp_path):
    import config
    from comm import Ranks
    from experiments.warm import _compose

    assert {r.name: r.ratio for r in REGIMES if r.gains} == {
        **{"1:1": 1.0, "2:1": 2.0, "1:2": 0.5},
        "heavy_tail": 1.0,
    }
    assert [r.name for r in REGIMES if r.heavy_tail] == ["heavy_tail"]
    ranks = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, num_trainers=1)
    size = Size()
    for mode in ("sync", "async"):
        cfg = _compose(overrides(size, tmp_path, "run", mode, 0))
        config.validate(cfg, ranks)
        assert cfg.mode == mode and cfg.trainer.max_reuse == 1
        assert cfg.trainer.responses_per_prompt == cfg.searcher.responses_per_prompt
        assert cfg.trainer.publish_every == 1 and cfg.engine.max_num_seqs == size.batch_size


def test_documented_examples():
    results = doctest.testmod(overlap)
    assert results.attempted and not results.failed


@pytest.mark.slow
def test_a_small_bench_runs(tmp_path):
    """Real jobs: generation takes longer than training, which asynchrony hides."""
    given = ["--quick", "--steps", "4", "--regimes", "2:1"]
    given += ["--folder", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    result = overlap.main(given)
    assert set(result["fraction_of_bound"]) == {"2:1"}
    assert 0.2 < result["fraction_of_bound"]["2:1"]
    assert result["sync_over_async"]["2:1"] > 1.0
    assert (tmp_path / "out" / "overlap.png").stat().st_size > 5_000
    assert "2:1" in (tmp_path / "out" / "overlap.md").read_text()
    summary = json.loads((tmp_path / "runs/runs/2-1-async-0/summary.json").read_text())
    assert summary["engine_logprob_gap"] < 1e-3  # what was published is what the stand-in holds
