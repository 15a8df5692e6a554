"""Where a run is, and what it goes on from: its folder, what it says of itself, its checkpoint.

Trainer 0 decides (`open_run`), once the model and the data are known, and tells the others.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import socket
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf

import config
import model as modeling
from checkpoint import Checkpoint, newest, read_checkpoint, tidy
from comm import Control, broadcast_text

if TYPE_CHECKING:
    from train import Setup

logger = logging.getLogger("tba")

LOCK = "lock"
_held: list[IO[str]] = []  # lock files of this process, open until it ends


def open_run(setup: Setup) -> bool:
    """Decides on trainer 0 where the run is and what it goes on from; sets both in `setup`.

    Returns:
        False: the run that was to be resumed has ended already.

    Raises:
        UserError: a folder that can't be used, or a checkpoint that does not fit.
    """
    answer: dict[str, Any] = {}
    cfg = setup.cfg
    if setup.ranks.rank == 0:
        if cfg.resume == "auto":  # nobody else may write there from here on
            folder = claim_run_dir(cfg)
            saved = find_checkpoint(setup)
        else:
            saved = find_checkpoint(setup)
            folder = claim_run_dir(cfg)
        answer = {"folder": str(folder), "saved": None, "ended": False}
        if saved is not None:
            done = saved.step >= cfg.trainer.steps
            answer |= {"saved": str(saved.folder), "ended": done and has_ended(folder, saved.step)}
            groups = saved.completed() // saved.about["responses_per_prompt"]
            answer |= {"step": saved.step, "num_trainers": saved.num_trainers}
            answer |= {"about": dict(saved.about), "completed": groups.tolist()}
    answer = json.loads(broadcast_text(json.dumps(answer)))
    setup.run_dir = Path(answer["folder"])
    if answer["saved"] is not None:
        setup.saved = Checkpoint(
            folder=Path(answer["saved"]),
            step=answer["step"],
            num_trainers=answer["num_trainers"],
            about=answer["about"],
        )
        # now: trainers that go on may remove the checkpoint before an engine has started
        setup.completed = np.array(answer["completed"], dtype=np.int64)
    if setup.ranks.rank == 0:
        logger.info("run folder: %s", setup.run_dir)
        if answer["ended"]:
            logger.info("the run has ended already, at step %d", answer["step"])
        elif setup.saved is not None:
            logger.info("going on from %s", setup.saved.folder)
    return not answer["ended"]


def has_ended(folder: Path, step: int) -> bool:
    """Whether a run of `step` steps has written its summary."""
    try:
        return json.loads((folder / "summary.json").read_text())["steps"] == step
    except (OSError, ValueError, LookupError, TypeError):
        return False


def heed_stop_file(setup: Setup, control: Control) -> None:
    """What a stop file means that is there before training begins.

    A job that was started by hand, or by Slurm, removes what stopped the one before. One that
    torchrun started again, because that one did not exit with 0, stops too.
    """
    path = Path(setup.cfg.run.stop_file or setup.run_dir / "stop")
    try:
        found = path.stat()
    except OSError:
        return
    if not path.is_file() or (setup.cfg.run.stop_file and found.st_size):  # something else's
        raise config.UserError(f"run.stop_file={path} is not an empty file: remove it")
    if found.st_mtime >= time.time() - (time.monotonic() - setup.started):
        return  # it is for this job: the trainers' loop will see it
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        control.stop(f"{path} is there")
    path.unlink()


def find_checkpoint(setup: Setup) -> Checkpoint | None:
    """What `resume` says to go on from, found whole and fitting; None: nothing.

    Raises:
        UserError: there is no such checkpoint, or none that can be used.
    """
    cfg = setup.cfg

    def check(saved: Checkpoint) -> None:
        mine = description(setup)
        for key, what in (
            ("model", "another model (model.*)"),
            ("prompts", "other training problems (task.*, model.tokenizer, seed)"),
            ("trained", "another set of trained weights (trainer.lora.*, trainer.log_z_lr)"),
            ("data", "responses of another origin (mode, data)"),
        ):
            if saved.about.get(key) != mine[key]:
                raise ValueError(
                    f"{saved.folder} is of {what}: {saved.about.get(key)}, not {mine[key]}"
                )

    if cfg.resume == "none":
        return None
    folder = Path(cfg.run.root) / cfg.run.name if cfg.resume == "auto" else Path(cfg.resume)
    try:
        if cfg.resume == "auto":
            tidy(folder / "checkpoints")
        if cfg.resume == "auto" or (folder / "checkpoints").is_dir():
            found = newest(folder / "checkpoints", check)
        else:
            found = read_checkpoint(folder)
            check(found)
    except ValueError as error:
        raise config.UserError(f"resume={cfg.resume}: {error}") from error
    if cfg.resume != "auto":
        if found is None:
            raise config.UserError(f"resume={cfg.resume}: no checkpoint in {folder}/checkpoints")
        if found.step == cfg.trainer.steps:  # a run of its own would have nothing to do
            raise too_few_steps(cfg, found)
    if found is not None and found.step > cfg.trainer.steps:
        if cfg.resume != "auto" or not has_ended(folder, found.step):
            raise too_few_steps(cfg, found)
    return found


def too_few_steps(cfg: DictConfig, saved: Checkpoint) -> config.UserError:
    """The error that there is nothing to go on to."""
    return config.UserError(
        f"resume={cfg.resume}: {saved.folder} has {saved.step} steps already: raise "
        f"trainer.steps={cfg.trainer.steps}"
    )


def description(setup: Setup) -> dict[str, Any]:
    """What a checkpoint says of its run; one that resumes it must be the same."""
    cfg = setup.cfg
    digest = hashlib.blake2b(digest_size=8)
    for tokens in setup.prompt_tokens:
        digest.update(tokens.tobytes() + b"|")
    lora = cfg.trainer.lora.rank
    return {
        "model": modeling.architecture(setup.path, trust_remote_code=cfg.model.trust_remote_code),
        "prompts": f"{len(setup.prompt_tokens)} prompts, {digest.hexdigest()}",
        "trained": {"lora_rank": lora, "log_z_head": cfg.trainer.log_z_lr is not None},
        "responses_per_prompt": cfg.searcher.responses_per_prompt,
        "mode": cfg.mode,
        "data": setup.data_digest,
    }


def claim_run_dir(cfg: DictConfig) -> Path:
    """Creates the run folder, for this job alone; with `resume=auto` it may hold a run.

    Raises:
        UserError: it holds a run, another job is writing there, or it can't be written.
    """
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    loss = str(cfg.loss._target_).rpartition(".")[2]
    task = re.sub(r"\W", "", str(cfg.task._target_).rpartition(".")[2]).lower()
    name = cfg.run.name or f"{stamp}-{task}-{cfg.model.name}-{loss}-{cfg.mode}-seed{cfg.seed}"
    folder = Path(cfg.run.root) / name
    try:
        if cfg.run.name is None:  # another one that began in the same second has the name
            taken = itertools.count(2)
            while folder.exists():
                folder = folder.with_name(f"{name}-{next(taken)}")
        folder.mkdir(parents=True, exist_ok=True)
        if cfg.resume != "auto" and any(path.name != LOCK for path in folder.iterdir()):
            raise config.UserError(
                f"run.name={name!r}: {folder} holds a run already; choose another name, or go on "
                "with it by resume=auto"
            )
        _held.append(hold(folder))
    except OSError as error:
        raise config.UserError(f"run.root={cfg.run.root!r} can't be written: {error}") from error
    return folder


def record_start(cfg: DictConfig, folder: Path, saved: Checkpoint | None) -> None:
    """Saves the resolved config, the command and the git commit: the run begins, or goes on.

    What an earlier start has written there is kept beside, with a number.

    Args:
        saved: what the run goes on from.
    """
    starts = len(list(folder.glob("origin*.json")))
    for name in ("config.yaml", "origin.json", "summary.json"):
        path = folder / name
        if path.exists():
            path.rename(path.with_name(f"{path.stem}.{starts}{path.suffix}"))
    shown = OmegaConf.create(config.hide_secrets(OmegaConf.to_container(cfg, resolve=True)))
    OmegaConf.save(shown, folder / "config.yaml")
    origin = {
        "command": config.hide_in_command(sys.argv),
        "commit": git_commit(),
        "world_size": dist.get_world_size(),
        "resumed_from": None if saved is None else str(saved.folder),
    }
    (folder / "origin.json").write_text(json.dumps(origin, indent=2) + "\n")


def hold(folder: Path) -> IO[str]:
    """Makes the folder this process's own until it closes the file, or ends, however it does.

    The lock belongs to the process and not to the file (`lockf`): a child that outlives a killed
    job does not hold it. Where a file system has no locks, nothing is held.

    Raises:
        UserError: another job is writing there.
    """
    file = open(folder / LOCK, "a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            logger.warning("%s can't be locked (%s): start no second job there", folder, error)
            return file
        with file:
            file.seek(0)
            raise config.UserError(
                f"another job is writing into {folder} ({file.read().strip()}): wait until it has "
                "ended, or choose another run.name"
            ) from error
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file


def git_commit() -> str | None:
    """The commit of this code, if it lies in a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
