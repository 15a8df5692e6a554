"""Checkpoints: whole or not there, and whatever has happened to one is noticed and named."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ranks import run_ranks
from test_state import go_on, open_trainer, weights
from transformers import AutoModelForCausalLM, AutoTokenizer

import checkpoint
import state
from checkpoint import CheckpointConfig, Checkpointer, newest, prune, read_checkpoint, steps_in
from comm import Control
from model import load_tokenizer
from trainer import TrainerParts, save

OPTIONS = {"timeout_s": 60.0, "heartbeat_timeout_s": 60.0}


@contextmanager
def checkpoints_of(
    parts: TrainerParts, path: str, folder: Path, **options: Any
) -> Iterator[Checkpointer]:
    """A trainer's checkpointer on a control plane of its own."""
    if parts.ranks.num_trainers > 1:
        parts.control = Control.start(parts.ranks, **OPTIONS)
    else:
        parts.control = Control(parts.ranks, **OPTIONS)
    parts.checkpointer = Checkpointer(
        folder,
        CheckpointConfig(**options),
        model=parts.policy,
        tokenizer=load_tokenizer(path),
        control=parts.control,
        about={"base": path},
    )
    yield parts.checkpointer
    parts.control.close()


def write(checkpointer: Checkpointer, parts: TrainerParts, step: int, **more: Any) -> None:
    checkpointer.write(state.take(parts, step), more.get("held_out", {}), due=set())
    checkpointer.wait()


@pytest.fixture(scope="module")
def whole(tiny_llama, tmp_path_factory) -> Path:
    """A folder with the checkpoint of one trainer after two steps, which nobody may change."""
    parts = open_trainer(tiny_llama)
    go_on(parts, 2)
    folder = tmp_path_factory.mktemp("whole")
    with checkpoints_of(parts, tiny_llama, folder) as checkpointer:
        write(checkpointer, parts, 2, held_out={2: {"reward": 0.5}})
    return folder / "step-2"


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """The same in a run's folder of checkpoints, to be damaged."""
    return shutil.copytree(whole, tmp_path / "checkpoints" / "step-2")


# --------------------------------------------------------------------------- writing


def test_a_checkpoint_is_a_folder_that_transformers_opens(tiny_llama, tmp_path) -> None:
    parts = open_trainer(tiny_llama)
    go_on(parts, 2)
    with checkpoints_of(parts, tiny_llama, tmp_path / "made") as checkpointer:
        want = weights(parts)
        checkpointer.write(
            state.take(parts, 2), {2: {"reward": 0.5, "accuracy": 0.25}, 1: {}}, due=set()
        )
        parts.first_step = 2
        go_on(parts, 4)  # training goes on while it is written
        checkpointer.wait()
        assert not checkpointer.busy and checkpointer.num_failed == 0 < checkpointer.last_s
    folder = checkpointer.path(2)
    names = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}
    assert names >= {
        *("config.json", "model.safetensors", "tokenizer.json", "trainer.json", "manifest.json"),
        *("log_z_head.safetensors", "state/trainer-0.safetensors", "state/trainer-0.json"),
    }
    assert sorted(p.name for p in folder.parent.iterdir()) == ["best", "step-2"]
    assert (folder.parent / "best").resolve() == folder
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, parameter in opened.named_parameters():
        assert torch.equal(parameter, torch.from_numpy(want[f"policy/{name}"])), name
        assert not torch.equal(parameter, parts.policy.get_parameter(name)), "nothing was trained"
    assert AutoTokenizer.from_pretrained(folder).vocab_size
    about = json.loads((folder / "trainer.json").read_text())
    assert about == {"step": 2, "held_out": {"reward": 0.5, "accuracy": 0.25}}
    saved = read_checkpoint(folder)
    assert (saved.step, saved.num_trainers, saved.about) == (2, 1, {"base": tiny_llama})
    assert set(json.loads((folder / "manifest.json").read_text())["files"]) == names - {
        "manifest.json"
    }
    assert saved.completed().tolist() == [4] * 6


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    """Every file that grows beyond some kilobytes is an error, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 if here else before[0], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail_now_and_then(rank: int, size: int, path: str, folder: str) -> dict[str, Any]:
    """Checkpoints of two trainers, at some of which the disk of one is full."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("tba").addHandler(handler)
    parts = open_trainer(path, rank, size)
    go_on(parts, 1)
    failures, present, whole = [], [], []
    with checkpoints_of(parts, path, Path(folder), keep=10, max_failures=2) as checkpointer:
        for step, without_room in enumerate((None, 1, None, 0, 1)):
            snapshot = state.take(parts, step)
            dist.barrier()
            with no_room(rank == without_room):
                checkpointer.write(snapshot, {}, due=set())
                checkpointer.wait()
                dist.barrier()
            failures.append(checkpointer.failures)
            whole.append(checkpointer.last_step)
            present.append([str(p.name) for p in sorted(Path(folder).glob("step-*"))])
    return {
        "failures": failures,
        "whole": whole,
        "num_failed": checkpointer.num_failed,
        "too_often": checkpointer.failed_too_often,
        "present": present,
        "lines": [line for line in lines if "checkpoint" in line],
    }


