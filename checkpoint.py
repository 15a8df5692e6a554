"""Checkpoints: a Hugging Face folder of the policy, and in it everything to go on from there.

    checkpoints/step-N/   config.json, *.safetensors, tokenizer    transformers and vLLM open it
                          trainer.json                             step and held-out figures
                          adapter/, log_z_head.safetensors         where there are any
                          state/trainer-T.{safetensors,json}       of each trainer (state.py)
                          state/config.yaml                        of the run
                          manifest.json                            size and digest of every file

`Checkpointer` writes them in a background thread: beside, then renamed, so that a folder with a
manifest is whole. `newest` finds the one to resume from, and passes over what is damaged.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lora import adapter_weights, save_adapter
from model import LogZHead
from parallel import full
from weights import named_weights

if TYPE_CHECKING:
    from comm import Control
    from state import Snapshot

logger = logging.getLogger("tba")

FORMAT = 1  # of manifest.json and of what it lists
STATE_FOLDER = "state"
MANIFEST = "manifest.json"
COMPLETED = "completed"  # int64 [problems]: responses to each prompt that have arrived
LOG_Z_FILE = "log_z_head.safetensors"
ADAPTER_FOLDER = "adapter"  # of low-rank adapters alone, in peft's format


@dataclass
class CheckpointConfig:
    """When everything is saved, and how much of it is kept."""

    every: int = 100  # steps between two checkpoints; 0: only at the end, or when told to stop
    keep: int = 2  # newest ones that are kept
    keep_best: bool = True  # besides, the one with the best held-out figures
    max_failures: int = 3  # in a row, of a full disk say; then the job ends


def save_policy(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    *,
    log_z_head: LogZHead | None = None,
    weights: PolicyState | None = None,
) -> Path:
    """Writes weights (safetensors), tokenizer and `trainer.json` beside `folder`, then renames.

    A crash while writing leaves the previous folder as it was. transformers and vLLM open it as it
    is, however many trainers there were: adapters are merged into the weights, and saved besides in
    a folder of their own.

    Args:
        weights: from `whole_state`; None: those of `model`, which is not sharded.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    weights = weights or whole_state(model, keep=True)
    assert weights is not None
    write_policy(
        beside,
        model,
        tokenizer,
        state,
        weights,
        log_z_head=None if log_z_head is None else log_z_head.state_dict(),
    )
    _rename(beside, folder)
    return folder


def write_policy(
    folder: Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    state: Mapping[str, Any],
    weights: PolicyState,
    *,
    log_z_head: Mapping[str, Tensor] | None,
) -> None:
    """The files of `save_policy` in a folder that exists. Of `model` only its config is read."""
    model.save_pretrained(folder, state_dict=weights.policy)
    if weights.adapter:
        save_adapter(folder / ADAPTER_FOLDER, model, weights.adapter)
    tokenizer.save_pretrained(folder)
    if log_z_head is not None:
        save_file(dict(log_z_head), folder / LOG_Z_FILE)
    (folder / "trainer.json").write_text(json.dumps(dict(state), indent=2) + "\n")


