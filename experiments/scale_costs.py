"""Costs for the scale model: given for a kind of GPU and a model, or measured in a run.

    given(gpu, model, workload)   Costs and System of one job on such GPUs
    measured(run_dir)             Costs and System of a finished run of `train.py`

Formulas for a GPU, p parameters, W = 2 p bytes of weights in bfloat16 on an engine of tp GPUs:

    weights_read = W / (tp HBM e_hbm)        decode_token = 2 p / (tp FLOP e_prefill)
    kv_read = KV / (tp HBM e_hbm)            KV = 2 (keys, values) 2 bytes layers kv_heads head_dim
    prefill_token = reference_token = decode_token
    train_token = 6 p / (FLOP e_train)       (forward 2 p, backward 4 p: arXiv 2204.02311, App. B)
    gather_pass = 2 (forward, backward) W (T - 1) / (T link);  reduce = 4 p (T - 1) / (T link)
    snapshot = (4 p + W) / (HBM e_hbm), sharded + 4 p (T - 1) / (T link)
    load = W / (HBM e_hbm) 2 (read, write) + RELOAD_S

Link is NVLink within a node of 8, else the node's network. An engine has the fewest GPUs (a power
of two) whose memory holds W and `MIN_SEQS` requests; there are as few trainers (a power of two) as
hold 18 bytes a parameter (weights, gradients, Adam's two states in float32, bfloat16 weights).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from experiments.scale_model import Costs, System, mean_context, running_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class GPU:
    """Published peaks of one GPU."""

    flops: float  # FLOP/s, bfloat16 without sparsity
    hbm: float  # bytes/s
    memory: float  # bytes
    nvlink: float  # bytes/s, one direction
    network: float  # bytes/s, one direction, of the adapter that a GPU has in a DGX or HGX node


GPUS = {
    # NVIDIA H100 Tensor Core GPU data sheet, SXM: 989 TFLOP/s, 3.35 TB/s, 80 GB, NVLink 900 GB/s
    # (both directions); DGX H100 data sheet: 8 ConnectX-7 of 400 Gb/s.
    "H100": GPU(flops=989e12, hbm=3.35e12, memory=80e9, nvlink=450e9, network=50e9),
    # NVIDIA H200 data sheet, SXM: the same but for 4.8 TB/s and 141 GB.
    "H200": GPU(flops=989e12, hbm=4.8e12, memory=141e9, nvlink=450e9, network=50e9),
    # NVIDIA A100 data sheet, SXM 80 GB: 312 TFLOP/s, 2.039 TB/s, NVLink 600 GB/s (both directions);
    # DGX A100 data sheet: 8 ConnectX-6 of 200 Gb/s.
    "A100": GPU(flops=312e12, hbm=2.039e12, memory=80e9, nvlink=300e9, network=25e9),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What of a model's shape sets its costs."""

    parameters: float
    layers: int
    kv_heads: int
    head_dim: int

    @property
    def kv_bytes(self) -> float:
        """Keys and values of one token, bfloat16."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim


MODELS = {  # config.json of the models named
    "1B": Model(parameters=1.24e9, layers=16, kv_heads=8, head_dim=64),  # Llama-3.2-1B
    "3B": Model(parameters=3.21e9, layers=28, kv_heads=8, head_dim=128),  # Llama-3.2-3B
    "7B": Model(parameters=7.62e9, layers=28, kv_heads=4, head_dim=128),  # Qwen2.5-7B
    "14B": Model(parameters=14.8e9, layers=48, kv_heads=8, head_dim=128),  # Qwen2.5-14B
    "32B": Model(parameters=32.8e9, layers=64, kv_heads=8, head_dim=128),  # Qwen2.5-32B
    "70B": Model(parameters=70.6e9, layers=80, kv_heads=8, head_dim=128),  # Llama-3.1-70B
}

# Assumed shares of the peaks that are reached, and times that no data sheet gives.
HBM_EFFICIENCY = 0.7  # of decoding
PREFILL_EFFICIENCY = 0.5
TRAIN_EFFICIENCY = 0.4  # MFU
LINK_EFFICIENCY = 0.8
MEMORY_SHARE = 0.85  # of a GPU's memory, for weights, optimizer states, keys and values
TRAIN_STATE_BYTES = 18  # a parameter
TRAIN_MEMORY_SHARE = 0.7  # the rest is for activations
MIN_SEQS = 16  # requests that an engine must have room for
NODE = 8  # GPUs of a node
DECODE_OVERHEAD_S = 2e-3  # a decode step: scheduling, sampling, launches
OPTIMIZER_S = 0.05  # a training step: optimizer, clipping, metrics
RELOAD_S = 0.1  # a version: the engine's walk through its layers
HOP_S = 25e-6  # NCCL's ring: latency of a hop and the time of the slice that travels in it
REWARD_S = 0.2  # a group, in worker processes
# This project's own code on one CPU core, where no GPU takes part: trajectory.pack's layout,
# bench/buffer.py, gloo's recv over loopback (a header and a body a message), TCPStore.get.
RESPONSE_BYTES, TOKEN_BYTES, PROMPT_TOKEN_BYTES = 66.0, 12.0, 4.0
INSERT_S, DRAW_S = 27e-6, 6.4e-6  # a response; unpacking it included
LINK_BYTES_PER_S, MESSAGE_S = 2e9, 180e-6
STORE_GET_S = 40e-6


def engine_gpus(gpu: GPU, model: Model, context: float) -> int:
    """searcher.tp: the fewest GPUs, a power of two, with room for `MIN_SEQS` requests.

    Args:
        context: tokens of a request in the mean.
    """
    need = 2 * model.parameters + MIN_SEQS * context * model.kv_bytes
    return _power_of_two(need / (MEMORY_SHARE * gpu.memory))


def fewest_trainers(gpu: GPU, model: Model) -> int:
    """Trainers, a power of two, that hold a sharded policy and its optimizer.

    >>> {name: fewest_trainers(GPUS["H100"], model) for name, model in MODELS.items()}
    {'1B': 1, '3B': 2, '7B': 4, '14B': 8, '32B': 16, '70B': 32}
    """
    need = TRAIN_STATE_BYTES * model.parameters
    return _power_of_two(need / (TRAIN_MEMORY_SHARE * gpu.memory))


def _power_of_two(least: float) -> int:
    return 1 << max(math.ceil(math.log2(least)), 0)


def given(
    gpu: GPU, model: Model, workload: System, *, trainers: int | None = None
) -> tuple[Costs, System]:
    """A job on GPUs of one kind.

    Args:
        workload: lengths, batch and settings; searchers as wished.
        trainers: null: as few as hold the policy.

    Returns:
        Its costs, and `workload` with tp, trainers and the requests that an engine has room for.
    """
    count = fewest_trainers(gpu, model) if trainers is None else trainers
    context = mean_context(workload)
    tp = engine_gpus(gpu, model, context)
    room = MEMORY_SHARE * tp * gpu.memory - 2 * model.parameters
    link = (gpu.nvlink if count <= NODE else gpu.network) * LINK_EFFICIENCY
    weights, others = 2 * model.parameters, (count - 1) / count
    hbm, flops = gpu.hbm * HBM_EFFICIENCY, gpu.flops
    token_s = 2 * model.parameters / (tp * flops * PREFILL_EFFICIENCY)
    costs = Costs(
        decode_overhead_s=DECODE_OVERHEAD_S,
        weights_read_s=weights / (tp * hbm),
        kv_read_s=model.kv_bytes / (tp * hbm),
        decode_token_s=token_s,
        prefill_token_s=token_s,
        reference_token_s=token_s,
        reward_s=REWARD_S,
        response_bytes=RESPONSE_BYTES,
        token_bytes=TOKEN_BYTES,
        prompt_token_bytes=PROMPT_TOKEN_BYTES,
        link_bytes_per_s=LINK_BYTES_PER_S,
        message_s=MESSAGE_S,
        insert_s=INSERT_S,
        draw_s=DRAW_S,
        train_step_s=OPTIMIZER_S,
        train_token_s=6 * model.parameters / (flops * TRAIN_EFFICIENCY),
        gather_pass_s=2 * weights * others / link,
        reduce_s=4 * model.parameters * others / link,
        weight_bytes=weights,
        snapshot_s=(4 * model.parameters + weights) / hbm + 4 * model.parameters * others / link,
        broadcast="ring",
        broadcast_bytes_per_s=gpu.network * LINK_EFFICIENCY,
        broadcast_hop_s=HOP_S,
        load_s=2 * weights / hbm + RELOAD_S,
        store_get_s=STORE_GET_S,
    )
    seqs = min(workload.max_num_seqs, int(room / (context * model.kv_bytes)))
    system = replace(
        workload, trainers=count, workers_per_searcher=tp, max_num_seqs=seqs, prompts_in_flight=1
    )
    # a third more than keep the engine full on average
    prompts = math.ceil(4 / 3 * seqs / min(running_requests(system), seqs))
    return costs, replace(system, prompts_in_flight=prompts)


# --------------------------------------------------------------------------- measured


def measured(run_dir: Path) -> tuple[Costs, System]:
    """Costs of a finished asynchronous run, and the job that it was.

    What a rank did while it did not wait is put down to the tokens it handled, in full: rewards,
    packing and messages are in `decode_token_s`; inserting, drawing, publishing and metrics in
    `train_token_s`. Prompt tokens are in neither count, so P is 0. A run whose ranks shared cores
    shows higher costs than they have alone: measure one with a core for each rank.

    Args:
        run_dir: with config.yaml, origin.json, metrics.jsonl and summary.json.

    Raises:
        ValueError: not such a run.
    """
    from omegaconf import OmegaConf

    from metrics import read_metrics

    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(run_dir / "config.yaml"))
        origin = json.loads((run_dir / "origin.json").read_text())
        summary = json.loads((run_dir / "summary.json").read_text())
        records = read_metrics(run_dir)
    except OSError as error:
        raise ValueError(f"{run_dir} is not the folder of a finished run: {error}") from error
    if config["mode"] != "async":
        raise ValueError(
            f"{run_dir}: mode={config['mode']}; costs are measured in a mode=async run"
        )
    trainer, searcher, buffer = config["trainer"], config["searcher"], config["buffer"]
    size = searcher["responses_per_prompt"]
    if size != trainer["responses_per_prompt"]:
        raise ValueError(
            f"{run_dir}: searcher.responses_per_prompt={size} and trainer.responses_per_prompt="
            f"{trainer['responses_per_prompt']} differ; the model draws whole groups"
        )
    trainers = config["cluster"]["trainers"]
    searchers = origin["world_size"] - trainers
    wall_s, steps = summary["wall_s"], summary["steps"]
    tokens = _mean(records, "reward/response_tokens_mean")
    load_s = _mean(records, "weights/load_s")
    loaded = _changes(records, "weights/load_s")
    searching_s = wall_s * (1 - summary["searcher_idle_fraction"])
    loading_s = min(loaded * load_s, searching_s / 2)
    made = summary["generated_tokens_per_s"] * wall_s / searchers  # tokens of one searcher
    training_s = wall_s * (1 - summary["trainer_idle_fraction"]) / steps  # a step
    publication_s = _mean(records, "weights/broadcast_s")
    levels = math.ceil(math.log2(searchers + 1))
    weight_bytes = _mean(records, "weights/gb_per_s") * 1e9 * publication_s
    costs = Costs(
        decode_token_s=(searching_s - loading_s) / made,
        train_token_s=training_s * trainers / (trainer["batch_size"] * tokens),
        weight_bytes=weight_bytes,
        broadcast="tree",
        broadcast_bytes_per_s=weight_bytes * levels / publication_s if publication_s else math.inf,
        load_s=load_s,
    )
    system = System(
        searchers=searchers,
        trainers=trainers,
        update=searcher["update"],
        responses_per_prompt=size,
        max_num_seqs=config["engine"]["max_num_seqs"],
        prompts_in_flight=searcher["prompts_in_flight"],
        max_outstanding=searcher["max_outstanding"],
        score_every_s=searcher["score_every_s"],
        score_tokens=searcher["reference_tokens_per_micro_batch"],
        prompt_tokens=0.0,
        mean_tokens=tokens,
        max_tokens=config["task"]["max_response_tokens"],
        batch_size=trainer["batch_size"],
        publish_every=trainer["publish_every"],
        recency_prob=buffer["recency_prob"],
        max_reuse=trainer.get("max_reuse"),
        max_staleness=buffer["max_staleness"],
        buffer_tokens=buffer["max_tokens"],
        initial_responses=buffer["initial_trajectories"],
        steps=steps,
    )
    return costs, system


def _changes(records: list[dict[str, Any]], name: str) -> int:
    """How often a metric took another value: no two versions take the very same time to load."""
    values = [record[name] for record in records if record.get(name) is not None]
    return sum(i == 0 or value != values[i - 1] for i, value in enumerate(values))


def _mean(records: list[dict[str, Any]], name: str) -> float:
    """Of a metric over the run; 0 where it was never logged."""
    values = [record[name] for record in records if record.get(name) is not None]
    return fmean(values) if values else 0.0