def test_a_trainer_without_room_costs_the_checkpoint_alone(tiny_llama, tmp_path) -> None:
    lead, other = run_ranks(fail_now_and_then, 2, tiny_llama, str(tmp_path))
    assert lead["failures"] == [0, 1, 0, 1, 2] and lead["num_failed"] == 3
    assert lead["too_often"] and lead["whole"] == [0, 0, 2, 2, 2]
    # at step 3 it may find its folder gone; it never counts more than trainer 0 does
    assert other["failures"][:3] == [0, 1, 0] and other["failures"][3] <= 1
    assert lead["present"] == [*[["step-0"]] * 2, *[["step-0", "step-2"]] * 3]
    first, own, last = lead["lines"]
    assert "step 1 could not be written (trainer 1: " in first and "training goes on" in first
    assert "(1 of checkpoint.max_failures=2 in a row)" in first and "(2 of" in last
    assert "step 3 could" in own and "trainer 1" not in own and other["lines"] == []
    for step in (0, 2):
        assert read_checkpoint(tmp_path / f"step-{step}").num_trainers == 2
    assert {p.name for p in tmp_path.iterdir()} == {"step-0", "step-2"}
    names = {p.name for p in (tmp_path / "step-2" / "state").iterdir()}
    assert names == {f"trainer-{t}.{kind}" for t in (0, 1) for kind in ("json", "safetensors")}


def test_too_many_failures_end_the_job(tiny_llama, tmp_path, caplog) -> None:
    parts = open_trainer(tiny_llama)
    (tmp_path / "checkpoints").write_text("a file where the folder should be")
    with checkpoints_of(parts, tiny_llama, tmp_path / "checkpoints", max_failures=2):
        for step in (1, 2):
            save(parts, step, wait=True)
        with pytest.raises(RuntimeError, match="2 checkpoints in a row.*checkpoint.max_failures"):
            save(parts, 3, wait=True)
    assert caplog.text.count("could not be written") == 2


def test_none_is_begun_while_the_last_is_being_written(
    tiny_llama, tmp_path, monkeypatch, caplog
) -> None:
    parts = open_trainer(tiny_llama)
    write_policy = checkpoint.write_policy

    def slowly(*args: Any, **options: Any) -> None:
        time.sleep(0.4)
        write_policy(*args, **options)

    monkeypatch.setattr(checkpoint, "write_policy", slowly)
    with checkpoints_of(parts, tiny_llama, tmp_path, keep=9) as checkpointer:
        save(parts, 1, wait=False)
        save(parts, 2, wait=False)
        assert checkpointer.busy, "the trainer waited for the disk"
        assert "no checkpoint at step 2" in caplog.text
        save(parts, 3, wait=True)  # the last of a job waits for the one before
    assert steps_in(tmp_path) == [1, 3] and not checkpointer.busy


# --------------------------------------------------------------------------- a process that dies