def _rename(beside: Path, folder: Path) -> None:
    """Puts a whole folder in its place, on the disk too; what was there before goes last."""
    previous = folder.with_name(f".{folder.name}.previous")
    shutil.rmtree(previous, ignore_errors=True)
    if folder.exists():
        folder.rename(previous)
    beside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def _sync(folder: Path) -> None:
    """The names in a folder are on the disk when this returns."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


@dataclass(slots=True, kw_only=True)
class PolicyState:
    """All that is saved of a policy, in host memory."""

    policy: dict[str, Tensor]  # parameters, adapters merged into them, and buffers
    adapter: dict[str, Tensor]  # adapters alone, in peft's names; empty without


def whole_state(model: PreTrainedModel, *, keep: bool, copy: bool = False) -> PolicyState | None:
    """Gathers what is saved of a policy; every rank of a sharded model must call it.

    Args:
        keep: on this rank; the others only take part.
        copy: into memory that training does not change, for a thread that writes it.

    Returns:
        None where it is not kept.
    """
    buffers = {name for name, _ in model.named_buffers()}
    stored = ((n, full(x)) for n, x in model.state_dict().items() if n in buffers)
    state: PolicyState = PolicyState(policy={}, adapter={})
    for name, weight in chain(named_weights(model), stored):
        if keep:  # a merged weight is float32
            dtype = model.dtype if weight.is_floating_point() else weight.dtype
            state.policy[name] = weight.detach().to("cpu", dtype, copy=copy)
    for name, matrix in adapter_weights(model, full):
        if keep:
            state.adapter[name] = matrix.detach().to("cpu", copy=copy)
    return state if keep else None


def load_log_z_head(folder: Path) -> LogZHead:
    """The log Z head that was saved with a policy.

    Raises:
        ValueError: there is none in the folder.
    """
    path = folder / LOG_Z_FILE
    if not path.is_file():
        raise ValueError(f"{path} does not exist: the policy was not trained with a log Z head")
    state = load_file(path)
    head = LogZHead(state["linear.weight"].shape[1])
    head.load_state_dict(state)
    return head


# --------------------------------------------------------------------------- writing


class Checkpointer:
    """A trainer's end of writing checkpoints, one at a time, in a thread of its own.

    Consumes: a `Snapshot` of every trainer, handed to `write` after the same step. Produces:
    `checkpoints/step-N`. Waits for: trainer 0's thread for the other trainers' files, up to
    `timeout_s`; they say through the control store that theirs are written, or why not. Ends:
    `wait`. A failure is logged, counted by `failures`, and leaves no folder; the main thread ends
    the job when there were too many in a row.
    """

    def __init__(
        self,
        folder: Path,
        cfg: CheckpointConfig,
        *,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        control: Control,
        about: Mapping[str, Any],
    ) -> None:
        """
        Args:
            folder: of all checkpoints of the run; the trainers share it.
            about: what the manifest says of the run besides, plain JSON (`Checkpoint.about`).
        """
        self.failures = 0  # in a row
        self.num_failed = 0
        self.last_s = 0.0  # seconds that the last one took
        self.last_step: int | None = None  # of the last one that is whole (trainer 0)
        self._folder, self._cfg, self._about = folder, cfg, dict(about)
        self._model, self._tokenizer = model, tokenizer
        self._control, self._rank = control, control.ranks.rank
        self._num_trainers = control.ranks.num_trainers
        self._count = 0  # of all that were begun, the same on every trainer
        self._thread: threading.Thread | None = None

    @property
    def failed_too_often(self) -> bool:
        """Whether `checkpoint.max_failures` in a row have failed."""
        return self.failures >= self._cfg.max_failures

    @property
    def busy(self) -> bool:
        """Whether the last one is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(
        self, snapshot: Snapshot, held_out: Mapping[int, Mapping[str, float]], *, due: set[int]
    ) -> None:
        """Begins to write; what was begun before must have ended.

        Args:
            held_out: by version, figures of the held-out problems known so far.
            due: versions whose evaluation is under way; their checkpoints are kept for it.
        """
        assert not self.busy
        self._count += 1
        known = {version: dict(means) for version, means in held_out.items()}
        self._thread = threading.Thread(
            target=self._run, args=(snapshot, known, set(due)), name="checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, *, on_wait: Callable[[], None] = lambda: None) -> None:
        """Until what was begun has been written, or has failed."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(timeout=0.5)
            on_wait()

    def path(self, step: int) -> Path:
        """The folder of a step's checkpoint."""
        return self._folder / f"step-{step}"

    def _run(
        self, snapshot: Snapshot, held_out: dict[int, dict[str, float]], due: set[int]
    ) -> None:
        begun = time.monotonic()
        beside = self._folder / f".step-{snapshot.step}.{self._count}.partial"
        try:
            if self._rank == 0:  # another trainer may have gone on writing one that has failed
                tidy(self._folder, but=beside)
            (beside / STATE_FOLDER).mkdir(parents=True, exist_ok=True)
            own = _write_state(beside, snapshot, self._rank)
            if self._rank != 0:
                self._tell("written", own)
                self.failures = 0
                return
            assert snapshot.policy is not None
            state = {"step": snapshot.step, "held_out": held_out.get(snapshot.step)}
            write_policy(
                beside,
                self._model,
                self._tokenizer,
                state,
                snapshot.policy,
                log_z_head=snapshot.log_z_head,
            )
            config = self._folder.with_name("config.yaml")
            if config.is_file():
                shutil.copyfile(config, beside / STATE_FOLDER / config.name)
            self._finish(beside, snapshot.step, own)
            prune(self._folder, self._cfg, snapshot.step, held_out, due)
            self.failures, self.last_step = 0, snapshot.step
            self.last_s = time.monotonic() - begun
        except Exception as error:  # safetensors raises its own kind where the disk is full
            self.failures += 1
            self.num_failed += 1
            if self._rank != 0:
                self._tell("failed", str(error))
                return
            shutil.rmtree(beside, ignore_errors=True)
            logger.error(
                "the checkpoint of step %d could not be written (%s); training goes on without it "
                "(%d of checkpoint.max_failures=%d in a row)",
                *(snapshot.step, error, self.failures, self._cfg.max_failures),
            )

    def _finish(self, beside: Path, step: int, own: dict[str, Any]) -> None:
        """Trainer 0: waits for the others' files, writes the manifest, puts the folder in place."""
        files = dict(own)
        for rank in range(1, self._num_trainers):
            answer = json.loads(self._control.ask(f"checkpoint/{self._count}/{rank}"))
            if "failed" in answer:
                raise OSError(f"{self._control.ranks.name(rank)}: {answer['failed']}")
            files |= answer["written"]
        for path in sorted(beside.rglob("*")):
            name = str(path.relative_to(beside))
            if path.is_file() and name not in files:
                files[name] = _describe(path)
        manifest = {
            "format": FORMAT,
            "step": step,
            "num_trainers": self._num_trainers,
            "about": self._about,
            "files": files,
        }
        manifest["digest"] = _digest(manifest)
        with (beside / MANIFEST).open("w") as file:
            file.write(json.dumps(manifest, indent=1) + "\n")
            file.flush()
            os.fsync(file.fileno())
        for folder in (*(path for path in beside.rglob("*") if path.is_dir()), beside):
            _sync(folder)
        _rename(beside, self.path(step))
        _sync(self._folder.parent)

    def _tell(self, what: str, value: Any) -> None:
        self._control.tell(f"checkpoint/{self._count}/{self._rank}", json.dumps({what: value}))


def _write_state(folder: Path, snapshot: Snapshot, rank: int) -> dict[str, Any]:
    """One trainer's two files; what the manifest is to say of them."""
    tensors, info = (
        folder / STATE_FOLDER / f"trainer-{rank}.{kind}" for kind in ("safetensors", "json")
    )
    save_file(snapshot.tensors, tensors)
    info.write_text(json.dumps(snapshot.info) + "\n")
    return {f"{STATE_FOLDER}/{path.name}": _describe(path) for path in (tensors, info)}


def _describe(path: Path) -> dict[str, Any]:
    """Size and digest of a file, which is on the disk when this returns."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "blake2b": digest}


def _digest(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest says, to be kept with it."""
    text = json.dumps(manifest, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def tidy(folder: Path, but: Path | None = None) -> None:
    """Removes what a process that died has left half-way, or undoes it; `but` is being written."""
    for path in folder.glob(".step-*"):
        if path == but:
            continue
        if path.name.endswith(".previous") and not folder.joinpath(path.name[1:-9]).exists():
            path.rename(folder / path.name[1:-9])  # it died between two renames
        else:
            shutil.rmtree(path, ignore_errors=True)


def prune(
    folder: Path,
    cfg: CheckpointConfig,
    newest_step: int,
    held_out: Mapping[int, Mapping[str, float]],
    due: set[int],
) -> None:
    """Removes checkpoints but the newest, the best, and those that may turn out to be it.

    `best` is a link to the best one: by accuracy, or by reward where there is none.

    Args:
        newest_step: of the last one that was written; later ones, which a resumed run has passed
            over, count for nothing, and are left until they are written anew.
        held_out: by version, figures of the held-out problems.
        due: versions whose evaluation is under way.
    """
    steps = [step for step in steps_in(folder) if step <= newest_step]
    kept = set(steps[-cfg.keep :])
    if cfg.keep_best:
        kept |= due
        scored = [(_score(held_out[step]), step) for step in steps if step in held_out]
        if scored:
            best = max(scored)[1]
            kept.add(best)
            link = folder / ".best"
            with suppress(OSError):  # a file system without links
                link.unlink(missing_ok=True)
                link.symlink_to(f"step-{best}")
                link.rename(folder / "best")
    for step in steps:
        if step not in kept:
            shutil.rmtree(folder / f"step-{step}", ignore_errors=True)


def _score(figures: Mapping[str, float]) -> float:
    return figures.get("accuracy", figures["reward"])


# --------------------------------------------------------------------------- reading


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint to go on from; its files were found whole."""

    folder: Path
    step: int  # optimizer steps done
    num_trainers: int
    about: Mapping[str, Any]  # what `Checkpointer` was told of the run

    @property
    def tensors(self) -> list[Path]:
        """The trainers' files of tensors, by rank."""
        return [self._state(rank, "safetensors") for rank in range(self.num_trainers)]

    @property
    def infos(self) -> list[Path]:
        """The trainers' other files, by rank."""
        return [self._state(rank, "json") for rank in range(self.num_trainers)]

    def completed(self) -> np.ndarray:
        """Responses to each training problem that had arrived, int64 [problems]."""
        total: Any = 0
        for path in self.tensors:
            with safe_open(path, "np") as file:
                total = total + file.get_tensor(COMPLETED)
        return total

    def _state(self, rank: int, kind: str) -> Path:
        return self.folder / STATE_FOLDER / f"trainer-{rank}.{kind}"


def steps_in(folder: Path) -> list[int]:
    """Steps of the checkpoints in a folder, whole or damaged, oldest first."""
    found = (re.fullmatch(r"step-(\d+)", path.name) for path in folder.glob("step-*"))
    return sorted(int(match[1]) for match in found if match)


def read_checkpoint(folder: Path) -> Checkpoint:
    """Reads the manifest and compares every file with it.

    Raises:
        ValueError: there is no manifest, or a file is missing, cut, or changed; it is named.
    """
    path = folder / MANIFEST
    try:
        saved, files = _read_manifest(path)
    except FileNotFoundError as error:
        raise ValueError(f"{folder} is not a checkpoint: it has no {MANIFEST}") from error
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} can't be used: {error!r}") from error
    for state in (*saved.tensors, *saved.infos):
        if str(state.relative_to(folder)) not in files:
            raise ValueError(f"{path} is damaged: it does not list {state.name}")
    for name, expected in files.items():
        file = folder / name
        if ".." in Path(name).parts or Path(name).is_absolute():
            raise ValueError(f"{path} is damaged: it names {name}")
        try:
            if not file.is_file():
                raise ValueError(f"{file} is missing")
            if file.stat().st_size != expected["bytes"]:
                raise ValueError(
                    f"{file} has {file.stat().st_size} bytes instead of {expected['bytes']}"
                )
            if _describe(file) != expected:
                raise ValueError(f"{file} is damaged: its digest is not the manifest's")
        except OSError as error:
            raise ValueError(f"{file} can't be read: {error}") from error
    return saved


def _read_manifest(path: Path) -> tuple[Checkpoint, dict[str, dict[str, Any]]]:
    """What a manifest says, and its files by name; whatever is wrong with it is raised."""
    manifest = json.loads(path.read_text(encoding="utf-8"))
    version = manifest["format"]
    if version != FORMAT:
        raise ValueError(f"format {version}, this program reads {FORMAT}")
    digest = manifest.pop("digest")
    if digest != _digest(manifest):
        raise ValueError("it has been changed")
    step, num_trainers = manifest["step"], manifest["num_trainers"]
    about, files = manifest["about"], manifest["files"]
    if type(step) is not int or step < 0 or not isinstance(about, dict):
        raise ValueError(f"step {step!r}, about {about!r}")
    if type(num_trainers) is not int or not 1 <= num_trainers <= len(files):
        raise ValueError(f"trainers {num_trainers!r}, {len(files)} files")
    for name, file in files.items():
        if {key: type(value) for key, value in file.items()} != {"bytes": int, "blake2b": str}:
            raise ValueError(f"of {name} it says {file!r}")
    saved = Checkpoint(folder=path.parent, step=step, num_trainers=num_trainers, about=about)
    return saved, files


def newest(folder: Path, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole and passes `check`; the others are named in the log.

    Args:
        folder: `checkpoints` of a run.
        check: raises ValueError for one that does not fit.

    Returns:
        None if there is no checkpoint at all.

    Raises:
        ValueError: there are some, and none can be used; the newest one's reason is given.
    """
    first: ValueError | None = None
    for step in reversed(steps_in(folder)):
        try:
            saved = read_checkpoint(folder / f"step-{step}")
            check(saved)
            return saved
        except ValueError as error:
            logger.warning("passing over a checkpoint: %s", error)
            first = first or error
    if first is not None:
        raise first
    return None
