"""The entry: check the config, split the ranks, run this rank's role, leave cleanly.

    torchrun --nproc_per_node=2 train.py                                   # the laptop demo
    torchrun --nproc_per_node=8 train.py task=gsm8k model=rho1b            # 1 trainer, 7 searchers
    python train.py engine=hf                                              # one process, lock-step
    python train.py mode=offline data=runs/<name>                          # no searcher at all
    torchrun ... train.py run.name=<name> resume=auto                      # go on where it stopped

Exit code 0 after a whole run; 2 for a mistake in the config or the data; 1 if a rank failed, with
the reason printed once by the first that did; 75 if it was told to stop (SIGTERM, SIGUSR1, or the
file `stop` in its folder) and can be resumed; 130 after Ctrl-C.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before torch: no C++ frames at a lost peer

import dataclasses
import logging
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import hydra
import numpy as np
import torch
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException
from hydra.types import RunMode
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

import config
import model as modeling
import offline
import state
import weights_vllm
from accounting import make_accounting
from buffer import Buffer
from checkpoint import (
    ADAPTER_FOLDER,
    Checkpoint,
    CheckpointConfig,
    Checkpointer,
)
from checks import check_loss, check_objective, check_rule
from comm import (
    Channel,
    Control,
    Ranks,
    derived_key,
    init_world,
    ranks_from_environment,
)
from engine import (
    EngineDied,
    EngineOptions,
    HFEngine,
    VLLMEngine,
    check_heads,
    engine_port,
    make_engine,
    pin_process,
)
from events import EventLog
from lora import add_adapters, load_adapter
from meeting import count_restart
from metrics import IdleClock, Metrics, escape_control, setup_logging
from offline import TrajectoryWriter
from parallel import ParallelConfig, any_rank, shard
from replay import replay
from rewards import Scorer, equal_rewards_warning, make_scorer
from run_folder import description, heed_stop_file, open_run, record_start
from schedules import linear_at
from searcher import SearcherParts, explores, search
from shards import make_gathering_group
from tasks.task import Problem, Task, check_problems, check_task, fit_prompts
from trainer import Arrivals, Evaluator, TrainerParts, train
from weights import Publisher

NUM_PROBES = 4  # prompts whose log-probs engine and trainer compare


@dataclass(slots=True, kw_only=True)
class Setup:
    """What every rank works out before its role begins."""

    cfg: DictConfig
    ranks: Ranks
    path: str  # of the model
    tokenizer: PreTrainedTokenizerBase
    task: Task
    problems: list[Problem]
    prompt_tokens: list[np.ndarray]
    held_out: list[Problem]
    held_out_tokens: list[np.ndarray]
    max_model_len: int
    device: torch.device
    engine_dtype: torch.dtype
    cores: list[int]
    started: float
    run_dir: Path = Path()  # decided after all the rest
    saved: Checkpoint | None = None  # to go on from
    completed: np.ndarray | None = None  # int64 [problems]: groups of each, before a resumption
    data_digest: str | None = None  # of `data`, in mode=offline

    @property
    def lockstep(self) -> bool:
        return self.cfg.mode == "sync"

    @property
    def searches(self) -> bool:
        """Whether the job has searchers."""
        return config.searches(self.cfg)

    @property
    def sharded(self) -> bool:
        """Whether the trainers share one policy."""
        return self.parallel.sharded(self.ranks.num_trainers)

    @property
    def parallel(self) -> ParallelConfig:
        return ParallelConfig(**self.cfg.trainer.parallel)

    @property
    def compute_dtype(self) -> torch.dtype | None:
        """Of the policy's and the reference's forward passes; None: float32, as they are stored."""
        return torch.bfloat16 if self.cfg.trainer.precision == "bfloat16" else None

    @property
    def layout(self) -> modeling.Layout:
        """Of the policy's and the reference's forward passes."""
        cfg = self.cfg.trainer
        return modeling.Layout(
            packed=cfg.packing.attention != "off",
            share_prompts=cfg.packing.share_prompts,
            chunk_tokens=cfg.logprobs.chunk_tokens,
            chunk_vocabulary=cfg.logprobs.chunk_vocabulary,
        )

    @property
    def probe_tokens(self) -> list[np.ndarray]:
        """Fixed sequences of at least two tokens, the same on every rank."""
        return [tokens for tokens in self.prompt_tokens if len(tokens) > 1][:NUM_PROBES]

    @property
    def restart_timeout_s(self) -> float:
        """What the news of an engine's restart may take; 0: engines are not restarted."""
        restartable = self.cfg.engine.name == "vllm" and self.cfg.engine.max_restarts > 0
        if not restartable or self.weights_backend == weights_vllm.BACKEND:
            return 0.0
        return self.cfg.cluster.timeout_s

    @property
    def weights_backend(self) -> str:
        if self.cfg.weights.backend != "auto":
            return self.cfg.weights.backend
        return "nccl" if self.device.type == "cuda" else "gloo"


