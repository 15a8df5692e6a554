"""The same steps on 1, 2 and 4 trainers: are the loss curves one, and what does a step cost?

    python bench/trainer_ranks.py            20 steps of a small random model, float32, on CPU

Each step's groups are dealt to the trainers unevenly, by tokens and by groups. `replicate` holds a
copy of the policy on each trainer, `shard` spreads it by FSDP2. The differences are from the curve
of one trainer: of the loss, and of the gradient's norm relative to it. Seconds are of a step with
all trainers on this machine's cores, so they say what the collectives cost, not what GPUs gain.
The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from trainer_step import make_groups

from gradient import accumulate_gradient, step_stats
from losses import tb_vargrad
from model import Layout, prepare_for_packing
from parallel import ParallelConfig, clip_gradients, shard, sum_over_trainers

RANKS = (1, 2, 4)
GROUPS, RESPONSES = 8, 4  # of a step
TOKENS_PER_MICRO_BATCH = 150  # a group or two; the largest in two passes
CPU = torch.device("cpu")


def make_policy() -> PreTrainedModel:
    """The same on every rank."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).eval()


def share(rank: int, world_size: int) -> slice:
    """Prompts of this trainer: the last has the most."""
    first = [*range(world_size), GROUPS]
    return slice(first[rank], first[rank + 1])


def run(rank: int, world_size: int, kind: str, steps: int, folder: str) -> None:
    """One trainer's life; trainer 0 leaves its curve in `folder`."""
    torch.set_num_threads(1)
    store = dist.FileStore(os.path.join(folder, f"store-{kind}-{world_size}"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    group = dist.group.WORLD
    assert group is not None
    policy = make_policy()
    if kind == "shard":
        shard(policy, group, ParallelConfig(), device=CPU)
    prepare_for_packing(policy, "auto")
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3, eps=1e-6)
    rng = np.random.default_rng(0)
    curve, seconds = [], []
    for _ in range(steps):
        prompts, responses = rng.integers(5, 30, GROUPS), rng.integers(1, 60, GROUPS * RESPONSES)
        groups = make_groups(prompts.tolist(), responses.tolist(), policy.config.vocab_size)
        mine = groups[share(rank, world_size)]
        started = time.perf_counter()
        sums = accumulate_gradient(
            policy,
            mine,
            objective=tb_vargrad,
            beta=0.02,
            temperature=1.0,
            autocast=None,
            tokens_per_micro_batch=TOKENS_PER_MICRO_BATCH,
            stats=step_stats(mine, group, CPU),
            layout=Layout(packed=True),
            group=group if kind == "shard" else None,
        )
        parameters = list(policy.parameters())
        sums = sum_over_trainers(parameters, sums, group)
        curve.append((sums["loss/total"], clip_gradients(parameters, 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        result = {"curve": curve, "step_s": median(seconds)}
        Path(folder, f"{kind}-{world_size}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def main(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        print(
            "trainers  kind       loss: first -> last    largest difference: loss, norm  s a step"
        )
        for kind in ("replicate", "shard"):
            for world_size in RANKS:
                multiprocessing.spawn(run, (world_size, kind, steps, folder), nprocs=world_size)
                result = json.loads(Path(folder, f"{kind}-{world_size}.json").read_text())
                curve = np.array(result["curve"])  # [steps, 2]
                if not rows:
                    one = curve
                loss = float(np.abs(curve - one)[:, 0].max())
                norm = float((np.abs(curve - one) / one)[:, 1].max())
                rows.append({"trainers": world_size, "kind": kind, "loss": loss, "norm": norm})
                print(
                    f"{world_size:8}  {kind:9}  {curve[0, 0]:9.6f} -> {curve[-1, 0]:9.6f}"
                    f"   {loss:16.1e}, {norm:.1e}  {result['step_s']:16.3f}",
                    flush=True,
                )
    return {
        "max_loss_difference": max(row["loss"] for row in rows),
        "max_norm_difference": max(row["norm"] for row in rows),
        "steps": steps,
        "rows": rows,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
