"""The config tree, and `validate`: every error that can be known before a model loads.

Each part's dataclass lives beside the code that it configures and holds its defaults; this file
composes them. The yaml files under conf/ hold choices. Unknown keys fail, with the nearest key.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, get_args

import numpy as np
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException, OverrideParseException
from omegaconf import MISSING, DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

import weights_vllm
from checkpoint import CheckpointConfig
from comm import ClusterConfig, Ranks
from engine import EngineConfig, check_engine
from evaluate import EvalConfig
from lora import check_lora
from model import DTYPES, ModelConfig
from packing import ATTENTIONS
from parallel import ParallelConfig
from rewards import RewardConfig
from schedules import beta_at, lr_at
from searcher import SearcherConfig
from tasks.task import LongPrompts
from trainer import TrainerConfig, beta_schedule, lr_schedule
from weights import WeightsConfig


class UserError(ValueError):
    """A mistake in the config, a file or a model; its message names the key and the fix."""


@dataclass
class BufferConfig:
    """What the trainers keep and how they draw from it (arXiv 2503.18929, section 4.2)."""

    rule: Any = MISSING  # `_target_` of a sampling rule in buffer.py, `_partial_`
    recency_prob: float = 0.5  # m: share of prompts drawn from what the last publication brought
    recency_prob_final: float | None = None  # m falls or rises to it on a line; null: constant
    recency_prob_target_step: int | None = None  # where the line ends; null: the last step
    capacity_per_prompt: int = 100
    max_tokens: int = 100_000_000  # per trainer
    deduplicate: bool = True  # one copy of equal responses to a prompt (never in mode=sync)
    eviction: str = "oldest"  # oldest | lowest_reward: what goes first when a bound is reached
    max_staleness: int | None = None  # steps; older responses are forgotten, and waited for
    # Prompts outside of the recency window: none (in turn) | reward_variance | difficulty
    prompt_priority: str = "none"
    prompt_temperature: float = 1.0  # of difficulty: weight exp(-mean reward / this)
    fill_groups: bool = False  # fewer than K responses: repeat some (the paper), or a smaller group
    initial_trajectories: int = 500  # responses in the buffers before the first step, over all


@dataclass
class RunConfig:
    """What a run leaves, and where."""

    root: str = "runs"
    name: str | None = None  # null: date, task, model and loss
    rollouts_every: int = 25  # steps between two samples written for reading; 0: none
    save_trajectories: bool = False  # every one that arrives, for mode=offline and mode=replay
    # A file: when it appears, the job saves everything and stops. null: `stop` in the run's folder
    stop_file: str | None = None
    log_every_s: float = 10.0  # between progress lines in a log file


@dataclass
class Config:
    """Everything; see `python train.py --cfg job`."""

    # async | sync (generate, train and publish in lock-step) | offline (no searcher, see `data`) |
    # replay (the trainers of a recorded run once more, see `data`)
    mode: str = "async"
    # mode=offline: a run folder, *.traj or *.jsonl files, or a list of them; mode=replay: a run
    # folder
    data: Any = None
    # none | auto (the newest whole checkpoint of run.name, else from the beginning) | a checkpoint,
    # or a run folder, for a run of its own that goes on from there
    resume: str = "none"
    deterministic: bool = False  # mode=sync: the same run again gives the same metrics
    seed: int = 0
    task: Any = MISSING
    loss: Any = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    searcher: SearcherConfig = field(default_factory=SearcherConfig)
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunConfig = field(default_factory=RunConfig)


_HYDRA_KEYS = ("_target_", "_partial_", "_convert_", "_recursive_", "_args_")


def register() -> None:
    """Makes the dataclasses known to Hydra under the name that conf/config.yaml refers to."""
    ConfigStore.instance().store(name="schema", node=Config)


def prompts_per_step(cfg: DictConfig) -> int:
    """Prompts in one optimizer step, over all trainers."""
    return cfg.trainer.batch_size // cfg.trainer.responses_per_prompt


def searches(cfg: DictConfig) -> bool:
    """Whether the job has searchers."""
    return cfg.mode in ("async", "sync")


def prompts_in_flight(cfg: DictConfig, ranks: Ranks) -> int:
    """Prompts under way at once at one searcher; in lock-step, its share of a round."""
    if cfg.mode == "sync":
        return prompts_per_step(cfg) * cfg.trainer.publish_every // ranks.num_searchers
    return cfg.searcher.prompts_in_flight


def hang_timeout_s(cfg: DictConfig) -> float:
    """Seconds without an answer after which an engine hangs."""
    if cfg.engine.hang_timeout_s is not None:
        return cfg.engine.hang_timeout_s
    return 0.4 * cfg.cluster.timeout_s


def validate(cfg: DictConfig, ranks: Ranks) -> None:
    """Checks that need no model and no data.

    Raises:
        ValueError: one line that names the key and the fix.
    """
    _check_keys(cfg)
    _one_of("mode", cfg.mode, ("async", "sync", "offline", "replay"))
    _one_of("buffer.eviction", cfg.buffer.eviction, ("oldest", "lowest_reward"))
    _one_of(
        "buffer.prompt_priority",
        cfg.buffer.prompt_priority,
        ("none", "reward_variance", "difficulty"),
    )
    _one_of("trainer.precision", cfg.trainer.precision, ("float32", "bfloat16"))
    _one_of("engine.dtype", cfg.engine.dtype, ("auto", *DTYPES))
    _one_of("cluster.device", cfg.cluster.device, ("auto", "cpu", "cuda"))
    _one_of("searcher.update", cfg.searcher["update"], ("inflight", "between"))
    _one_of("engine.kv_after_update", cfg.engine.kv_after_update, ("recompute", "keep"))
    _one_of("weights.backend", cfg.weights.backend, ("auto", "gloo", "nccl", "vllm_nccl"))
    _one_of("trainer.lr.kind", cfg.trainer.lr.kind, ("wsd", "linear", "constant"))
    _positive(
        cfg,
        "trainer.steps",
        "trainer.batch_size",
        "trainer.responses_per_prompt",
        "trainer.lr.peak",
        "trainer.publish_every",
        "trainer.tokens_per_micro_batch",
        "trainer.logprobs.chunk_tokens",
        "trainer.logprobs.chunk_vocabulary",
        "searcher.tp",
        "searcher.responses_per_prompt",
        "searcher.prompts_in_flight",
        "searcher.temperature",
        "searcher.max_outstanding",
        "searcher.reference_tokens_per_micro_batch",
        "buffer.capacity_per_prompt",
        "buffer.max_tokens",
        "buffer.prompt_temperature",
        "cluster.trainers",
        "cluster.timeout_s",
        "cluster.heartbeat_timeout_s",
        "cluster.startup_timeout_s",
        "engine.max_num_seqs",
        "engine.kv_cache_gb",
        "engine.gpu_memory_utilization",
        "weights.bucket_mb",
        "weights.probe_every",
        "weights.max_logprob_gap",
        "searcher.top_p",
        "checkpoint.keep",
        "checkpoint.max_failures",
    )
    _not_negative(
        cfg,
        "seed",
        "trainer.weight_decay",
        "trainer.lr.warmup_steps",
        "trainer.lr.decay_steps",
        "trainer.reference_reset_every",
        "buffer.initial_trajectories",
        "searcher.score_every_s",
        "engine.max_restarts",
        "run.rollouts_every",
        "run.log_every_s",
        "trainer.max_skipped_steps",
        "checkpoint.every",
    )
    for key in (
        "engine.hang_timeout_s",
        "trainer.max_grad_norm",
        "trainer.log_z_lr",
        "buffer.recency_prob_target_step",
        "buffer.max_staleness",
        "searcher.max_response_seconds",
        "trainer.max_reuse",
    ):
        if OmegaConf.select(cfg, key) is not None:
            _positive(cfg, key)
    if cfg.buffer.recency_prob_final is not None:
        _within("buffer.recency_prob_final", cfg.buffer.recency_prob_final, 0.0, 1.0)
    _within("searcher.top_p", cfg.searcher.top_p, 0.0, 1.0)
    _within("buffer.recency_prob", cfg.buffer.recency_prob, 0.0, 1.0)
    _within("engine.gpu_memory_utilization", cfg.engine.gpu_memory_utilization, 0.0, 1.0)
    _within("trainer.lr.min_ratio", cfg.trainer.lr.min_ratio, 0.0, 1.0)
    betas = cfg.trainer.adam_betas
    if len(betas) != 2 or not all(0.0 <= beta < 1.0 for beta in betas):
        raise ValueError(f"trainer.adam_betas={betas} must be two numbers from 0 to below 1")
    if cfg.seed >= 2**31:
        raise ValueError(f"seed={cfg.seed} must be below {2**31}")
    _check_run_folder(cfg)
    _check_exploration(cfg)
    _check_evaluation(cfg)
    _check_rewards(cfg)
    _check_hang_timeout(cfg)
    _check_ranks(cfg, ranks)
    _check_data(cfg)
    _check_resume(cfg, ranks)
    _check_bounds(cfg)
    _check_batches(cfg, ranks)
    check_engine(cfg.engine.name)
    _check_targets(cfg)
    _check_packing(cfg)
    _check_parallel(cfg, ranks)
    check_lora(cfg.trainer.lora)
    _check_schedules(cfg)


def validate_evaluation(cfg: DictConfig) -> None:
    """Checks of `evaluate.py` that need no model and no data; of its own keys alone.

    Raises:
        ValueError: one line that names the key and the fix.
    """
    _check_keys(cfg)
    _not_negative(cfg, "seed")
    _check_evaluation(cfg)
    _check_rewards(cfg)
    _check_task(cfg)
    if cfg.eval.responses is not None:
        if cfg.eval.out is None:
            raise ValueError("eval.responses needs eval.out=<file> for the graded responses")
        if os.path.realpath(cfg.eval.responses) == os.path.realpath(cfg.eval.out):
            raise ValueError(f"eval.out={cfg.eval.out} would overwrite eval.responses: rename it")
        return
    _one_of("engine.dtype", cfg.engine.dtype, ("auto", *DTYPES))
    _one_of("cluster.device", cfg.cluster.device, ("auto", "cpu", "cuda"))
    _positive(
        cfg,
        "searcher.temperature",
        "cluster.timeout_s",
        "cluster.heartbeat_timeout_s",
        "cluster.startup_timeout_s",
        "engine.max_num_seqs",
        "engine.kv_cache_gb",
        "engine.gpu_memory_utilization",
    )
    _within("engine.gpu_memory_utilization", cfg.engine.gpu_memory_utilization, 0.0, 1.0)
    check_engine(cfg.engine.name)
    _check_build(cfg)


def _check_evaluation(cfg: DictConfig) -> None:
    keys = ["num_problems", "top_p", "responses_per_call", "resamples"]
    keys += [key for key in ("limit", "temperature") if cfg.eval[key] is not None]
    _positive(cfg, *(f"eval.{key}" for key in keys))
    _not_negative(cfg, "eval.every", "eval.samples")
    _within("eval.top_p", cfg.eval.top_p, 0.0, 1.0)
    if cfg.eval.out is not None and os.path.splitext(cfg.eval.out)[1] == ".json":
        raise ValueError(f"eval.out={cfg.eval.out}: the figures go there; write .jsonl")


def _check_rewards(cfg: DictConfig) -> None:
    _positive(cfg, "rewards.time_limit_s", "rewards.memory_limit_gb")
    _not_negative(cfg, "rewards.num_workers")
    _within("rewards.num_workers", cfg.rewards.num_workers, 0, 1024)
    _within("rewards.memory_limit_gb", cfg.rewards.memory_limit_gb, 0.1, 2**20)
    if cfg.rewards.time_limit_s >= cfg.cluster.timeout_s:
        raise ValueError(
            f"rewards.time_limit_s={cfg.rewards.time_limit_s:g} must be less than "
            f"cluster.timeout_s={cfg.cluster.timeout_s:g}, or a reward that hangs ends the job"
        )
    if not math.isfinite(cfg.rewards.penalty):
        raise ValueError(f"rewards.penalty={cfg.rewards.penalty} must be finite")


def _check_hang_timeout(cfg: DictConfig) -> None:
    if hang_timeout_s(cfg) >= cfg.cluster.timeout_s:
        raise ValueError(
            f"engine.hang_timeout_s={hang_timeout_s(cfg):g} must be less than cluster.timeout_s="
            f"{cfg.cluster.timeout_s:g}, or an engine that hangs ends the job"
        )


def _check_ranks(cfg: DictConfig, ranks: Ranks) -> None:
    if not searches(cfg):
        return  # every rank trains
    if ranks.world_size == 1:
        if cfg.mode != "sync":
            raise ValueError(
                "mode=async needs a searcher beside the trainer: run `torchrun "
                "--nproc_per_node=2 train.py ...`, or set mode=sync"
            )
        if cfg.cluster.trainers != 1:
            raise ValueError(f"cluster.trainers={cfg.cluster.trainers}, but there is one rank")
    elif cfg.cluster.trainers >= ranks.world_size:
        raise ValueError(
            f"cluster.trainers={cfg.cluster.trainers} leaves no searcher among {ranks.world_size} "
            f"ranks: set it to {ranks.world_size - 1} or less, or start more ranks"
        )
    if cfg.searcher.tp > 1:
        _check_tensor_parallel(cfg, ranks)
    if cfg.weights.backend == weights_vllm.BACKEND:
        _check_vllm_transfer(cfg, ranks)


def _check_tensor_parallel(cfg: DictConfig, ranks: Ranks) -> None:
    """Searchers of several ranks: whole ones, each on one node."""
    tp, trainers, world_size = cfg.searcher.tp, cfg.cluster.trainers, ranks.world_size
    if cfg.engine.name != "vllm":
        raise ValueError(f"searcher.tp={tp} needs engine=vllm: transformers runs on one device")
    if world_size == 1:
        raise ValueError(
            f"searcher.tp={tp} needs a rank for each device: run `torchrun "
            f"--nproc_per_node={1 + tp} train.py ...`, or set searcher.tp=1"
        )
    if (world_size - trainers) % tp:
        raise ValueError(
            f"searcher.tp={tp}: the {world_size - trainers} ranks beside cluster.trainers="
            f"{trainers} can't be shared out in searchers of {tp}: start "
            f"{trainers + max((world_size - trainers) // tp, 1) * tp} ranks, or change "
            "cluster.trainers"
        )
    for first in range(trainers, world_size, tp):
        last, per_node = first + tp - 1, ranks.local_world_size
        if first // per_node != last // per_node:
            raise ValueError(
                f"searcher.tp={tp}: ranks {first} to {last} of {ranks.name(first)} are not on one "
                f"node of {per_node} ranks: make cluster.trainers and --nproc_per_node multiples "
                f"of {tp}"
            )


def _check_vllm_transfer(cfg: DictConfig, ranks: Ranks) -> None:
    if cfg.engine.name != "vllm" or ranks.world_size == 1:
        what = "engine=vllm" if cfg.engine.name != "vllm" else "a searcher on another GPU"
        raise ValueError(f"weights.backend={cfg.weights.backend} needs {what}: set it to auto")
    if ParallelConfig(**cfg.trainer.parallel).sharded(ranks.num_trainers):
        raise ValueError(
            f"weights.backend={cfg.weights.backend} sends a whole policy, and this one is sharded: "
            "set trainer.parallel.kind=replicate, or weights.backend=auto"
        )


def _check_exploration(cfg: DictConfig) -> None:
    explore = cfg.searcher.explore
    for key in ("temperature_prob", "top_p_prob"):
        _within(f"searcher.explore.{key}", explore[key], 0.0, 1.0)
    for key in ("temperature_low", "temperature_high", "top_p_low", "top_p_high"):
        if explore[key] is not None:
            _positive(cfg, f"searcher.explore.{key}")
    _within("searcher.explore.top_p_high", explore.top_p_high, 0.0, 1.0)
    for what in ("temperature", "top_p"):
        low, high = explore[f"{what}_low"], explore[f"{what}_high"]
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"searcher.explore.{what}_low={low} is above searcher.explore.{what}_high={high}"
            )


def _check_data(cfg: DictConfig) -> None:
    if (cfg.mode in ("offline", "replay")) != (cfg.data is not None):
        raise ValueError(
            "mode=offline needs data=<run folder, *.traj or *.jsonl files>"
            if cfg.mode == "offline"
            else f"data={cfg.data} is used by mode=offline and mode=replay only: set one of them, "
            "or leave it out"
        )
    if cfg.data is not None and not all(isinstance(path, str) for path in data_paths(cfg)):
        raise ValueError(f"data={cfg.data}: give a path, or a list of paths as data=[a,b]")


def _check_run_folder(cfg: DictConfig) -> None:
    if not str(cfg.run.root).strip():
        raise ValueError("run.root is empty: give the folder of all runs, such as runs")
    name = cfg.run.name
    if name is None:
        return
    path = PurePath(name)
    if not path.parts or path.is_absolute() or ".." in path.parts:
        raise ValueError(f"run.name={name!r} must be a name in run.root={cfg.run.root}")


def _check_resume(cfg: DictConfig, ranks: Ranks) -> None:
    if cfg.deterministic and cfg.mode != "sync":
        raise ValueError(
            "deterministic=true needs mode=sync: who comes first decides an asynchronous run "
            "(mode=replay repeats one)"
        )
    if cfg.resume == "auto" and cfg.run.name is None:
        raise ValueError("resume=auto needs run.name: a job that starts again must find its run")
    if cfg.mode == "replay":
        if cfg.cluster.trainers != ranks.world_size:
            raise ValueError(
                f"mode=replay: the recorded run had {cfg.cluster.trainers} trainers, start as many "
                f"ranks instead of {ranks.world_size}"
            )


def _check_bounds(cfg: DictConfig) -> None:
    """Bounds that wait for new trajectories, where none would come."""
    if cfg.trainer.max_reuse is not None and cfg.mode == "offline":
        raise ValueError(
            "trainer.max_reuse is for modes with searchers: in mode=offline nothing new arrives, "
            "leave it out"
        )


def data_paths(cfg: DictConfig) -> list[str]:
    """The files and folders of `data`."""
    return list(cfg.data) if OmegaConf.is_list(cfg.data) else [cfg.data]


def _check_batches(cfg: DictConfig, ranks: Ranks) -> None:
    batch, drawn = cfg.trainer.batch_size, cfg.trainer.responses_per_prompt
    generated = cfg.searcher.responses_per_prompt
    if drawn < 2:
        raise ValueError(
            f"trainer.responses_per_prompt={drawn}: a group needs at least 2 responses to compare"
        )
    if cfg.buffer.max_tokens < batch:
        raise ValueError(
            f"buffer.max_tokens={cfg.buffer.max_tokens} (response tokens of each trainer) holds "
            f"less than a draw of trainer.batch_size={batch} responses: raise it"
        )
    if batch % (drawn * ranks.num_trainers):
        unit = drawn * ranks.num_trainers
        raise ValueError(
            f"trainer.batch_size={batch} is not a multiple of trainer.responses_per_prompt x "
            f"cluster.trainers = {unit}: try {max(batch // unit, 1) * unit}"
        )
    if generated < drawn and searches(cfg):
        raise ValueError(
            f"searcher.responses_per_prompt={generated} (S) is less than "
            f"trainer.responses_per_prompt={drawn} (K): raise S to {drawn} or lower K"
        )
    if cfg.mode == "sync":
        prompts = prompts_per_step(cfg) * cfg.trainer.publish_every
        if prompts % ranks.num_searchers:
            raise ValueError(
                f"mode=sync: {prompts} prompts a round do not split evenly over "
                f"{ranks.num_searchers} searchers: change trainer.batch_size"
            )
        if cfg.cluster.trainers > 1:
            raise ValueError("mode=sync trains on one rank: set cluster.trainers=1")
    if cfg.buffer.capacity_per_prompt < drawn:
        raise ValueError(
            f"buffer.capacity_per_prompt={cfg.buffer.capacity_per_prompt} is less than "
            f"trainer.responses_per_prompt={drawn}: a group of that size never fits"
        )


def _check_packing(cfg: DictConfig) -> None:
    """What packed rows need; the longest prompt with its response can't be split."""
    attention = cfg.trainer.packing.attention
    if attention == "False":
        raise ValueError(
            'trainer.packing.attention: yaml reads off as false, so write "off" in quotes'
        )
    _one_of("trainer.packing.attention", attention, ("auto", *ATTENTIONS, "off"))
    if attention == "off":
        return
    if attention == "varlen" and cfg.trainer.precision == "float32":
        raise ValueError(
            "trainer.packing.attention=varlen computes in bfloat16: set "
            "trainer.precision=bfloat16, or attention to flex"
        )
    keys = ["trainer.tokens_per_micro_batch"]
    if searches(cfg) and not cfg.trainer.reference_reset_every:
        keys.append("searcher.reference_tokens_per_micro_batch")
    longest = cfg.task.max_prompt_tokens + cfg.task.max_response_tokens
    for key in keys:
        if OmegaConf.select(cfg, key) < longest:
            raise ValueError(
                f"{key}={OmegaConf.select(cfg, key)} is less than task.max_prompt_tokens + "
                f"task.max_response_tokens = {longest}: raise it to {longest} or more"
            )