def run(cfg: DictConfig, *, started: float) -> None:
    """One rank's whole life."""
    if cfg.mode == "replay":
        cfg = config.recorded(cfg)
    if cfg.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before CUDA starts
        torch.use_deterministic_algorithms(True)
    ranks = ranks_from_environment(
        cfg.cluster.trainers,
        searching=config.searches(cfg),
        tp=max(cfg.searcher.tp, 1),  # checked below
    )
    setup_logging(ranks.name())
    disable_progress_bar()  # transformers' own, one a rank
    config.validate(cfg, ranks)
    init_world(ranks, timeout_s=cfg.cluster.startup_timeout_s)
    control = Control.start(
        ranks,
        timeout_s=cfg.cluster.timeout_s,
        heartbeat_timeout_s=cfg.cluster.heartbeat_timeout_s,
        startup_timeout_s=cfg.cluster.startup_timeout_s,
    )
    end_on_signals(control)
    try:
        control.progress("preparing model and data", cfg.cluster.startup_timeout_s)
        setup = prepare(cfg, ranks, started)
        trainers = dist.new_group(list(range(ranks.num_trainers)), backend=trainer_backend(setup))
        gathering = None
        if setup.sharded and setup.searches:
            gathering = make_gathering_group(ranks.num_trainers, setup.weights_backend)
        goes_on = open_run(setup)
        if ranks.rank == 0:
            heed_stop_file(setup, control)
        if goes_on:
            run_role(setup, control, trainers, gathering)
        control.progress("leaving", cfg.cluster.startup_timeout_s)  # trainer 0 saves the policy
        dist.barrier()
    except config.UserError as error:
        control.fail(str(error), code=2)
    except SystemExit as error:  # of code of the user's: with 0 it would look like a good end
        control.fail(f"something called sys.exit({error.code})", detail=traceback.format_exc())
    except BaseException as error:
        control.fail(f"{type(error).__name__}: {error}", detail=traceback.format_exc())
    control.close()
    dist.destroy_process_group()


