"""The staleness study: its plan, what it keeps of runs, its tables and figure, and one real run."""

from __future__ import annotations

import doctest
import json
import signal
from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from experiments import staleness
from experiments.staleness import (
    Planned,
    Result,
    Run,
    Study,
    UserError,
    cells,
    choose_rates,
    draw,
    estimate_s,
    explain_log,
    grid_runs,
    losses_of,
    order,
    parse,
    perform,
    ranking,
    read_result,
    report,
    run_name,
    run_overrides,
    sweep_runs,
    wall_s_by_step,
)


def study(**changes) -> Study:
    small = Study(objectives=("tb_vargrad", "rloo"), ks=(1, 64), ms=(1.0, 0.5), seeds=(0, 1))
    return replace(small, **changes)


def a_run(objective="tb_vargrad", *, k=1, m=0.5, rate=1e-4, seed=0) -> Run:
    return Run(objective=objective, k=k, m=m, learning_rate=rate, seed=seed)


def a_result(run: Run, accuracy: float | None, *, status="finished", stale=3.0) -> Result:
    curve = {} if accuracy is None else {0: 0.43, 256: accuracy}
    return Result(
        run=run,
        name="name",
        status=status,
        reason="" if status == "finished" else "it broke",
        accuracy=accuracy,
        accuracy_by_step=curve,
        wall_s_by_step={step: step / 10 for step in curve},
        staleness_mean=stale,
        wall_s=25.6,
        total_s=30.0,
    )


def a_grid(accuracy: dict[tuple[str, int], list[float]], ms=(1.0, 0.5)) -> list[Result]:
    """Results by (objective, k), one a seed, the same for every m."""
    return [
        a_result(a_run(objective, k=k, m=m, seed=seed), value, stale=float(k + seed))
        for m in ms
        for (objective, k), values in accuracy.items()
        for seed, value in enumerate(values)
    ]


GRID = {
    ("tb_vargrad", 1): [0.75, 0.77],
    ("tb_vargrad", 64): [0.70, 0.72],
    ("rloo", 1): [0.76, 0.80],
    ("rloo", 64): [0.50, 0.60],
}