def _check_parallel(cfg: DictConfig, ranks: Ranks) -> None:
    parallel = cfg.trainer.parallel
    _one_of("trainer.parallel.kind", parallel.kind, ("auto", "replicate", "shard"))
    if ParallelConfig(**parallel).sharded(ranks.num_trainers):
        return
    for key, unused in (
        ("cpu_offload", parallel.cpu_offload),
        ("reduce_every_micro_batch", parallel.reduce_every_micro_batch),
        ("reshard_after_forward", not parallel.reshard_after_forward),
    ):
        if unused:
            raise ValueError(
                f"trainer.parallel.{key}={parallel[key]} is for a sharded policy, and this one is "
                "not: set trainer.parallel.kind=shard, or leave the key out"
            )


def _check_keys(cfg: DictConfig) -> None:
    """Keys that no dataclass knows: `+trainer.stepz=3` goes past Hydra's own check."""
    schema = OmegaConf.structured(Config)
    known = flat_keys(schema)

    def check(node: DictConfig, typed: DictConfig, prefix: str) -> None:
        for key in node:
            name = f"{prefix}{str(key)}"
            if name not in known:
                raise ValueError(f"unknown key {name}{_did_you_mean(name, known)}")
            inner = None if OmegaConf.is_missing(typed, key) else typed[key]
            if isinstance(inner, DictConfig):  # others (task, loss, ...) are checked by _target_
                check(node[key], inner, f"{name}.")

    check(cfg, schema, "")