def end_on_signals(control: Control) -> None:
    """Ctrl-C ends the job at once, wherever its main thread is; SIGTERM and SIGUSR1 ask it to stop.

    Python runs signal handlers in the main thread, between bytecodes: not while it waits inside a
    collective. The byte that the interpreter's own handler writes to a pipe wakes a thread.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def watch() -> None:
        while data := os.read(read, 1):
            if data[0] == signal.SIGINT:
                control.fail("interrupted (Ctrl-C)", code=130)
            control.request_stop(signal.Signals(data[0]).name)

    threading.Thread(target=watch, name="signals", daemon=True).start()


def prepare(cfg: DictConfig, ranks: Ranks, started: float) -> Setup:
    """Model folder, tokenizer, data and limits; the checks that need them.

    Raises:
        UserError: a model, file or limit that does not fit, with the key to change.
    """
    device = pick_device(cfg, ranks)
    if cfg.weights.backend == weights_vllm.BACKEND:
        try:
            weights_vllm.check_device(device)
        except ValueError as error:
            raise config.UserError(str(error)) from error
    attention = cfg.trainer.packing.attention
    if device.type == "cpu" and attention in ("flex", "varlen"):
        raise config.UserError(
            f"trainer.packing.attention={attention} needs a GPU: set it to auto or segments"
        )
    pinned = cfg.cluster.pin_cores and device.type == "cpu"
    cores = ranks.cores() if pinned else []
    try:
        data_digest = None
        if cfg.mode == "offline":
            data_digest = offline.digest(config.data_paths(cfg))
        task = instantiate(config.task_node(cfg))
        check_task(task)  # what is wrong should fail before an engine starts
        problems, held_out = task.problems("train"), task.problems("test")
        check_problems(problems, "train")
        check_problems(held_out, "test")
        build = instantiate(cfg.model.build) if cfg.model.build is not None else None
        if ranks.local_rank == 0:
            modeling.resolve_path(cfg.model, build)  # one rank a node builds what is missing
        dist.barrier()
        path = modeling.resolve_path(cfg.model, build)
        trust = cfg.model.trust_remote_code
        modeling.check_causal(path, trust_remote_code=trust)
        tokenizer = modeling.load_tokenizer(cfg.model.tokenizer or path, trust_remote_code=trust)
        modeling.check_tokenizer(
            path, tokenizer, given=cfg.model.tokenizer, trust_remote_code=trust
        )
        problems, prompt_tokens = fit(cfg, tokenizer, task, problems, "training")
        held_out = held_out[: cfg.eval.num_problems]
        held_out, held_out_tokens = fit(cfg, tokenizer, task, held_out, "held-out")
        modeling.check_prompt_ids(path, [*prompt_tokens, *held_out_tokens], trust_remote_code=trust)
        config.check_num_problems(cfg, ranks, len(problems))
        check_heads(path, ranks.tp, trust_remote_code=trust)
        max_model_len = config.check_lengths(
            cfg,
            [*prompt_tokens, *held_out_tokens],
            modeling.context_length(path, trust_remote_code=trust),
        )
        check_loss(cfg)
        check_rule(cfg)
    except InstantiationException as error:  # what a task's or model's constructor said
        raise config.UserError(str(error.__cause__ or error)) from error
    except (ValueError, OSError) as error:
        raise config.UserError(str(error)) from error
    if cores:
        torch.set_num_threads(len(set(cores)))
    return Setup(
        cfg=cfg,
        ranks=ranks,
        path=path,
        tokenizer=tokenizer,
        task=task,
        problems=problems,
        prompt_tokens=prompt_tokens,
        held_out=held_out,
        held_out_tokens=held_out_tokens,
        max_model_len=max_model_len,
        device=device,
        engine_dtype=engine_dtype(cfg, device),
        cores=cores,
        started=started,
        data_digest=data_digest,
    )


def fit(
    cfg: DictConfig,
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    problems: Sequence[Problem],
    what: str,
) -> tuple[list[Problem], list[np.ndarray]]:
    """Problems to use, with their prompts' tokens, int32 [P]; says how many prompts were too long.

    Args:
        what: the problems' name in the log.
    """
    fitted = fit_prompts(
        tokenizer,
        problems,
        task=task,
        max_tokens=cfg.task.max_prompt_tokens,
        long_prompts=cfg.task.long_prompts,
    )
    if fitted.num_shortened or fitted.num_dropped:
        if int(os.environ.get("RANK", 0)) == 0:
            logging.getLogger("tba").warning(
                "%d of %d %s prompts have more than task.max_prompt_tokens=%d tokens: %d were "
                "shortened, %d left out (task.long_prompts=%s)",
                *(fitted.num_shortened + fitted.num_dropped, fitted.num_given, what),
                *(cfg.task.max_prompt_tokens, fitted.num_shortened, fitted.num_dropped),
                cfg.task.long_prompts,
            )
    return fitted.problems, [np.array(tokens, dtype=np.int32) for tokens in fitted.tokens]


def pick_device(cfg: DictConfig, ranks: Ranks) -> torch.device:
    """This rank's own device."""
    wanted = cfg.cluster.device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if count == 0:
        raise config.UserError(
            "cluster.device=cuda, but torch finds no GPU: set cluster.device=cpu"
        )
    if ranks.local_world_size > count:
        raise config.UserError(
            f"{ranks.local_world_size} ranks on this node but {count} GPUs: start {count} ranks "
            "(--nproc_per_node), or set cluster.device=cpu"
        )
    device = torch.device("cuda", ranks.local_rank)
    if not ranks.is_companion:  # the memory of a companion's device is all the engine's
        torch.cuda.set_device(device)
    return device


def engine_dtype(cfg: DictConfig, device: torch.device) -> torch.dtype:
    """The engines' dtype: as configured, or by device."""
    if cfg.engine.dtype != "auto":
        return modeling.DTYPES[cfg.engine.dtype]
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def trainer_backend(setup: Setup) -> str:
    """Backend of the trainers' own group; gradients in host memory are added up by gloo."""
    if setup.device.type != "cuda":
        return "gloo"
    return "cpu:gloo,cuda:nccl" if setup.cfg.trainer.parallel.cpu_offload else "nccl"


# --------------------------------------------------------------------------- roles


def run_role(
    setup: Setup,
    control: Control,
    trainers: dist.ProcessGroup | None,
    gathering: dist.ProcessGroup | None,
) -> None:
    """This rank's part in the job.

    Args:
        trainers: the trainers' group, for their main threads.
        gathering: the group of a sharded policy's trainers, for their publishers' threads.
    """
    if not setup.searches:
        parts = build_trainer(setup, control, None, trainers)
        if setup.cfg.mode == "replay":
            run_replay(setup, parts)
        else:
            load_data(setup, parts)
            run_trainer(setup, parts)
        return
    ranks = setup.ranks
    channel = Channel(
        ranks,
        max_outstanding=setup.cfg.searcher.max_outstanding,
        key=control.key,
        on_error=control.fail,
    )
    if ranks.world_size == 1:
        run_both(setup, control, channel, trainers, gathering)
        return
    if not ranks.is_trainer:
        control.stoppable = True  # the trainers look for requests to stop
    if ranks.is_trainer:
        run_trainer(setup, build_trainer(setup, control, channel, trainers, gathering))
    elif ranks.is_companion:
        control.wait_for(f"the end of searcher {ranks.searcher_index}")
    else:
        run_searcher(setup, build_searcher(setup, control, channel))
        control.announce(f"the end of searcher {ranks.searcher_index}")