def leave_run(root: Path, name: str, *, finished: bool = True, accuracy: float = 0.7) -> Path:
    """A run's folder: 2 steps of 0.5 s that began 3.5 s after the metrics did."""
    folder = root / name
    folder.mkdir(parents=True)
    records = [
        {"step": 0, "wall_s": 1.0, "eval/accuracy": 0.43, "eval/version": 0},
        {"step": 1, "wall_s": 4.0, "time/step_s": 0.5},
        {"step": 2, "wall_s": 4.5, "time/step_s": 0.5},
        {"step": 2, "wall_s": 9.0, "eval/accuracy": accuracy, "eval/version": 2},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (folder / "origin.json").write_text(json.dumps({"commit": "abc1234"}))
    if finished:
        summary = {
            "accuracy_after": accuracy,
            "accuracy_by_step": {"0": 0.43, "2": accuracy},
            "staleness_mean": 1.5,
            "wall_s": 1.0,
            "trainer_idle_fraction": 0.1,
            "searcher_idle_fraction": 0.2,
            "trajectories": 512,
        }
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


class FakeServer:
    """Resolves overrides to themselves; `execute` calls a function with name and log files."""

    def __init__(self, run=None) -> None:
        self.run = run
        self.executed: list[str] = []

    def resolve(self, override_lists):
        trees = []
        for overrides in override_lists:
            tree = dict(o.split("=", 1) for o in overrides)
            tree["run"] = {key: tree.pop(key) for key in list(tree) if key.startswith("run.")}
            trees.append(tree)
        return trees

    def execute(self, overrides, logs, *, timeout_s):
        name = next(o for o in overrides if o.startswith("run.name=")).removeprefix("run.name=")
        self.executed.append(name)
        return self.run(name, logs)


def a_driver(study: Study, server, out: Path, **options) -> staleness.Driver:
    options = {"command": "the command", "max_minutes": np.inf, "run_timeout_s": 60.0, **options}
    return staleness.Driver(study, server, out, **options)


def test_doctests():
    failed, tried = doctest.testmod(staleness)
    assert tried >= 4 and failed == 0


# --------------------------------------------------------------------------- plan


def test_grid_has_every_setting_once_seed_by_seed():
    runs = grid_runs(study(), {"tb_vargrad": 1e-4, "rloo": 5e-5})
    assert len(set(runs)) == len(runs) == 2 * 2 * 2 * 2
    assert [r.seed for r in runs] == [0] * 8 + [1] * 8
    assert {r.learning_rate for r in runs if r.objective == "rloo"} == {5e-5}
    assert grid_runs(study(), {"rloo": 5e-5}) == [r for r in runs if r.objective == "rloo"]


def test_sweep_tries_every_rate_for_every_objective_at_one_setting():
    runs = sweep_runs(study(learning_rates=(5e-5, 1e-4, 2e-4)))
    assert len(set(runs)) == 6
    assert {(r.k, r.m, r.seed) for r in runs} == {(4, 0.5, 100)}
    assert sweep_runs(study(learning_rates=(1e-4,))) == []


def test_best_rate_ties_go_to_the_smaller_and_divergence_loses():
    def tried(objective, *outcomes):
        rates = (5e-5, 1e-4, 2e-4)
        return [
            a_result(a_run(objective, rate=rate), value, status=status)
            for rate, (value, status) in zip(rates, outcomes, strict=True)
        ]

    ok = "finished"
    results = [
        *tried("tb_vargrad", (0.6, ok), (0.7, ok), (0.7, ok)),
        *tried("rloo", (0.5, ok), (0.4, ok), (0.9, "diverged")),
        *tried("dpo", (None, "failed"), (None, "failed"), (0.3, "diverged")),
        *tried("kimi", (None, "failed"), (None, "failed"), (None, "failed")),
    ]
    names = ("tb_vargrad", "rloo", "dpo", "kimi")
    rates = choose_rates(study(objectives=names), results[::-1])
    assert rates == {"tb_vargrad": 1e-4, "rloo": 5e-5, "dpo": 2e-4}
    assert choose_rates(study(learning_rates=(3e-4,)), []) == {"tb_vargrad": 3e-4, "rloo": 3e-4}


def test_a_runs_name_changes_with_its_config_but_not_with_where_it_is_written():
    run = a_run(rate=1e-4)
    tree = {"trainer": {"steps": 2}, "run": {"name": "a"}}
    name = run_name(run, tree)
    assert name.startswith("tb_vargrad-k1-m0.5-lr0.0001-seed0-")
    assert name == run_name(run, {"run": {"name": "b"}, "trainer": {"steps": 2}})
    assert name != run_name(run, {"trainer": {"steps": 3}, "run": {"name": "a"}})


def test_overrides_of_the_user_come_last():
    overrides = run_overrides(study(overrides=("trainer.max_grad_norm=2",)), a_run(k=16), "x")
    assert overrides[-1] == "trainer.max_grad_norm=2"
    assert {"trainer.publish_every=16", "buffer.recency_prob=0.5", "run.name=x"} < set(overrides)


def test_command_line():
    argv = ["--k", "1", "4", "trainer.max_grad_norm=2", "--seeds", "7", "--steps", "8"]
    chosen, options = parse([*argv, "--eval-every", "4", "--learning-rates", "2e-4", "1e-4"])
    assert chosen.ks == (1, 4) and chosen.seeds == (7,) and chosen.steps == 8
    assert chosen.overrides == ("trainer.max_grad_norm=2",)
    assert chosen.learning_rates == (1e-4, 2e-4)
    assert chosen.objectives == staleness.OBJECTIVES and not options.plan


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["trainer.lr.peak=1"], "--learning-rates"),
        (["+seed=1"], "--seeds"),
        (["--k", "300"], "--k 300"),
        (["--k", "3", "--eval-every", "64"], "--eval-every 64"),
        (["--seeds", "100"], "--seeds 100"),
    ],
)
def test_mistakes_name_the_option(argv, words):
    with pytest.raises(UserError, match=words):
        parse(argv)


def test_estimate_is_measured_once_there_is_a_run():
    small = study(steps=100, batch_size=100)
    guess, measured = estimate_s(small, [Planned(run=a_run(), name="a", result=None)])
    assert not measured and guess > 10
    done = Planned(run=a_run(), name="a", result=a_result(a_run(), 0.5))
    assert estimate_s(small, [done]) == (30.0, True)