def write_and_stand_still(path: str, folder: Path, where: str, nth: int) -> None:
    """Writes two checkpoints of one step; the second one stops before the nth call of `where`."""
    parts = open_trainer(path)
    with checkpoints_of(parts, path, folder) as checkpointer:
        write(checkpointer, parts, 1)
        write(checkpointer, parts, 2)
        owner, name = {
            "file": (checkpoint, "save_file"),
            "digest": (checkpoint, "_describe"),
            "rename": (Path, "rename"),
            "remove": (checkpoint.shutil, "rmtree"),
        }[where]
        original, calls = getattr(owner, name), iter(range(1000))

        def stand_still(*args: Any, **options: Any) -> Any:
            if next(calls) == nth:
                (folder / "now").touch()
                time.sleep(600)
            return original(*args, **options)

        setattr(owner, name, stand_still)
        write(checkpointer, parts, 2)


DEATHS = {("file", 0), ("digest", 4), ("rename", 0), ("rename", 1), ("remove", 1)}


def test_a_process_that_is_killed_leaves_what_was_there(tiny_llama, tmp_path) -> None:
    context = multiprocessing.get_context("forkserver")
    children = {}
    for where, nth in sorted(DEATHS):
        folder = tmp_path / f"{where}-{nth}"
        children[folder] = context.Process(
            target=write_and_stand_still, args=(tiny_llama, folder, where, nth), daemon=True
        )
        children[folder].start()
    deadline = time.monotonic() + 120
    for folder, child in children.items():
        while not (folder / "now").exists():
            assert time.monotonic() < deadline and child.is_alive(), f"{folder} is not reached"
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    for folder in children:
        left = {p.name for p in folder.iterdir()} - {"now"}
        hidden = {name for name in left if name.startswith(".")}
        assert hidden and left - hidden <= {"step-1", "step-2"}, left
        for step in steps_in(folder):  # with or without a new start
            assert read_checkpoint(folder / f"step-{step}").step == step
        checkpoint.tidy(folder)
        assert {p.name for p in folder.iterdir()} == {"now", "step-1", "step-2"}
        found = newest(folder, lambda saved: None)
        assert found is not None and found.step == 2
    between = {p.name for p in (tmp_path / "rename-1").iterdir()}
    assert "step-2" in between, "the death between two renames was not repaired"


# --------------------------------------------------------------------------- reading

FILES = ["model.safetensors", "config.json", "trainer.json", "state/trainer-0.safetensors"]
FILES += ["state/trainer-0.json", "log_z_head.safetensors", "tokenizer.json"]


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named(copy, name) -> None:
    read_checkpoint(copy)
    path = copy / name
    data = path.read_bytes()
    rng = random.Random(0)
    for bit in (0, 8 * len(data) - 1, *(rng.randrange(8 * len(data)) for _ in range(8))):
        flip(path, bit)
        with pytest.raises(ValueError, match=f"{path} is damaged"):
            read_checkpoint(copy)
        path.write_bytes(data)
    for changed in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=f"{path} has {len(changed)} bytes"):
            read_checkpoint(copy)
    path.unlink()
    with pytest.raises(ValueError, match=f"{path} is missing"):
        read_checkpoint(copy)
    path.mkdir()
    with pytest.raises(ValueError, match=f"{path} is missing"):
        read_checkpoint(copy)
    path.rmdir()
    path.write_bytes(data)
    assert read_checkpoint(copy).step == 2


def test_every_changed_bit_of_the_manifest_is_noticed(copy) -> None:
    path = copy / "manifest.json"
    data, rng = path.read_bytes(), random.Random(0)
    for place in range(0, len(data), 2):
        flip(path, 8 * place + rng.randrange(8))
        with pytest.raises(ValueError, match=str(path)):
            read_checkpoint(copy)
        path.write_bytes(data)
    for end in range(0, len(data) - 2, 7):
        path.write_bytes(data[:end])
        with pytest.raises(ValueError, match=str(path)):
            read_checkpoint(copy)


def signed(manifest: dict[str, Any]) -> str:
    """As a program would write it that means to say this."""
    manifest.pop("digest", None)
    return json.dumps(manifest | {"digest": checkpoint._digest(manifest)})


def files_with(name: str, **entry: Any) -> Callable[[dict[str, Any]], None]:
    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][name] = {"bytes": 1, "blake2b": "0" * 32} | entry

    return change