def build_trainer(
    setup: Setup,
    control: Control,
    channel: Channel | None,
    group: dist.ProcessGroup | None,
    gathering: dist.ProcessGroup | None = None,
) -> TrainerParts:
    """Policy, optimizer, buffer, publisher (on trainer 0, or all of a sharded policy) and metrics.

    Without a channel there are no searchers: nothing is published, trainers evaluate.
    """
    cfg, ranks, run_dir = setup.cfg, setup.ranks, setup.run_dir
    first_step = 0 if setup.saved is None else setup.saved.step
    if setup.cores and ranks.world_size > 1:
        pin_process(os.getpid(), setup.cores)
    sharing = group if setup.sharded else None
    policy = load_model(setup, sharing, trained=True)
    if cfg.trainer.gradient_checkpointing:
        policy.gradient_checkpointing_enable({"use_reentrant": False})
        modeling.disable_dropout(policy)
        policy.train()  # transformers checkpoints activations in train mode only
    groups: list[dict[str, Any]] = [{"params": [p for p in policy.parameters() if p.requires_grad]}]
    log_z_head = None
    if cfg.trainer.log_z_lr is not None:
        hidden_size = policy.config.get_text_config().hidden_size
        log_z_head = modeling.LogZHead(hidden_size).to(setup.device)
        rate = cfg.trainer.log_z_lr
        groups.append({"params": list(log_z_head.parameters()), "lr": rate, "weight_decay": 0.0})
    optimizer = torch.optim.AdamW(
        groups,
        lr=cfg.trainer.lr.peak,
        betas=tuple(cfg.trainer.adam_betas),
        weight_decay=cfg.trainer.weight_decay,
        fused=True,  # one pass over the memory; on CPU a fifth of the default's time
    )
    lead = ranks.rank == 0
    publisher = (
        make_publisher(setup, control, policy, sharing, gathering)
        if (lead or setup.sharded) and channel is not None
        else None
    )
    metrics = (
        Metrics(
            run_dir,
            total_steps=cfg.trainer.steps,
            first_step=first_step,
            log_every_s=cfg.run.log_every_s,
        )
        if lead
        else None
    )
    accounting = make_accounting(
        policy,
        dtype=setup.compute_dtype or policy.dtype,
        profile_folder=run_dir / "profile" if cfg.trainer.profile else None,
        name=f"trainer-{ranks.rank}",
        total_steps=cfg.trainer.steps - first_step,
    )
    checkpointer = None
    if cfg.mode != "replay":
        checkpointer = Checkpointer(
            run_dir / "checkpoints",
            CheckpointConfig(**cfg.checkpoint),
            model=policy,
            tokenizer=setup.tokenizer,
            control=control,
            about=description(setup),
        )
    writer = make_writer(setup) if channel is not None else None
    return TrainerParts(
        ranks=ranks,
        control=control,
        channel=channel,
        policy=policy,
        optimizer=optimizer,
        objective=instantiate(cfg.loss),
        buffer=make_buffer(setup),
        recency=make_recency(setup),
        tokenizer=setup.tokenizer,
        prompts=[problem.prompt for problem in setup.problems],
        temperature=cfg.searcher.temperature,
        probe_tokens=setup.probe_tokens,
        group=group if ranks.num_trainers > 1 or setup.sharded else None,
        publisher=publisher,
        metrics=metrics,
        run_dir=run_dir,
        started=setup.started,
        reference=load_model(setup, sharing) if cfg.trainer.reference_reset_every else None,
        log_z_head=log_z_head,
        layout=setup.layout,
        autocast=None if setup.sharded else setup.compute_dtype,
        clock=IdleClock(mark=accounting.mark),
        accounting=accounting,
        checkpointer=checkpointer,
        stop_file=Path(cfg.run.stop_file or run_dir / "stop") if lead else None,
        writer=writer,
        events=None
        if writer is None
        else EventLog(run_dir / "events" / f"trainer-{ranks.rank}.jsonl"),
        evaluator=make_evaluator(setup, control, policy) if cfg.mode == "offline" else None,
        arrivals=Arrivals(completed=np.zeros(len(setup.problems), dtype=np.int64)),
    )