# --------------------------------------------------------------------------- what a run leaves


def test_result_of_a_finished_run(tmp_path):
    leave_run(tmp_path, "a", accuracy=0.7)
    result = read_result(study(runs=tmp_path), a_run(), "a")
    assert result.status == "finished" and result.counts
    assert result.accuracy == 0.7 and result.accuracy_by_step == {0: 0.43, 2: 0.7}
    assert result.wall_s_by_step == {0: 0.0, 2: 1.0}  # not 9, when the evaluation arrived
    assert result.staleness_mean == 1.5 and result.commit == "abc1234"


def test_a_run_that_was_cut_off_is_no_result(tmp_path):
    folder = leave_run(tmp_path, "a", finished=False)
    assert read_result(study(runs=tmp_path), a_run(), "a") is None
    assert wall_s_by_step(folder) == {0: 0.0, 1: 0.5, 2: 1.0}
    assert wall_s_by_step(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    ("log", "status"),
    [
        ("[trainer 0] ERROR the job ends: trainer 0 (rank 0): FloatingPointError: nan", "diverged"),
        ("RuntimeError: probability tensor contains either `inf`, `nan`", "diverged"),
        ("the job ends: version 4: log-probs of engine and trainer differ by nan", "diverged"),
        ("the job ends: searcher 0: OSError: no such file", "failed"),
    ],
)
def test_a_diverged_run_is_a_result_and_another_failure_is_not(tmp_path, log, status):
    def blow_up(name, logs):
        leave_run(tmp_path, name, finished=False, accuracy=0.2)
        logs[0].write_text(f"step 1/2\n{log}\n")
        return "rank 0 ended with exit code 1"

    chosen = study(runs=tmp_path)
    result = perform(FakeServer(blow_up), chosen, a_run(), "a", timeout_s=1)
    assert result.status == status
    assert result.accuracy == 0.2 and result.counts is (status == "diverged")
    assert result.reason.startswith(explain_log(log)) and "exit code" not in result.reason
    (looked_up,) = staleness.look_up(FakeServer(), chosen, [a_run()])
    named = replace_name(tmp_path, "a", looked_up.name)
    (again,) = staleness.look_up(FakeServer(), chosen, [a_run()])
    assert named == again.name
    assert (again.result is None) is (status == "failed")  # to be tried once more


def replace_name(root: Path, old: str, new: str) -> str:
    for path in list(root.iterdir()):
        if path.name == old or path.name.startswith(f"{old}."):
            path.rename(root / path.name.replace(old, new, 1))
    return new


def test_a_run_over_the_rest_of_one_that_was_cut_off(tmp_path):
    (leave_run(tmp_path, "a", finished=False) / "old").touch()

    def whole(name, logs):
        (leave_run(tmp_path, name) / "checkpoints" / "step-2").mkdir(parents=True)
        return ""

    result = perform(FakeServer(whole), study(runs=tmp_path), a_run(), "a", timeout_s=1)
    assert result.status == "finished" and result.total_s is not None
    assert not (tmp_path / "a" / "old").exists()
    assert not (tmp_path / "a" / "checkpoints").exists()


@pytest.fixture
def quick_figure(monkeypatch):
    """Drawing takes half a second, and the figure has a test of its own."""
    monkeypatch.setattr(staleness, "draw", lambda study, grid, path: path.write_text("drawn"))


def test_study_sweeps_then_runs_the_grid_and_resumes(tmp_path, quick_figure):
    """Interrupted in its third run, it repeats that one only, and keeps what it had written."""
    chosen = study(runs=tmp_path / "runs", ms=(0.5,), seeds=(0,), learning_rates=(1e-4, 2e-4))
    out = tmp_path / "out"

    def whole(name, logs):
        leave_run(chosen.runs, name, accuracy=0.8 if "lr0.0002" in name else 0.6)
        return ""

    def interrupted(name, logs):
        if len(first.executed) == 3:
            leave_run(chosen.runs, name, finished=False)
            raise KeyboardInterrupt
        return whole(name, logs)

    first, second, third = FakeServer(interrupted), FakeServer(whole), FakeServer(whole)
    with pytest.raises(KeyboardInterrupt):
        a_driver(chosen, first, out).run()
    assert len(json.loads((out / "results.json").read_text())["sweep"]) == 2
    a_driver(chosen, second, out).run()
    assert second.executed[0] == first.executed[2] and len(second.executed) == 2 + 4
    content = json.loads((out / "results.json").read_text())
    assert content["learning_rates"] == {"tb_vargrad": 2e-4, "rloo": 2e-4}
    assert len(content["sweep"]) == 4 and len(content["grid"]) == 4
    assert all("lr0.0002" in r["name"] for r in content["grid"])
    assert "0.800" in (out / "staleness.md").read_text()
    assert (out / "staleness.png").is_file()
    a_driver(chosen, third, out).run()
    assert third.executed == []
    changed = replace(chosen, steps=128)
    fourth = FakeServer(whole)
    a_driver(changed, fourth, out).run()
    assert len(fourth.executed) == 8


