"""What a run shows and leaves: metrics.jsonl, the progress line, rollouts, summary, figure."""

from __future__ import annotations

import doctest
import io
import json
import logging
import math
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

import metrics
from metrics import (
    METRICS,
    IdleClock,
    Metrics,
    draw_figure,
    escape_control,
    is_documented,
    progress_line,
    read_metrics,
    setup_logging,
    write_rollouts,
    write_summary,
)


class Clock:
    """A clock that stands still until it is told to move."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def __call__(self) -> float:
        return self.time_s


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_log_appends_a_line_that_is_on_disk_at_once(tmp_path):
    clock = Clock()
    log = Metrics(tmp_path / "new" / "run", total_steps=10, stream=io.StringIO(), now=clock)
    clock.time_s += 2.5
    log.log(1, {"reward/mean": 0.5, "loss/total": torch.tensor(1.25)})
    log.log(2, {"reward/mean": np.float32(0.75), "loss/grad_norm": math.inf})
    lines = (tmp_path / "new" / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"step": 1, "wall_s": 2.5, "reward/mean": 0.5, "loss/total": 1.25},
        {"step": 2, "wall_s": 2.5, "reward/mean": 0.75, "loss/grad_norm": None},
    ]
    log.close()
    log.close()


def test_log_reaches_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Metrics(tmp_path, total_steps=10, stream=io.StringIO())
    log.log(3, {"reward/mean": 0.5})
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(3, 0.5)]


def test_an_undocumented_metric_fails(tmp_path):
    log = Metrics(tmp_path, total_steps=10, stream=io.StringIO())
    with pytest.raises(AssertionError, match="loss/mystery"):
        log.log(1, {"reward/mean": 0.5, "loss/mystery": 1.0})
    log.close()
    assert read_metrics(tmp_path) == []


def test_documented_names():
    assert is_documented("reward/mean")
    assert is_documented("reward/exact_answer")  # a part, by its pattern
    assert is_documented("time/trainer_waiting_weights_s")
    for name in ("reward/", "reward/a/b", "time/trainer_waiting__x", "policy/kl", "mean"):
        assert not is_documented(name), name
    prefixes = (
        *("reward", "loss", "policy", "buffer", "staleness"),
        *("time", "memory", "weights", "faults", "eval"),
    )
    for name, description in METRICS.items():
        assert name.split("/")[0] in prefixes and name.count("/") == 1
        assert description and "\n" not in description and len(description) < 80


def test_a_resumed_run_continues_the_file_and_its_clock(tmp_path):
    clock = Clock()
    first = Metrics(tmp_path, total_steps=10, stream=io.StringIO(), now=clock)
    clock.time_s += 60
    first.log(1, {"reward/mean": 0.1})
    first.close()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "wall_')  # cut by a crash
    clock.time_s = 7.0
    second = Metrics(tmp_path, total_steps=10, stream=io.StringIO(), now=clock)
    clock.time_s += 5
    second.log(2, {"reward/mean": 0.2})
    second.close()
    assert read_metrics(tmp_path) == [
        {"step": 1, "wall_s": 60.0, "reward/mean": 0.1},
        {"step": 2, "wall_s": 65.0, "reward/mean": 0.2},
    ]


VALUES = {
    "reward/mean": -0.3456,
    "eval/accuracy": 0.546,
    "time/generated_tokens_per_s": 123_456.0,
    "time/trained_tokens_per_s": 1_234_567.0,
    "staleness/mean": 14.25,
    "buffer/duplicate_fraction": 0.123,
    "policy/engine_logprob_gap": 0.00312,
    "time/trainer_idle_fraction": 0.021,
    "time/searcher_idle_fraction": 0.999,
}


def test_progress_line_shows_every_field_and_fits():
    line = progress_line(1999, 2000, elapsed_s=35_999, eta_s=35_999, values=VALUES)
    assert line == (
        "1999/2000  9:59:59 eta 9:59:59  reward -0.346  acc 0.546  tok/s gen 123.5k train 1.2M  "
        "stale 14.2  dup 12%  gap 0.0031  idle train 2% search 100%"
    )
    assert len("━" * 10 + " " + line) <= 160 and len(line) <= 150


def test_missing_values_are_dashes():
    values = {**dict.fromkeys(VALUES, math.nan)}
    for given in ({}, values):
        line = progress_line(0, 5, elapsed_s=0.4, eta_s=math.nan, values=given)
        assert line == (
            "0/5  0:00:00 eta -  reward -  acc -  tok/s gen - train -  stale -  dup -  "
            "gap -  idle train - search -"
        )


def test_log_file_gets_a_plain_line_at_intervals_and_for_the_last_step(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = Metrics(tmp_path, total_steps=10, log_every_s=10.0, stream=stream, now=clock)
    log.log(0, {"eval/accuracy": 0.25})
    for step in range(1, 11):
        clock.time_s += 4
        log.progress(step, {"reward/mean": step / 10})
    log.close()
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/10", "4/10", "7/10", "10/10"]
    assert all("acc 0.250" in line and "\x1b" not in line for line in lines)
    assert "0:00:16 eta 0:00:24  reward 0.400" in lines[1]


def test_eta_of_a_resumed_run_counts_its_own_steps(tmp_path):
    clock, stream = Clock(), io.StringIO()
    log = Metrics(tmp_path, total_steps=110, log_every_s=0.0, stream=stream, now=clock)
    for step in (100, 101):
        clock.time_s += 3
        log.progress(step, {})
    log.close()
    first, second = stream.getvalue().splitlines()
    assert "eta - " in first and "eta 0:00:27" in second


def test_terminal_refreshes_in_place_and_notes_go_above(tmp_path, monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "170")
    stream = Terminal()
    log = Metrics(tmp_path, total_steps=3, stream=stream)
    for step in (1, 2, 3):
        log.progress(step, {"reward/mean": 0.5})
    log.note("a sample: [bold]\x1b[31mred")
    log.close()
    written = stream.getvalue()
    assert "3/3" in written and "reward 0.500" in written
    assert "\x1b[2K" in written  # erases its line
    assert "[bold]\\x1b[31mred" in written and "\x1b[31mred" not in written


def test_note_in_a_log_file(tmp_path):
    stream = io.StringIO()
    log = Metrics(tmp_path, total_steps=3, stream=stream)
    log.note("two\nlines\r")
    log.close()
    assert stream.getvalue() == "two\nlines\\r\n"


def test_logger_prefix(capsys):
    logger = logging.getLogger("tba")
    before = logger.handlers[:], logger.propagate, logger.level
    try:
        setup_logging("searcher 3")
        assert setup_logging("trainer 0") is logger
        logger.info("hello %d", 5)
        written = capsys.readouterr().err
    finally:
        logger.handlers[:], logger.propagate = before[0], before[1]
        logger.setLevel(before[2])
    assert written.count("hello 5") == 1 and "[trainer 0]" in written
    assert written.startswith("20") and "searcher" not in written


# IdleClock -------------------------------------------------------------------------------------


def test_idle_clock_adds_up_by_reason():
    now = Clock()
    clock = IdleClock(now=now)
    assert clock.fraction() == 0.0
    now.time_s += 6
    for reason, duration in (("weights", 1.0), ("trajectories", 2.0), ("weights", 1.0)):
        with clock.waiting(reason):
            now.time_s += duration
    assert clock.seconds() == {"weights": 2.0, "trajectories": 2.0}
    assert clock.fraction() == pytest.approx(0.4)
    clock.start()
    assert clock.seconds() == {} and clock.fraction() == 0.0
    now.time_s += 1
    assert clock.fraction() == 0.0


def test_idle_clock_charges_the_innermost_context():
    now = Clock()
    clock = IdleClock(now=now)
    with clock.busy("draw"):
        now.time_s += 1
        with clock.waiting("trajectories"):
            now.time_s += 3
        now.time_s += 1
    assert clock.busy_seconds() == {"draw": 2.0}
    assert clock.seconds() == {"trajectories": 3.0}
    assert clock.fraction() == pytest.approx(0.6)


def test_idle_clock_counts_a_wait_under_way_and_one_that_fails():
    now = Clock()
    clock = IdleClock(now=now)
    with pytest.raises(TimeoutError), clock.waiting("weights"):
        now.time_s += 4
        assert clock.fraction() == 1.0
        clock.start()  # the wait goes on in the new count
        now.time_s += 1
        raise TimeoutError
    now.time_s += 3
    assert clock.seconds() == {"weights": 1.0} and clock.fraction() == 0.25


# Rollouts and summary --------------------------------------------------------------------------

NASTY = "ok\n\x1b[2Jgone\x00\r\t\x9b\u2028\u202eabc\ud800 ```` é漢 \U0001f600"


def test_rollouts_are_kept_whole_in_json_and_escaped_in_text(tmp_path):
    rollout = {
        "prompt": "What is 1+1?",
        "response": NASTY,
        "reward": np.float32(0.5),
        "reward_parts": {"answer": 1.0, "format": -0.5},
        "version": 7,
        "staleness": 2,
    }
    write_rollouts(tmp_path, 10, [rollout, {**rollout, "response": "2"}])
    write_rollouts(tmp_path, 20, [{**rollout, "response": "two"}])

    lines = (tmp_path / "rollouts" / "rollouts.jsonl").read_text("ascii").splitlines()
    records = [json.loads(line) for line in lines]
    assert [(record["step"], record["response"]) for record in records] == [
        (10, NASTY),
        (10, "2"),
        (20, "two"),
    ]
    assert records[0] == {"step": 10, **rollout}
    assert all(character.isprintable() for line in lines for character in line)

    text = (tmp_path / "rollouts" / "rollouts.md").read_text("utf-8")
    assert "Step 10, sample 1 of 2" in text and "Step 20, sample 1 of 1" in text
    assert "reward 0.5, reward_parts (answer 1, format -0.5), version 7, staleness 2" in text
    assert "What is 1+1?" in text and "é漢 \U0001f600" in text
    assert "ok\n\\x1b[2Jgone\\x00\\r\\t\\x9b\\u2028\\u202eabc\\ud800 ````" in text
    assert "\n`````text\nok\n" in text  # a longer fence than the response has backticks
    assert all(character.isprintable() or character == "\n" for character in text)


def test_escape_leaves_ordinary_text_alone():
    text = "línea 1\n\\n stays, العربية, 漢字, x² ≤ 3"
    assert escape_control(text) == text


def test_summary_is_valid_json_in_the_order_given(tmp_path):
    summary = {
        "steps": 3,
        "accuracy": math.nan,
        "beta": {"final": np.float64("inf"), "initial": torch.tensor(0.5)},
        "arms": [1.5, -math.inf],
        "folder": Path("runs/a"),
        "resumed": False,
    }
    write_summary(tmp_path, {"old": 1})
    write_summary(tmp_path, summary)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert list(read.items()) == [
        ("steps", 3),
        ("accuracy", None),
        ("beta", {"final": None, "initial": 0.5}),
        ("arms", [1.5, None]),
        ("folder", "runs/a"),
        ("resumed", False),
    ]


# Figure ----------------------------------------------------------------------------------------


def make_run(run_dir: Path, steps: int, leave_out: tuple[str, ...] = ()) -> None:
    clock = Clock()
    log = Metrics(run_dir, total_steps=steps, stream=io.StringIO(), now=clock)
    for step in range(1, steps + 1):
        clock.time_s += 10
        values = {
            "reward/mean": math.sin(step),
            "staleness/mean": 3.0,
            "staleness/max": 5.0,
            "buffer/received": 12.0 * step,
            "buffer/drawn": 10.0 * step,
            "time/trainer_idle_fraction": 1 / step,
            "time/generated_tokens_per_s": 1000.0,
        }
        log.log(step, {name: v for name, v in values.items() if name not in leave_out})
        if step % 5 == 0 and "eval/accuracy" not in leave_out:
            log.log(step, {"eval/accuracy": step / steps, "reward/mean": math.nan})
    log.close()


@pytest.mark.parametrize(
    ("steps", "leave_out"),
    [(60, ()), (1, ()), (30, ("eval/accuracy", "buffer/drawn", "buffer/received")), (1, ("x",))],
)
def test_figure_is_a_png(tmp_path, steps, leave_out):
    make_run(tmp_path, steps, leave_out)
    path = draw_figure(tmp_path)
    assert path == tmp_path / "training.png"
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = matplotlib.image.imread(path)
    assert pixels.shape[0] > 500 and pixels.shape[1] > 1000
    assert pixels[..., :3].std() > 0.01  # something is drawn on it
    assert not list(tmp_path.glob("*.partial*"))


def test_figure_without_any_of_its_metrics(tmp_path):
    log = Metrics(tmp_path, total_steps=1, stream=io.StringIO())
    log.log(1, {"loss/total": 1.0})
    log.close()
    assert draw_figure(tmp_path).stat().st_size > 0


def test_figure_of_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="metrics.jsonl"):
        draw_figure(tmp_path)


def test_smoothing_keeps_constants_and_length():
    for count in (0, 1, 39, 40, 500):
        assert metrics._smooth(np.full(count, 2.5)) == pytest.approx(np.full(count, 2.5))
    ramp = np.arange(200.0)
    assert metrics._smooth(ramp)[100] == pytest.approx(100.0)


def test_documented_examples_hold():
    results = doctest.testmod(metrics)
    assert results.attempted >= 5 and results.failed == 0


def test_every_metric_stands_in_the_readme():
    readme = (Path(__file__).resolve().parents[1] / "README.md").read_text()
    missing = [name for name in METRICS if f"`{name}`" not in readme]
    assert not missing