def make_publisher(
    setup: Setup,
    control: Control,
    policy: PreTrainedModel,
    trainers: dist.ProcessGroup | None,
    gathering: dist.ProcessGroup | None,
) -> Publisher:
    """This trainer's end of the way to the engines.

    Args:
        trainers: those that share the policy; None: it is whole.
        gathering: the same, for the publishers' threads.
    """
    cfg, ranks = setup.cfg, setup.ranks
    options: dict[str, Any] = {
        "host": control.host,
        "port": control.port,
        "key": derived_key(control.key, "weights"),
        "num_workers": ranks.num_searchers * ranks.tp,
        "dtype": setup.engine_dtype,
        "bucket_bytes": cfg.weights.bucket_mb << 20,
        "timeout_s": cfg.cluster.timeout_s,
        "meeting_timeout_s": cfg.cluster.startup_timeout_s,
    }
    if setup.weights_backend == weights_vllm.BACKEND:
        return weights_vllm.VLLMPublisher(policy, num_engines=ranks.num_searchers, **options)
    options |= {"trainers": trainers, "gathering": gathering}
    options["restart_timeout_s"] = setup.restart_timeout_s
    return Publisher(policy, backend=setup.weights_backend, **options)


def make_recency(setup: Setup) -> Callable[[int], float]:
    """m of a step: always 1 in lock-step, 0 offline, where nothing arrives."""
    cfg = setup.cfg.buffer
    if setup.lockstep or setup.cfg.mode == "offline":
        return lambda step: 1.0 if setup.lockstep else 0.0
    return partial(
        linear_at,
        initial=cfg.recency_prob,
        final=cfg.recency_prob if cfg.recency_prob_final is None else cfg.recency_prob_final,
        target_step=cfg.recency_prob_target_step or setup.cfg.trainer.steps,
    )


def make_writer(setup: Setup) -> TrajectoryWriter | None:
    """What keeps the trajectories that arrive at this trainer, if they are to be kept."""
    if not setup.cfg.run.save_trajectories:
        return None
    path = setup.run_dir / "trajectories" / f"trainer-{setup.ranks.rank}.traj"
    return TrajectoryWriter(path)


def make_evaluator(setup: Setup, control: Control, policy: PreTrainedModel) -> Evaluator:
    """Greedy generation with the policy itself, on this trainer's share of the problems."""
    share = slice(setup.ranks.rank, None, setup.ranks.num_trainers)
    return Evaluator(
        engine=HFEngine(setup.cfg.engine, engine_options(setup), model=policy),
        parallel=setup.parallel,
        task=setup.task,
        scorer=build_scorer(setup, control),
        measures=setup.cfg.eval.measures,
        problems=setup.held_out[share],
        prompt_tokens=setup.held_out_tokens[share],
        max_response_tokens=setup.cfg.task.max_response_tokens,
    )


def load_data(setup: Setup, parts: TrainerParts) -> None:
    """Reads the saved trajectories of `data` into the buffers: `mode=offline`.

    Raises:
        UserError: a file can't be used, its prompts are too few for a draw, or the objective
            needs what the data lacks.
    """
    cfg, ranks = setup.cfg, setup.ranks
    parts.control.progress("reading data", cfg.cluster.startup_timeout_s)
    try:
        data = offline.load(
            config.data_paths(cfg),
            setup.tokenizer,
            chat=setup.task.chat,
            max_prompt_tokens=cfg.task.max_prompt_tokens,
            max_response_tokens=cfg.task.max_response_tokens,
            vocab_size=parts.policy.config.get_text_config().vocab_size,
        )
        mine = offline.share(data.trajectories, ranks.rank, ranks.num_trainers)
        parts.buffer.add(mine)
        prompts_per_draw = config.prompts_per_step(cfg) // ranks.num_trainers
        if not parts.buffer.ready(prompts_per_draw):
            raise ValueError(
                f"data={cfg.data}: {ranks.name()} has fewer prompts with two responses than "
                f"the {prompts_per_draw} of a draw: lower trainer.batch_size, or give more data"
            )
        learned = parts.log_z_head is not None
        check_objective(cfg, parts.objective, mine, learned=learned)
    except ValueError as error:
        raise config.UserError(str(error)) from error
    if ranks.rank == 0:
        logging.getLogger("tba").info("%s", data.summary())
    if len({t.reward for t in mine}) == 1:
        logging.getLogger("tba").warning("%s", equal_rewards_warning(mine[0].reward, len(mine)))
    kept = parts.buffer.num_trajectories
    if kept < len(mine):
        logging.getLogger("tba").warning(
            "%d of this trainer's %d responses are in the buffer (%d are duplicates; see "
            "buffer.capacity_per_prompt, buffer.max_tokens and buffer.deduplicate)",
            *(kept, len(mine), parts.buffer.num_duplicates),
        )
    sharing = parts.group if setup.sharded else None
    lacking = any(t.reference_version != 0 for t in mine)
    if parts.reference is None and any_rank(lacking, sharing, setup.device):
        parts.reference = load_model(setup, sharing)


