"""The bench of asynchrony: its runs, what it reads of them, and its ratios."""

import doctest
import json
import math
from pathlib import Path

import pytest

from bench import async_vs_sync
from bench.async_vs_sync import (
    BEST,
    MODES,
    SAME,
    Run,
    figures,
    main,
    parse,
    plan,
    read_result,
    table,
)


def leave(folder: Path, run: Run, times: dict[int, float], accuracy: dict[int, float]) -> None:
    """What a run leaves: its steps ended at these times, its first began at 100 s."""
    (folder / run.name).mkdir(parents=True)
    lines, before = [], 0.0
    for step, at in times.items():
        lines.append({"step": step, "wall_s": 100.0 + at, "time/step_s": at - before})
        before = at
    for step, value in accuracy.items():
        lines.append(
            {
                **{"step": step, "wall_s": 0.0, "eval/version": step},
                **{"eval/accuracy": value, "eval/seconds": 3.0},
            }
        )
    text = "\n".join(json.dumps(line) for line in lines)
    (folder / run.name / "metrics.jsonl").write_text(text + "\n")
    summary = {
        "accuracy_by_step": {str(step): value for step, value in accuracy.items()},
        "accuracy_after": accuracy[max(accuracy)],
        "wall_s": max(times.values()),
        "steps": max(times),
        "trainer_idle_fraction": 0.01 if run.mode == "async" else 0.5,
        "searcher_idle_fraction": 0.02 if run.mode == "async" else 0.4,
        "staleness_mean": 2.0,
    }
    (folder / run.name / "summary.json").write_text(json.dumps(summary))


def test_modes_take_turns_and_differ_in_their_own_settings_alone():
    runs = plan([0, 1])
    kinds = [(r.mode, r.objective) for r in runs if r.seed == 0]
    assert sorted(kinds) == sorted(
        {(mode, objective) for mode in MODES for objective in (*SAME, *BEST[mode])}
    )
    first = [[r.mode for r in runs if r.seed == s and r.objective == SAME[0]] for s in (0, 1)]
    assert first == [["sync", "async"], ["async", "sync"]]
    pair = [set(r.overrides) for r in runs if r.seed == 0 and r.objective == SAME[0]]
    keys = {override.partition("=")[0] for override in pair[0] ^ pair[1]}
    own = set(async_vs_sync.SETTINGS["sync"]) | set(async_vs_sync.SETTINGS["async"])
    assert "mode" in keys and keys <= own | {"mode"}


def test_a_run_is_named_by_its_settings():
    runs = plan([0])
    assert len({r.name for r in runs}) == len(runs)
    [again] = [r for r in plan([0]) if r.name == runs[0].name]
    assert again == runs[0]
    assert runs[0].name not in {r.name for r in plan([0], extra=["trainer.lr.peak=1"])}
    shorter = plan([0], steps=7, extra=["eval.every=3"])
    assert all({"trainer.steps=7", "eval.every=3"} <= set(r.overrides) for r in shorter)


def test_the_overrides_are_valid():
    import config
    from comm import Ranks
    from experiments.warm import _compose

    ranks = Ranks(rank=0, world_size=2, local_rank=0, local_world_size=2, num_trainers=1)
    for run in plan([3]):
        cfg = _compose([*run.overrides, "engine=hf"])  # vLLM may be absent here
        config.validate(cfg, ranks)
        assert (cfg.mode, cfg.seed) == (run.mode, 3)


def test_time_to_the_gain(tmp_path):
    """Lock-step waits for evaluations, whose time is taken off; asynchronous runs do not."""
    accuracy = {0: 0.4, 2: 0.6, 4: 0.7}
    times = {1: 10.0, 2: 20.0, 3: 33.0, 4: 43.0}
    for mode, want in (("async", 20.0 + 23.0 / 2), ("sync", 20.0 + 20.0 / 2)):
        [run] = [r for r in plan([0]) if (r.mode, r.objective) == (mode, SAME[0])]
        assert read_result(run, tmp_path, 0.25) is None
        leave(tmp_path, run, times, accuracy)
        result = read_result(run, tmp_path, 0.25)
        assert result.time_s == pytest.approx(want), mode
        assert result.step == pytest.approx(3.0)
        assert (result.accuracy_before, result.accuracy_after) == (0.4, 0.7)
        assert read_result(run, tmp_path, 0.35).time_s is None


def test_figures_and_resuming(tmp_path, monkeypatch, capsys):
    """Seconds to the gain: async 10, 20, 40; sync 20, 40, never; the other objective 15 each."""
    seconds = {
        ("async", "tb_vargrad"): [10.0, 20.0, 40.0],
        ("sync", "tb_vargrad"): [20.0, 50.0, math.inf],
        ("sync", "rloo"): [15.0, 15.0, 15.0],
    }
    performed = []

    def perform(run, folder, **_):
        performed.append(run.name)
        at = seconds[run.mode, run.objective][run.seed]
        end = 0.5 if math.isfinite(at) else 0.1
        # the gain is half of what is gained until the end of the only step
        leave(folder, run, {1: 2 * at if math.isfinite(at) else 99.0}, {0: 0.4, 1: 0.4 + end})

    monkeypatch.setattr(async_vs_sync, "perform", perform)
    monkeypatch.setattr(async_vs_sync, "SAME", ("tb_vargrad",))
    monkeypatch.setattr(async_vs_sync, "BEST", {"sync": ("tb_vargrad", "rloo"), "async": SAME})
    given = ["--folder", str(tmp_path)]
    found = main(given)
    assert len(performed) == 9
    assert found["same_objective_ratio"] == 2.25  # of 2 and 2.5; the third has no end
    assert found["best_objectives"] == {"sync": "rloo", "async": "tb_vargrad"}
    assert found["best_objective_ratio"] == 0.75  # of 1.5, 0.75, 0.375
    assert (found["trainer_idle"], found["searcher_idle"]) == (0.01, 0.02)
    assert found["not_reached"] == 1
    assert main(given) == found and len(performed) == 9  # nothing is run again
    assert "not reached" in (tmp_path / "async_vs_sync.md").read_text()
    main([*given, "--plan", "--seeds", "7"])
    assert len(performed) == 9 and "(to run)" in capsys.readouterr().out


def test_nothing_known_is_no_figure():
    found = figures([])
    assert found["same_objective_ratio"] is None and found["trainer_idle"] is None
    assert table([], 0.25).count("\n") == 1


def test_the_command_line(capsys):
    options = parse(["--seeds", "4", "5", "eval.every=5", "--steps", "9"])
    assert (options.seeds, options.steps, options.overrides) == ([4, 5], 9, ["eval.every=5"])
    with pytest.raises(SystemExit):
        parse(["mode=sync"])
    assert "mode is set by the bench" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_that_fails_says_why(tmp_path):
    [run] = [r for r in plan([0], extra=["trainer.steps=0"]) if r.mode == "async"]
    with pytest.raises(RuntimeError, match="trainer.steps=0 must be positive"):
        async_vs_sync.perform(run, tmp_path, cores=[], timeout_s=120)


def test_documented_examples():
    results = doctest.testmod(async_vs_sync)
    assert results.attempted and not results.failed
