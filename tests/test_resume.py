"""Runs that are killed and go on; runs done again; runs replayed: whole jobs of real processes."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from needs import VLLM

from bench.faults import Place, keep_aside, lost, make_model, make_place, newest_step
from experiments import warm
from metrics import read_metrics
from offline import read_trajectories

# What depends on the clock, and on what else the machine does.
OF_THE_MACHINE = ("time/", "memory/", "weights/")
LOCKSTEP = ["mode=sync", "deterministic=true", "trainer.batch_size=16", "eval.every=6"]
LOCKSTEP += ["task.max_operand=9"]  # right answers come by chance
LOCKSTEP += ["trainer.lr.peak=1e-3", "trainer.lr.warmup_steps=0", "checkpoint.every=5"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "random")


@pytest.fixture(scope="module")
def server() -> warm.Server:
    return warm.Server()


@pytest.fixture
def place(tmp_path: Path, model: str, server: warm.Server) -> Place:
    return make_place(tmp_path / "place", model, server)


def whole(place: Place, num_ranks: int, *overrides: str) -> str:
    """A run that must end well; its output."""
    with place.job(num_ranks, *overrides) as job:
        assert job.end(timeout_s=150) == [0] * num_ranks, job.output()
    return job.output()


def by_step(run: Path) -> dict[tuple[int, str], Any]:
    """The last value of every metric that the machine does not decide, by step and name."""
    return {
        (record["step"], name): value
        for record in read_metrics(run)
        for name, value in record.items()
        if name not in ("wall_s", "eval/seconds") and not name.startswith(OF_THE_MACHINE)
    }


@pytest.mark.parametrize(
    ("num_ranks", "engine", "kill_at"),
    [
        pytest.param(1, "hf", 8, id="one-process"),
        pytest.param(3, "hf", 11, id="two-searchers", marks=pytest.mark.slow),
        pytest.param(2, "vllm", 8, id="vllm", marks=[pytest.mark.slow, pytest.mark.vllm, VLLM]),
    ],
)
def test_a_deterministic_run_that_was_killed_goes_on_identically(
    place: Place, num_ranks: int, engine: str, kill_at: int
) -> None:
    runs = place.folder / "runs"
    options = [*LOCKSTEP, f"engine={engine}", "trainer.steps=14"]
    whole(place, num_ranks, *options, "run.name=whole")
    reference = by_step(runs / "whole")
    assert len({v for (_, name), v in reference.items() if name == "loss/total"}) > 8
    with place.job(num_ranks, *options, "run.name=killed") as job:
        job.wait_for_step(runs / "killed", kill_at)
        job.kill_all()
    assert 0 < newest_step(runs / "killed") <= kill_at
    output = whole(place, num_ranks, *options, "run.name=killed", "resume=auto")
    assert "going on from" in output
    assert by_step(runs / "killed") == reference
    saved = [runs / name / "checkpoints" / "step-14" for name in ("whole", "killed")]
    weights = [(folder / "model.safetensors").read_bytes() for folder in saved]
    assert weights[0] == weights[1]
    whole(place, num_ranks, *options, "run.name=killed", "resume=auto")  # has ended: at once
    assert by_step(runs / "killed") == reference


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "mode"), [(1, "sync"), (2, "sync"), (2, "async")])
def test_a_run_whose_summary_is_missing_or_of_fewer_steps_is_finished(
    place: Place, num_ranks: int, mode: str
) -> None:
    options = [f"mode={mode}", "trainer.steps=3"]
    whole(place, num_ranks, *options)
    summary = place.run / "summary.json"
    for damage in (summary.unlink, lambda: summary.write_text('{"steps": 2}')):
        damage()
        output = whole(place, num_ranks, *options, "resume=auto", "cluster.startup_timeout_s=60")
        assert "going on from" in output and "has ended already" not in output
        assert json.loads(summary.read_text())["steps"] == 3
    assert "has ended already" in whole(place, num_ranks, *options, "resume=auto")


@pytest.mark.slow
def test_a_resumed_run_waits_for_its_searchers(place: Place) -> None:
    """It has data to train on, but that grows old."""
    whole(place, 3, "trainer.steps=10", "checkpoint.every=5", "trainer.publish_every=1")
    whole(place, 3, "trainer.steps=14", "resume=auto")
    records = {r["step"]: r for r in read_metrics(place.run) if "loss/total" in r}
    assert all(records[step]["weights/load_s"] > 0 for step in (11, 12))


@pytest.mark.slow
def test_steps_that_are_done_already_are_refused_and_nothing_is_changed(place: Place) -> None:
    with place.job(2, "checkpoint.every=10") as job:
        job.wait_for_checkpoint(place.run)
        job.kill_all()
    config = (place.run / "config.yaml").read_text()
    with place.job(2, "resume=auto", "trainer.steps=5") as job:
        assert job.end()[0] == 2
    assert "raise trainer.steps=5" in job.output() and "Traceback" not in job.output()
    assert (place.run / "config.yaml").read_text() == config


@pytest.mark.slow
def test_a_checkpoint_that_was_being_replaced_is_put_back_before_it_is_looked_for(
    place: Place,
) -> None:
    whole(place, 2, "trainer.steps=5", "checkpoint.keep=1", "checkpoint.keep_best=false")
    folder = place.run / "checkpoints" / "step-5"
    folder.rename(folder.with_name(".step-5.previous"))
    output = whole(place, 2, "trainer.steps=8", "checkpoint.keep=1", "resume=auto")
    assert f"going on from {folder}" in output


@pytest.mark.slow
def test_a_run_on_data_goes_on_with_the_same_data_only(place: Place) -> None:
    runs = place.folder / "runs"
    for name, seed in (("one", 0), ("two", 1)):
        options = [f"run.name={name}", f"seed={seed}", "run.save_trajectories=true"]
        whole(place, 2, "trainer.steps=5", *options)
    learn = ["mode=offline", "buffer.deduplicate=false", f"data={runs / 'one'}", "run.name=learnt"]
    whole(place, 1, *learn, "trainer.steps=3")
    whole(place, 1, *learn, "trainer.steps=5", "resume=auto")
    for other in ([f"data={runs / 'two'}"], ["mode=async", "data=null"]):
        with place.job(1 + ("data=null" in other), *learn, *other, "resume=auto") as job:
            assert job.end()[0] == 2, job.output()
        assert "responses of another origin (mode, data)" in job.output()
    with place.job(1, *learn, f"data={runs / 'none'}", "run.name=typo") as job:
        assert job.end()[0] == 2 and "data" in job.output()
    assert not (runs / "typo").exists()


@pytest.mark.parametrize("trainers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_recorded_run_is_replayed(place: Place, trainers: int) -> None:
    """Also one that was killed and resumed: what came after its checkpoint does not count."""
    options = ["run.save_trajectories=true", f"cluster.trainers={trainers}"]
    options += ["checkpoint.every=10", "trainer.reference_reset_every=15"]
    with place.job(trainers + 1, *options) as job:
        job.wait_for_step(place.run, 25)
        job.kill_all()
    assert newest_step(place.run) in (10, 20)
    place.finish(trainers + 1, 25, *options)
    steps = newest_step(place.run)
    replayed = ["mode=replay", f"data={place.run}", "run.name=replayed"]
    whole(place, trainers, *replayed)
    summary = json.loads((place.folder / "runs" / "replayed" / "summary.json").read_text())
    assert summary["steps"] == summary["compared_losses"] == steps
    assert summary["largest_loss_difference"] <= 1e-6 * summary["largest_loss"]


@pytest.mark.slow
def test_a_run_that_can_not_be_replayed_says_why(place: Place) -> None:
    whole(place, 2, "trainer.steps=3")
    with place.job(1, "mode=replay", f"data={place.run}", "run.name=replayed") as job:
        assert job.end()[0] == 2
    assert "run.save_trajectories=true" in job.output() and "Traceback" not in job.output()


@pytest.mark.slow
def test_a_run_of_its_own_from_a_checkpoint_of_another(place: Place) -> None:
    whole(place, 2, "trainer.steps=30", "checkpoint.every=10")
    before = keep_aside(place)
    source = place.run / "checkpoints" / "step-20"
    whole(place, 2, f"resume={source}", "run.name=fork", "trainer.steps=25", "loss=rloo")
    fork = place.folder / "runs" / "fork"
    assert [r["step"] for r in read_metrics(fork) if "loss/total" in r] == list(range(21, 26))
    assert json.loads((fork / "origin.json").read_text())["resumed_from"] == str(source)
    assert lost(place, before) == 0  # the other run is as it was
    with place.job(2, f"resume={place.run}", "run.name=again", "trainer.steps=30") as job:
        assert job.end()[0] == 2
    assert "raise trainer.steps" in job.output()


@pytest.mark.slow
def test_saved_trajectories_outlive_what_is_not_in_a_checkpoint(place: Place) -> None:
    """Of a run that was killed every message is in the file, and a resumed run writes on."""
    options = ["run.save_trajectories=true", "checkpoint.every=10"]
    with place.job(2, *options) as job:
        job.wait_for_step(place.run, 15)
        job.signal(0, signal.SIGKILL)
        job.end()
    file = place.run / "trajectories" / "trainer-0.traj"
    before = list(read_trajectories(file))
    place.finish(2, 10, *options)
    after = list(read_trajectories(file))
    assert len(after) > len(before)
    for old, new in zip(before, after, strict=False):
        assert old.response_tokens.tolist() == new.response_tokens.tolist()


@pytest.mark.slow
def test_memory_of_a_long_run_is_flat(place: Place) -> None:
    """Once the buffer is full; and no thread, no open file more."""
    with place.job(2, "buffer.max_tokens=5000", "checkpoint.every=50") as job:
        ranks = [psutil.Process(process.pid) for process in job.processes]
        held = []
        for step in (300, 600, 900):
            job.wait_for_step(place.run, step, timeout_s=200)
            # not the private part alone: that grows as pages of the fork are written to
            held.append([(p.memory_info().rss, p.num_fds()) for p in ranks])
        (place.run / "stop").touch()
        assert job.end() == [75, 75], job.output()
    for rank in (0, 1):
        growth = held[2][rank][0] - held[1][rank][0]
        assert growth < 8e6, f"rank {rank}: {held}"  # bytes in 300 steps
        assert abs(held[2][rank][1] - held[1][rank][1]) <= 4  # a checkpoint may be under way