def test_study_stops_when_time_is_up_or_runs_keep_failing(tmp_path, quick_figure):
    chosen = study(runs=tmp_path / "runs", learning_rates=(1e-4,))
    idle = FakeServer()
    with pytest.raises(staleness.Stop, match="time is up: 16 runs left"):
        a_driver(chosen, idle, tmp_path, max_minutes=0.0).run()
    assert idle.executed == []
    failing = FakeServer(lambda name, logs: "rank 0 ended with exit code 1")
    with pytest.raises(staleness.Stop, match="3 runs in a row failed"):
        a_driver(chosen, failing, tmp_path).run()
    assert len(failing.executed) == 3
    assert "3 failed" in (tmp_path / "staleness.md").read_text()


# --------------------------------------------------------------------------- tables and figure


def test_cells_are_means_with_spread_and_say_what_is_missing():
    results = a_grid(GRID, ms=(0.5,))
    results.append(a_result(a_run("rloo", k=64, seed=2), 0.1, status="diverged"))
    results.append(a_result(a_run("rloo", k=64, seed=3), None, status="failed"))
    results.append(a_result(a_run("dpo", k=64), None, status="failed"))
    table = cells(results)
    assert str(table["tb_vargrad", 0.5, 1]) == "0.760 (0.750 to 0.770)"
    assert table["tb_vargrad", 0.5, 64].staleness == 64.5
    assert str(table["rloo", 0.5, 64]) == "0.400 (0.100 to 0.600), 1 diverged, 1 failed"
    assert str(table["dpo", 0.5, 64]) == "failed"


def test_accuracy_lost_is_paired_by_seed():
    results = a_grid(GRID)
    results.append(a_result(a_run("rloo", k=1, seed=9), 0.0))  # its k = 64 is not there yet
    lost = losses_of(study(), cells(results), 0.5)
    assert lost["tb_vargrad"] == pytest.approx([0.05, 0.05])
    assert lost["rloo"] == pytest.approx([0.26, 0.20])


def test_order_claims_only_what_every_seed_supports():
    assert order({"a": [0.5, 0.6], "b": [0.7, 0.8]}) == "b > a"
    assert order({"a": [0.5, 0.6], "b": [0.6, 0.8]}) == "b ~ a"
    assert order({"a": [0.5], "b": [0.7]}) == "b ~ a"  # one seed tells nothing
    assert order({"a": [0.5, 0.6]}) == "a" and order({}) == ""


def test_ranking_in_words():
    lines = ranking(study(ms=(0.5,)), a_grid(GRID, ms=(0.5,))).splitlines()
    assert lines == [
        "- m = 0.5, k = 1: rloo ~ tb_vargrad. tb_vargrad is number 2 of 2 by mean accuracy.",
        "- m = 0.5, k = 64: tb_vargrad > rloo. tb_vargrad is number 1 of 2 by mean accuracy; "
        "better in every seed than rloo.",
        "- m = 0.5, accuracy lost from k = 1 to 64, most first: rloo > tb_vargrad. tb_vargrad is "
        "number 1 of 2 by least accuracy lost; better in every seed than rloo.",
    ]