def put(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: manifest.update(fields)


WRONG = {
    "no step": lambda m: m.pop("step"),
    "step as text": put(step="2"),
    "step below 0": put(step=-1),
    "step true": put(step=True),
    "step 1.5": put(step=1.5),
    "no trainer": put(num_trainers=0),
    "trainer true": put(num_trainers=True),
    "two trainers": put(num_trainers=2),
    "too many trainers": put(num_trainers=10**12),
    "far too many trainers": put(num_trainers=10**400),
    "other format": put(format=2),
    "format as text": put(format="1"),
    "about a list": put(about=[["base", "x"]]),
    "files a list": put(files=["config.json"]),
    "files null": put(files=None),
    "no files": put(files={}),
    "a file null": lambda m: m["files"].update({"config.json": None}),
    "infinite size": files_with("config.json", bytes=float("inf")),
    "size as text": files_with("config.json", bytes="1"),
    "huge size": files_with("config.json", bytes=10**400),
    "digest a number": files_with("config.json", blake2b=3),
    "a file says more": files_with("config.json", mode=3),
    "above": files_with("../step-2/config.json"),
    "absolute": files_with("/etc/passwd"),
    "the folder": files_with("."),
    "no name": files_with(""),
    "a zero in a name": files_with("a\0b"),
    "a long name": files_with("x" * 5000),
    "half a character": files_with("\ud800"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_manifest_that_says_something_wrong_is_refused(copy, name) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(signed(manifest))
    assert read_checkpoint(copy).step == 2
    WRONG[name](manifest)
    path.write_text(signed(manifest))
    with pytest.raises(ValueError, match="step-2"):
        read_checkpoint(copy)


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b'"x"', b"3", b"{}", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000],
)
def test_what_is_no_manifest_is_refused(copy, data) -> None:
    (copy / "manifest.json").write_bytes(data)
    with pytest.raises(ValueError, match="manifest.json can't be used"):
        read_checkpoint(copy)


def test_more_or_less_than_was_signed_is_refused(copy) -> None:
    path = copy / "manifest.json"
    manifest = json.loads(path.read_text())
    for changed in (manifest | {"more": 1}, {k: v for k, v in manifest.items() if k != "digest"}):
        path.write_text(json.dumps(changed))
        with pytest.raises(ValueError, match="manifest.json can't be used"):
            read_checkpoint(copy)
    path.unlink()
    with pytest.raises(ValueError, match="not a checkpoint: it has no manifest"):
        read_checkpoint(copy)
    path.mkdir()
    with pytest.raises(ValueError, match="manifest.json can't be used"):
        read_checkpoint(copy)


FUZZ = settings(
    max_examples=80,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@FUZZ
@given(
    st.sampled_from(["manifest.json", *FILES]),
    st.floats(0, 1),
    st.integers(0, 12),
    st.binary(max_size=12),
)
def test_any_change_of_any_bytes_is_an_error_of_one_kind(copy, name, place, cut, put_in) -> None:
    path = copy / name
    data = path.read_bytes()
    start = int(place * len(data))
    changed = data[:start] + put_in + data[start + cut :]
    path.write_bytes(changed)
    try:
        if changed == data:
            assert read_checkpoint(copy).step == 2
        elif name != "manifest.json" or changed.strip() != data.strip():
            with pytest.raises(ValueError, match=str(path)):
                read_checkpoint(copy)
    finally:
        path.write_bytes(data)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@FUZZ
@given(st.sampled_from(["step", "num_trainers", "files", "format", "entry", "size"]), JSON)
def test_any_value_in_a_manifest_is_an_error_of_one_kind(copy, where, value) -> None:
    path = copy / "manifest.json"
    text = path.read_text()
    manifest = json.loads(text)
    if where == "entry":
        manifest["files"]["config.json"] = value
    elif where == "size":
        manifest["files"]["config.json"]["bytes"] = value
    else:
        manifest[where] = value
    try:
        path.write_text(signed(manifest))
        saved = read_checkpoint(copy)
        assert where == "step" and saved.step == value or value == 1
    except ValueError as error:
        assert str(copy) in str(error)
    finally:
        path.write_text(text)


def several(whole: Path, folder: Path, *steps: int) -> Path:
    for step in steps:
        path = shutil.copytree(whole, folder / f"step-{step}")
        manifest = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(signed(manifest | {"step": step}))
    return folder


def test_the_newest_that_can_be_used_is_found(whole, tmp_path, caplog) -> None:
    assert newest(tmp_path / "none", lambda saved: None) is None
    folder = several(whole, tmp_path / "run", 9, 10, 101)
    (folder / "step-200.bak").mkdir()
    (folder / "step-x").mkdir()
    (folder / ".step-300.1.partial").mkdir()
    assert steps_in(folder) == [9, 10, 101]
    found = newest(folder, lambda saved: None)
    assert found is not None and found.step == 101 and caplog.text == ""
    flip(folder / "step-101" / "model.safetensors", 5000)
    found = newest(folder, lambda saved: None)
    assert found is not None and found.step == 10
    assert f"{folder}/step-101/model.safetensors is damaged" in caplog.text

    def of_another_model(saved: checkpoint.Checkpoint) -> None:
        if saved.step > 9:
            raise ValueError(f"{saved.folder} is of another model")

    found = newest(folder, of_another_model)
    assert found is not None and found.step == 9
    assert f"{folder}/step-10 is of another model" in caplog.text
    for step in (9, 10):
        (folder / f"step-{step}" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="step-101/model.safetensors is damaged"):
        newest(folder, lambda saved: None)


# --------------------------------------------------------------------------- keeping


@pytest.mark.parametrize(
    ("options", "last", "held_out", "due", "kept", "best"),
    [
        ({}, 50, {}, set(), {40, 50, 60}, None),
        ({"keep": 1}, 60, {}, set(), {60}, None),
        ({"keep": 9}, 60, {}, set(), {10, 20, 30, 40, 50, 60}, None),
        ({"keep": 1}, 60, {20: 0.7, 30: 0.9, 50: 0.1}, set(), {30, 60}, 30),
        ({"keep": 1}, 60, {20: 0.9, 30: 0.9}, set(), {30, 60}, 30),  # of equals the later one
        ({"keep": 1}, 60, {5: 0.9}, {40}, {40, 60}, None),  # its folder has gone
        ({"keep": 1}, 60, {60: 0.9}, {50}, {50, 60}, 60),
        ({"keep": 1, "keep_best": False}, 60, {20: 0.7}, {40}, {60}, None),
        # a run that passed over what it could not use: what it writes itself is what counts
        ({"keep": 1}, 30, {20: 0.7}, set(), {20, 30, 40, 50, 60}, 20),
    ],
)
def test_what_is_kept(tmp_path, options, last, held_out, due, kept, best) -> None:
    for step in range(10, 61, 10):
        (tmp_path / f"step-{step}").mkdir()
    figures = {step: {"reward": -value, "accuracy": value} for step, value in held_out.items()}
    prune(tmp_path, CheckpointConfig(**options), last, figures, due)
    assert set(steps_in(tmp_path)) == kept
    link = tmp_path / "best"
    assert (link.resolve().name if link.is_symlink() else None) == (best and f"step-{best}")


def test_the_best_by_reward_where_there_is_no_accuracy(tmp_path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step-{step}").mkdir()
    for better, figures in ((1, {1: 2.0, 2: 1.0}), (2, {1: 2.0, 2: 3.0})):
        held_out = {step: {"reward": value} for step, value in figures.items()}
        prune(tmp_path, CheckpointConfig(keep=3), 3, held_out, set())
        assert os.readlink(tmp_path / "best") == f"step-{better}"


def test_links_are_not_needed(tmp_path, monkeypatch) -> None:
    def refused(*args: Any, **options: Any) -> None:
        raise OSError("this file system has no links")

    monkeypatch.setattr(Path, "symlink_to", refused)
    (tmp_path / "step-1").mkdir()
    (tmp_path / "step-2").mkdir()
    prune(tmp_path, CheckpointConfig(keep=1), 2, {1: {"reward": 1.0}}, set())
    assert steps_in(tmp_path) == [1, 2]