def run_trainer(setup: Setup, parts: TrainerParts) -> None:
    """Trains, from the checkpoint on if there is one; the progress line is put away in any case.

    Raises:
        UserError: the checkpoint does not fit.
    """
    cfg = setup.cfg
    if setup.saved is not None:
        parts.control.progress("opening the checkpoint", cfg.cluster.startup_timeout_s)
        try:
            state.restore(
                parts, setup.saved, responses_per_prompt=cfg.searcher.responses_per_prompt
            )
        except ValueError as error:
            raise config.UserError(f"resume={cfg.resume}: {error}") from error
        if cfg.resume == "auto" and parts.checkpointer is not None:
            parts.checkpointer.last_step = setup.saved.step
        missing = sorted(parts.totals.evaluations_due - {setup.saved.step})
        if missing and setup.ranks.rank == 0:
            logging.getLogger("tba").warning(
                "the evaluation of steps %s had not ended when the run did, and is not made again: "
                "evaluate.py makes up for it, on their checkpoints",
                missing,
            )
    if setup.ranks.rank == 0:
        record_start(cfg, setup.run_dir, setup.saved)
    if parts.events is not None:
        assert parts.writer is not None
        parts.events.started(
            parts.first_step,
            trainers=setup.ranks.num_trainers,
            record=parts.writer.num_records,
        )
    try:
        train(
            cfg.trainer,
            parts,
            evaluation=cfg.eval,
            initial_trajectories=cfg.buffer.initial_trajectories,
            lockstep=setup.lockstep,
            probe_every=cfg.weights.probe_every,
            rollouts_every=cfg.run.rollouts_every,
            checkpoint_every=cfg.checkpoint.every,
        )
    finally:
        if parts.metrics is not None:
            parts.metrics.close()


def run_replay(setup: Setup, parts: TrainerParts) -> None:
    """Repeats a recorded run's training.

    Raises:
        UserError: the record is incomplete.
    """
    parts.control.progress("reading the recorded run", setup.cfg.cluster.startup_timeout_s)
    if setup.ranks.rank == 0:
        record_start(setup.cfg, setup.run_dir, None)
    try:
        replay(setup.cfg.trainer, parts, Path(setup.cfg.data))
    except (ValueError, OSError) as error:
        raise config.UserError(f"data={setup.cfg.data}: {error}") from error
    finally:
        if parts.metrics is not None:
            parts.metrics.close()


def make_buffer(setup: Setup) -> Buffer:
    """The rank's replay buffer; in lock-step it holds exactly the round just generated."""
    cfg = setup.cfg.buffer
    return Buffer(
        capacity_per_prompt=cfg.capacity_per_prompt,
        max_tokens=cfg.max_tokens,
        deduplicate=cfg.deduplicate and not setup.lockstep,
        recency_prob=1.0 if setup.lockstep else cfg.recency_prob,
        eviction=cfg.eviction,
        max_staleness=cfg.max_staleness,
        max_uses=setup.cfg.trainer.max_reuse,
        prompt_priority=cfg.prompt_priority,
        prompt_temperature=cfg.prompt_temperature,
        fill_groups=cfg.fill_groups,
        rule=instantiate(cfg.rule),
        seed=setup.cfg.seed * 1009 + setup.ranks.rank,
    )


def load_model(
    setup: Setup, trainers: dist.ProcessGroup | None = None, *, trained: bool = False
) -> PreTrainedModel:
    """Policy (a checkpoint's, if there is one) or reference in float32, ready for its layout.

    Args:
        trainers: shard it over these ranks, each of which must call it; None: a copy of its own.
        trained: with adapters and compiled layers, if so configured.

    Raises:
        UserError: it can't be opened, or read packed rows, have the adapters, or be compiled.
    """
    adapted = trained and setup.cfg.trainer.lora.rank
    saved = setup.saved if trained else None
    try:
        model = modeling.load_policy(
            setup.path if saved is None or adapted else str(saved.folder),
            device=setup.device if trainers is None else torch.device("cpu"),
            dtype=torch.float32,
            trust_remote_code=setup.cfg.model.trust_remote_code,
        )
    except ValueError as error:
        raise config.UserError(str(error)) from error
    if adapted:
        try:
            add_adapters(model, setup.cfg.trainer.lora, seed=setup.cfg.seed)
            if saved is not None:
                load_adapter(saved.folder / ADAPTER_FOLDER, model)
        except ValueError as error:
            raise config.UserError(str(error)) from error
    if trainers is not None:
        shard(
            model,
            trainers,
            setup.parallel,
            device=setup.device,
            compute_dtype=setup.compute_dtype,
        )
    if setup.layout.packed:
        attention = setup.cfg.trainer.packing.attention
        try:
            modeling.prepare_for_packing(model, attention, compute_dtype=setup.compute_dtype)
        except ValueError as error:
            raise config.UserError(f"trainer.packing: {error}") from error
    if trained and setup.cfg.trainer.compile:
        try:
            modeling.compile_layers(model)
        except ValueError as error:
            raise config.UserError(str(error)) from error
    return model