def _check_targets(cfg: DictConfig) -> None:
    """`_target_` nodes must name something that exists and takes the keys beside it."""
    _check_task(cfg)
    for where in ("loss", "buffer.rule"):
        _check_partial(cfg, where)
    _check_build(cfg)


def _check_build(cfg: DictConfig) -> None:
    if cfg.model.build is not None:
        _check_partial(cfg, "model.build")


def _check_partial(cfg: DictConfig, where: str) -> None:
    node = OmegaConf.select(cfg, where)
    check_target(where, node)
    if not node.get("_partial_"):
        raise ValueError(f"{where} needs `_partial_: true` beside its `_target_`")


def _check_task(cfg: DictConfig) -> None:
    check_target("task", task_node(cfg))
    _one_of("task.long_prompts", cfg.task.long_prompts, get_args(LongPrompts))
    for key in ("max_prompt_tokens", "max_response_tokens"):
        value = cfg.task.get(key)
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"task.{key}={value!r} must be a positive whole number")


def task_node(cfg: DictConfig) -> DictConfig | None:
    """What the task is built from: `task` without `long_prompts`, which tasks know nothing of."""
    node = OmegaConf.select(cfg, "task")
    if not isinstance(node, DictConfig):
        return None
    node = copy.deepcopy(node)  # the copy's interpolations still see the whole config
    with read_write(node), open_dict(node):
        node.pop("long_prompts", None)
    return node