def test_report_has_every_table_and_the_circumstances():
    chosen = study(learning_rates=(1e-4, 2e-4), overrides=("trainer.max_grad_norm=2",))
    sweep = [
        a_result(a_run(objective, k=4, rate=rate, seed=100), accuracy)
        for objective in chosen.objectives
        for rate, accuracy in ((1e-4, 0.71), (2e-4, 0.74))
    ]
    sweep[1] = a_result(sweep[1].run, None, status="failed")
    rates = choose_rates(chosen, sweep)
    text = report(
        chosen, sweep, rates, a_grid(GRID)[:-1], command="the command", machine="2 CPU cores"
    )
    assert "`the command`" in text and "2 CPU cores" in text and "trainer.max_grad_norm=2" in text
    assert "15 finished, 0 diverged, 0 failed, 1 of 16 not run" in text
    assert "| tb_vargrad | 1 | 0.760 (0.750 to 0.770) | 0.710 (0.700 to 0.720) |" in text
    assert "| tb_vargrad | 0.5 | 1.5 | 64.5 |" in text  # staleness
    assert "| tb_vargrad | 0.5 | 0.760 | 0.710 | +0.050 (+0.050 to +0.050) |" in text
    assert "| rloo | 0.5 | 0.780 | 0.500 | +0.260 |" in text  # the pair of one seed
    assert "| tb_vargrad | **0.710** | failed |" in text
    assert "| rloo | 0.710 | **0.740** |" in text
    assert "## Runs that did not finish" in text and "it broke" in text
    assert "before training: 0.430." in text
    for line in text.splitlines():  # every row as wide as its header
        assert not line.startswith("|") or line.endswith("|")


def test_figure_is_drawn(tmp_path):
    chosen = study(objectives=("tb_vargrad", "rloo", "mine"))
    path = tmp_path / "new" / "staleness.png"
    draw(chosen, [], path)  # nothing known yet
    empty = matplotlib.image.imread(path)
    draw(chosen, a_grid({**GRID, ("mine", 64): [0.6]}), path)
    full = matplotlib.image.imread(path)
    assert full.shape == empty.shape and full.shape[1] > 1000
    drawn = np.unique(np.round(full[..., :3] * 255).astype(int).reshape(-1, 3), axis=0)
    colours = {"#{:02x}{:02x}{:02x}".format(*colour) for colour in drawn.tolist()}
    assert {"#1f5fa8", "#d95f02"} <= colours  # both objectives, in their own colours
    assert [p.name for p in path.parent.iterdir()] == ["staleness.png"]


# --------------------------------------------------------------------------- real


@pytest.fixture
def keep_sigterm():
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.slow
def test_a_real_study_runs_and_a_bad_run_is_noted(tmp_path, capfd, keep_sigterm):
    from sft import tiny_model, tiny_tokenizer

    tokenizer = tiny_tokenizer()
    model = tmp_path / "model"
    tiny_model(tokenizer, seed=0).save_pretrained(model)
    tokenizer.save_pretrained(model)
    argv = ["--objectives", "tb_vargrad", "rloo", "--k", "1", "--m", "0.5", "--seeds", "0"]
    argv += ["--learning-rates", "1e-4", "--steps", "2", "--eval-every", "1", "--batch-size", "16"]
    argv += ["--num-problems", "8", "--prompts-in-flight", "4"]
    argv += ["--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    argv += ["model.build=null", f"model.path={model}", "buffer.initial_trajectories=16"]
    assert staleness.main([*argv, "--plan"]) == 0
    assert "left: 2 runs of 2" in capfd.readouterr().out
    assert staleness.main(argv) == 0
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [r["run"]["objective"] for r in content["grid"]] == ["tb_vargrad", "rloo"]
    for result in content["grid"]:
        assert result["status"] == "finished" and result["trajectories"] >= 16
        assert {"0", "2"} <= set(result["accuracy_by_step"]) == set(result["wall_s_by_step"])
        folder = tmp_path / "runs" / result["name"]
        assert "mode: async" in (folder / "config.yaml").read_text()
    assert (tmp_path / "out" / "staleness.png").stat().st_size > 10_000
    capfd.readouterr()
    assert staleness.main([*argv, "--plan"]) == 0
    assert "left: 0 runs of 2" in capfd.readouterr().out
    assert staleness.main([*argv, "model.path=/nowhere"]) == 1  # fails in the ranks
    assert "model.path" in (tmp_path / "out" / "staleness.md").read_text()
    assert staleness.main([*argv, "trainer.stepz=2"]) == 2
    assert "did you mean trainer.steps" in capfd.readouterr().err