def engine_options(setup: Setup) -> EngineOptions:
    """What an engine of this rank needs to know."""
    cfg, ranks, saved = setup.cfg, setup.ranks, setup.saved
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("MASTER_PORT", "")
    return EngineOptions(
        path=setup.path,
        stop_token_ids=modeling.stop_token_ids(setup.path, setup.tokenizer),
        pad_token_id=int(setup.tokenizer.pad_token_id),
        max_model_len=setup.max_model_len,
        dtype=setup.engine_dtype,
        device=setup.device,
        # a resumed run samples anew, what it sampled before it was saved is not to come again
        seed=cfg.seed * 10_007 + 1 + ranks.searcher_index + 7919 * (saved.step if saved else 0),
        tp=ranks.tp,
        vllm_transfer=setup.weights_backend == weights_vllm.BACKEND,
        cores=setup.cores,
        port=engine_port(ranks.local_rank, job),
        trust_remote_code=cfg.model.trust_remote_code,
        policy_temperature=cfg.searcher.temperature if explores(cfg.searcher) else None,
        hang_timeout_s=config.hang_timeout_s(cfg),
    )


def build_scorer(setup: Setup, control: Control) -> Scorer:
    """What scores this rank's responses."""
    node: Any = OmegaConf.to_container(config.task_node(setup.cfg), resolve=True)
    scorer = make_scorer(setup.task, node, setup.cfg.rewards, device=setup.device)
    control.cleanups.append(scorer.kill)
    return scorer


def build_searcher(setup: Setup, control: Control, channel: Channel) -> SearcherParts:
    """The engine, started and listening for weights, the reference and the prompts."""
    cfg, ranks = setup.cfg, setup.ranks
    engine = start_engine(setup, control)
    reference = None if cfg.trainer.reference_reset_every else load_model(setup)
    if setup.cores and ranks.world_size > 1:
        pin_process(os.getpid(), setup.cores)
    scorer = build_scorer(setup, control)
    join_weights(setup, control, engine)
    share = slice(ranks.searcher_index, None, ranks.num_searchers)
    completed = setup.completed
    if completed is None:
        completed = np.zeros(len(setup.problems), dtype=np.int64)
    return SearcherParts(
        ranks=ranks,
        control=control,
        channel=channel,
        engine=engine,
        reference=reference,
        autocast=setup.compute_dtype,
        layout=setup.layout,
        tokenizer=setup.tokenizer,
        task=setup.task,
        scorer=scorer,
        problems=setup.problems,
        prompt_tokens=setup.prompt_tokens,
        held_out=setup.held_out[share],
        held_out_tokens=setup.held_out_tokens[share],
        probe_tokens=setup.probe_tokens,
        max_logprob_gap=cfg.weights.max_logprob_gap,
        eval_measures=cfg.eval.measures,
        max_response_tokens=cfg.task.max_response_tokens,
        seed=cfg.seed,
        completed=completed,
        deterministic=cfg.deterministic,
        restart_engine=engine_restarter(setup, control, engine),
        max_engine_restarts=cfg.engine.max_restarts if setup.restart_timeout_s else 0,
    )


def start_engine(setup: Setup, control: Control, restarts: int = 0) -> VLLMEngine | HFEngine:
    """This searcher's engine, on its cores, ended when the job is.

    Args:
        restarts: of this searcher's engine so far; each samples with a seed of its own.
    """
    control.progress("starting the engine", setup.cfg.cluster.startup_timeout_s)
    options = engine_options(setup)
    options = dataclasses.replace(options, seed=options.seed + 1000 * restarts)
    try:
        engine = make_engine(setup.cfg.engine, options)
    except ValueError as error:
        raise config.UserError(str(error)) from error
    control.cleanups.append(engine.kill)
    engine.on_step = control.alive
    if setup.cores and setup.ranks.world_size > 1:
        engine.pin(setup.cores)
    return engine