def check_target(where: str, node: DictConfig | None) -> None:
    """Raises ValueError unless `node._target_` exists and takes the node's other keys."""
    target = node.get("_target_") if isinstance(node, DictConfig) else None
    if node is None or target is None:
        raise ValueError(f"{where} needs a `_target_`: choose a file of conf/{where.split('.')[0]}")
    try:
        function = get_callable(target)
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{where}._target_={target!r} can't be imported: {reason}") from error
    parameters = inspect.signature(function).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        return
    known = [f"{where}.{name}" for name in parameters]
    for keyword in (f"{where}.{key}" for key in map(str, node) if key not in _HYDRA_KEYS):
        if keyword not in known:
            raise ValueError(f"unknown key {keyword}{_did_you_mean(keyword, known)}")


# A key whose last word is one of these holds a secret, unless the word before it tells which of a
# tokenizer's tokens it names.
_SECRET_KEY = (
    r"(?i:(?:[a-z0-9_]*_)?(?<!pad_)(?<!eos_)(?<!bos_)(?<!unk_)(?<!sep_)(?<!cls_)(?<!mask_)"
    r"(?<!stop_)"
    r"(?:token|secret|password|passwd|passphrase|credentials?|(?:api|access|private|secret)_?key))"
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{10,}|sk-[A-Za-z0-9_-]{10,}|gh[opsu]_[A-Za-z0-9]{20,}"
    r"|github_pat_\w{20,}|glpat-[\w-]{10,}|xox[abps]-[\w-]{10,}|AKIA[0-9A-Z]{16})"
    r"|(?<=://)[^/\s@]+(?=@)"  # user:password@ of a URL
)
# Inside of an override such as `task.options={hf_token: x, n: 3}`.
_SECRET_ITEM = re.compile(
    rf"([{{,]\s*[\"']?{_SECRET_KEY}[\"']?\s*:\s*)(\"[^\"]*\"|'[^']*'|[^,}}]+)"
)
HIDDEN = "<hidden>"


def hide_secrets(value: Any) -> Any:
    """A copy of plain values in which what looks like a secret is '<hidden>'.

    By its key (a token, password, API key, ...), or by its form: that of a known kind of token, a
    user and password in a URL. Files that a run leaves are shown to others; a secret of a form
    unknown here, under another key, is not found.

    >>> hide_secrets({"hf_token": "abc", "max_response_tokens": 5, "url": "https://me:pw@host/x"})
    {'hf_token': '<hidden>', 'max_response_tokens': 5, 'url': 'https://<hidden>@host/x'}
    """
    if isinstance(value, dict):
        return {
            key: HIDDEN
            if item not in (None, "") and re.fullmatch(_SECRET_KEY, str(key))
            else hide_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [hide_secrets(item) for item in value]
    return _SECRET_VALUE.sub(HIDDEN, value) if isinstance(value, str) else value


def hide_in_command(words: Sequence[str]) -> list[str]:
    """The same for a command line, whose overrides are `key=value`.

    >>> hide_in_command(["train.py", "+task.api_key=a b", "task.x={token: c, n: 1}"])
    ['train.py', '+task.api_key=<hidden>', 'task.x={token: <hidden>, n: 1}']
    """

    def hide(word: str) -> str:
        key, equals, _ = word.partition("=")
        if equals and re.fullmatch(_SECRET_KEY, key.lstrip("+~-").rpartition(".")[2]):
            return f"{key}={HIDDEN}"
        return _SECRET_VALUE.sub(HIDDEN, _SECRET_ITEM.sub(rf"\1{HIDDEN}", word))

    return [hide(word) for word in words]


def get_callable(target: str) -> Callable[..., Any]:
    """The function or class that a `_target_` (`module.name`) names.

    Raises:
        ImportError, AttributeError, TypeError: there is no such module, name, or it isn't callable.
    """
    module, _, name = str(target).rpartition(".")
    if not module:
        raise ImportError("write it as module.name")
    found = getattr(importlib.import_module(module), name)
    if not callable(found):
        raise TypeError(f"{name} is a {type(found).__name__}, not a function or class")
    return found


def _check_schedules(cfg: DictConfig) -> None:
    beta = cfg.trainer.beta
    _positive(cfg, "trainer.beta.initial")
    for key in ("final", "target_step", "stop_step"):
        if beta[key] is not None:
            _positive(cfg, f"trainer.beta.{key}")
    for name, check in (
        ("trainer.beta", lambda: beta_at(0, **beta_schedule(cfg.trainer))),
        ("trainer.lr", lambda: lr_at(0, **lr_schedule(cfg.trainer))),
    ):
        try:
            check()
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def check_num_problems(cfg: DictConfig, ranks: Ranks, count: int) -> None:
    """Raises ValueError if a searcher would have no prompt, or a trainer too few for a draw."""
    if not searches(cfg):
        return  # what is trained on is saved
    needed = max(ranks.num_searchers, prompts_per_step(cfg))
    if count < needed:
        raise ValueError(
            f"the task has {count} training prompts, fewer than the {needed} that "
            f"{ranks.num_searchers} searchers and trainer.batch_size={cfg.trainer.batch_size} "
            "need: lower trainer.batch_size, or use a larger data set"
        )


def check_lengths(
    cfg: DictConfig, prompt_tokens: Sequence[Sequence[int] | np.ndarray], context_length: int | None
) -> int:
    """Most tokens of a prompt and its response together (the engines' `max_model_len`).

    Raises:
        ValueError: a prompt is over task.max_prompt_tokens, or both limits over the context.
    """
    if not prompt_tokens:
        raise ValueError("task has no problems: see its data folder or its limits")
    longest = max(range(len(prompt_tokens)), key=lambda i: len(prompt_tokens[i]))
    length = len(prompt_tokens[longest])
    if length > cfg.task.max_prompt_tokens:
        over = sum(len(tokens) > cfg.task.max_prompt_tokens for tokens in prompt_tokens)
        raise ValueError(
            f"{over} prompts are longer than task.max_prompt_tokens="
            f"{cfg.task.max_prompt_tokens} (prompt {longest} has {length} tokens): raise it to "
            f"{length}, or set task.long_prompts=drop or truncate_left"
        )
    total = cfg.task.max_prompt_tokens + cfg.task.max_response_tokens
    if context_length is not None and cfg.task.max_prompt_tokens >= context_length:
        raise ValueError(
            f"task.max_prompt_tokens={cfg.task.max_prompt_tokens} leaves no room for a response in "
            f"the model's context of {context_length} tokens: lower it"
        )
    if context_length is not None and total > context_length:
        raise ValueError(
            f"task.max_prompt_tokens + task.max_response_tokens = {total} exceeds the model's "
            f"context of {context_length} tokens: lower task.max_response_tokens to "
            f"{context_length - cfg.task.max_prompt_tokens} or less"
        )
    return total


def recorded(cfg: DictConfig) -> DictConfig:
    """The config of the run that `mode=replay` repeats, with this one's `run` and `cluster.device`.

    Raises:
        ValueError: `data` is no folder of a run, or of one that can't be replayed.
    """
    if not isinstance(cfg.data, str):
        raise ValueError("mode=replay needs data=<folder of a run>")
    if cfg.resume != "none":
        raise ValueError("mode=replay begins where the recorded run began: leave resume out")
    path = os.path.join(str(cfg.data), "config.yaml")
    try:
        saved = OmegaConf.merge(OmegaConf.structured(Config), OmegaConf.load(path))
    except (OSError, OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"data={cfg.data}: {path} can't be read: {error}") from error
    assert isinstance(saved, DictConfig)
    if saved.mode != "async":
        raise ValueError(
            f"data={cfg.data}: a run of mode={saved.mode}; mode=replay repeats asynchronous ones"
        )
    saved.mode, saved.data, saved.resume = "replay", cfg.data, "none"
    saved.run, saved.cluster.device = cfg.run, cfg.cluster.device
    return saved


def explain(error: Exception, overrides: Sequence[str]) -> str:
    """Hydra's or OmegaConf's complaint about the command line, in one line, with key and fix."""
    choices = [o for o in overrides if o.partition("=")[0] in groups()]
    with initialize_config_dir(version_base="1.3", config_dir=conf_dir()):
        try:
            cfg = compose("config", overrides=choices)
        except (HydraException, ValueError):  # one of the choices is the mistake
            cfg = compose("config")
    cause = error.__cause__ or error
    if isinstance(cause, ValidationError | ConfigTypeError):
        reason = str(cause).partition("\n")[0]
        if reason.endswith("is not Optional"):
            reason = "can't be null"
        return f"{cause.full_key}: {reason[:1].lower()}{reason[1:]}"
    if isinstance(error, OverrideParseException):
        return f"{error.override!r} is not of the form key=value"
    known, _, _ = str(error).partition("Config search path")  # all there is to choose from
    lines = [line.strip() for line in known.splitlines() if line.strip()]
    if isinstance(error, ValueError):  # `task=null`
        lines = [f"{', '.join(choices)}:", *lines]
    return explain_unknown_key(cfg, overrides) or " ".join(lines)


def explain_unknown_key(cfg: DictConfig, overrides: Sequence[str]) -> str | None:
    """`unknown key trainer.stepz; did you mean trainer.steps?` for the first bad override."""
    known = [*flat_keys(cfg), *groups()]
    for override in overrides:
        key, separator, _ = override.partition("=")
        if separator and not override.startswith(("+", "~", "hydra.")) and "@" not in key:
            if key not in known and not key.startswith("hydra/"):
                return f"unknown key {key}{_did_you_mean(key, known)}"
    return None


def conf_dir() -> str:
    """The folder of yaml choices."""
    return os.path.join(os.path.dirname(os.path.abspath(__file__)), "conf")


def groups() -> list[str]:
    """The groups of choices: task, model, loss, ..."""
    return sorted(entry.name for entry in os.scandir(conf_dir()) if entry.is_dir())


def flat_keys(cfg: DictConfig) -> list[str]:
    """All keys in dotted form, inner nodes included."""

    def walk(tree: Any, prefix: str) -> list[str]:
        keys = []
        for key, value in tree.items():
            keys.append(f"{prefix}{key}")
            if isinstance(value, dict):
                keys += walk(value, f"{prefix}{key}.")
        return keys

    return walk(OmegaConf.to_container(cfg, resolve=False), "")


def _did_you_mean(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    if not near:
        tail = {key.rpartition(".")[2]: key for key in known}
        near = [tail[k] for k in difflib.get_close_matches(word.rpartition(".")[2], tail, n=1)]
    return f"; did you mean {near[0]}?" if near else " (see `python train.py --cfg job`)"


def _one_of(key: str, value: Any, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value!r}: choose one of {', '.join(choices)}")


def _positive(cfg: DictConfig, *keys: str) -> None:
    for key in keys:
        value = OmegaConf.select(cfg, key)
        if not 0 < value < math.inf:
            raise ValueError(f"{key}={value} must be positive")


def _not_negative(cfg: DictConfig, *keys: str) -> None:
    for key in keys:
        value = OmegaConf.select(cfg, key)
        if not 0 <= value < math.inf:
            raise ValueError(f"{key}={value} must be 0 or more")


def _within(key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise ValueError(f"{key}={value} must be between {low} and {high}")