def join_weights(setup: Setup, control: Control, engine: VLLMEngine | HFEngine) -> None:
    """Lets the engine receive weights."""
    cfg, ranks = setup.cfg, setup.ranks
    control.progress("meeting the trainer for weights", cfg.cluster.startup_timeout_s)
    engine.join_weights(
        host=control.host,
        port=control.port,
        key=derived_key(control.key, "weights"),
        rank=1 + ranks.searcher_index * ranks.tp,
        size=1 + ranks.num_searchers * ranks.tp,
        backend=setup.weights_backend,
        bucket_bytes=cfg.weights.bucket_mb << 20,
        timeout_s=cfg.cluster.startup_timeout_s,
        restart_timeout_s=setup.restart_timeout_s,
    )


def engine_restarter(
    setup: Setup, control: Control, engine: VLLMEngine | HFEngine
) -> Callable[[int], VLLMEngine | HFEngine]:
    """What puts another engine in the place of a dead one (`SearcherParts.restart_engine`).

    Args:
        engine: the first one.
    """

    def restart(restarts: int) -> VLLMEngine | HFEngine:
        nonlocal engine
        engine.kill()
        if engine.kill in control.cleanups:  # not if the last restart has failed half-way
            control.cleanups.remove(engine.kill)
        # First, so that trainer 0 and the other engines leave the group of the dead one meanwhile.
        key = derived_key(control.key, "weights")
        count_restart(control.host, control.port, timeout_s=control.timeout_s, key=key)
        engine = start_engine(setup, control, restarts)
        join_weights(setup, control, engine)
        return engine

    return restart


def run_searcher(setup: Setup, parts: SearcherParts) -> None:
    """Searches until the final version, then closes the engine."""
    cfg: Any = OmegaConf.to_object(setup.cfg.searcher)  # plain: it is read for every prompt
    search(
        cfg,
        parts,
        prompts_in_flight=config.prompts_in_flight(setup.cfg, setup.ranks),
        lockstep=setup.lockstep,
        between=cfg.update == "between",
    )
    parts.scorer.close()
    # Its workers stay in the weights' group while another searcher's engine may be restarted.
    limit = parts.control.startup_timeout_s
    parts.control.progress("waiting for the other searchers", limit)
    with suppress(EngineDied):
        parts.engine.leave_weights(limit)
    parts.control.progress("closing the engine")
    parts.engine.close()


def run_both(
    setup: Setup,
    control: Control,
    channel: Channel,
    trainers: dist.ProcessGroup | None,
    gathering: dist.ProcessGroup | None,
) -> None:
    """A world of one rank: the same two loops in lock-step, the searcher's in a thread."""
    searcher = build_searcher(setup, control, channel)
    trainer = build_trainer(setup, control, channel, trainers, gathering)

    def target() -> None:
        try:
            run_searcher(setup, searcher)
        except BaseException as error:
            control.fail(f"{type(error).__name__}: {error}", detail=traceback.format_exc())

    thread = threading.Thread(target=target, name="searcher", daemon=True)
    thread.start()
    run_trainer(setup, trainer)
    thread.join()


# --------------------------------------------------------------------------- entry


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(cfg: DictConfig) -> None:
    if HydraConfig.get().mode == RunMode.MULTIRUN and "RANK" in os.environ:
        # the second run would meet what the first left in the store of torchrun's agent, and hang
        say_once(
            "--multirun works without torchrun only: start one torchrun a run, as launch/ does"
        )
        sys.exit(2)
    overrides = HydraConfig.get().overrides.task
    alone = "RANK" not in os.environ and not any(o.startswith("mode=") for o in overrides)
    if alone and cfg.mode == "async":
        print("one process (no torchrun): mode=sync", file=sys.stderr)
        cfg.mode = "sync"
    try:
        OmegaConf.set_readonly(cfg, True)
        run(cfg, started=STARTED)
    except ValueError as error:  # before the ranks have met: a mistake that all of them see
        say_once(str(error))
        sys.exit(2)


def say_once(message: str) -> None:
    """Prints a user's mistake on rank 0 alone; the others give it the time to."""
    try:
        speaks = ranks_from_environment(1, searching=False).rank == 0
    except ValueError:
        speaks = True  # it may be this that is wrong
    if speaks:
        print(f"error: {escape_control(message)}", file=sys.stderr, flush=True)
    else:
        time.sleep(5.0)


if __name__ == "__main__":
    STARTED = time.monotonic()
    os.environ["HYDRA_FULL_ERROR"] = "1"  # raise to us instead of printing a traceback a rank
    config.register()
    try:
        main()
    except (HydraException, OmegaConfBaseException, ValueError) as error:  # the last: Hydra's too
        overrides = [arg for arg in sys.argv[1:] if not arg.startswith("-")]
        say_once(config.explain(error, overrides))
        sys.exit(2)
