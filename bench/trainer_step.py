"""A whole optimizer step against a padded implementation: time, peak memory and utilisation.

    python bench/trainer_step.py            SmolLM2-135M; the last line is one JSON object
    python bench/trainer_step.py --quick    a small random model, in less than a minute
    python bench/trainer_step.py --grow     our step as responses grow from 128 to 4,096 tokens

Both do the same step on the same groups (K responses to a prompt, with GSM8K's lengths in tokens)
with the same model, objective, clipping and AdamW, weights in float32 and products in bfloat16
(autocast), a group at a time. They take turns; the median of the rounds counts.

    padded   as in the code of arXiv 2503.18929: prompts padded on the left to the longest of the
             step, responses on the right to 512 tokens, logits of every position, their whole
             log-softmax, of which the responses' tokens are taken
    packed   `gradient.accumulate_gradient` as the trainer calls it: packed rows, a prompt once for
             its responses, log-probs in blocks

Peak memory is of the resident set of a process that does nothing else (Linux; on a GPU what torch
has allocated), above its rest with parameters, gradients and optimizer states. `mfu` is the
arithmetic that packed rows need (`accounting.ModelFlops`) over time, over the best rate of a matrix
product measured between the rounds, in the same dtype and threads (`accounting.product_peak`);
`mfu_of_median_product` is over the median of those rates, which says more where other processes use
the cores too. `gradient_cosine` is between both ways' gradients of the first group.

With `--grow` the small model takes a step on one row: a prompt of 64 tokens and four responses of
as many tokens each as the table says; the fastest of the rounds counts. What does not grow linearly
is attention, whose arithmetic grows with a response's square: its own time (forward and backward,
on random numbers) stands in a column beside the step's. Without it, seconds and memory per token
should stay as they are once the optimizer's constant share has become small.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure import in_fresh_process, peak_bytes, say, start_peak

from accounting import model_flops, product_peak
from buffer import Group
from gradient import accumulate_gradient, make_batch, step_stats
from losses import tb_vargrad
from model import Layout, load_policy, prepare_for_packing
from packing import ATTENTIONS, num_tokens, pack
from pretrained import build_smollm2, cached
from trajectory import StepStats, Trajectory

# Tokens of GSM8K's questions (mean 60, 95 % below 101, at most 223) and gold answers (mean 125,
# 95 % below 232, at most 454) in SmolLM2's vocabulary: from, below, share.
QUESTIONS = [
    (20, 40, 0.17),
    (40, 60, 0.42),
    (60, 80, 0.25),
    (80, 101, 0.11),
    (101, 150, 0.045),
    (150, 224, 0.005),
]
ANSWERS = [
    (30, 80, 0.2),
    (80, 120, 0.35),
    (120, 160, 0.24),
    (160, 232, 0.16),
    (232, 330, 0.045),
    (330, 455, 0.005),
]
PADDED_RESPONSE = 512  # tokens
TEMPERATURE, BETA, MAX_GRAD_NORM = 1.0, 0.02, 1.0
GROWING_RESPONSES = (128, 256, 512, 1024, 2048, 4096)
GROWING_PROMPT, GROWING_COUNT = 64, 4  # tokens; responses to it
DTYPE = torch.bfloat16
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class Size:
    """What is measured."""

    quick: bool
    groups: int
    responses: int  # of a group, K
    rounds: int


def open_policy(size: Size) -> PreTrainedModel:
    if not size.quick:
        folder = str(cached("smollm2", build_smollm2))
        return load_policy(folder, device=DEVICE, dtype=torch.float32)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return AutoModelForCausalLM.from_config(config).to(DEVICE).eval()


def draw_lengths(
    histogram: Sequence[tuple[int, int, float]], count: int, rng: np.random.Generator
) -> list[int]:
    """Evenly spaced quantiles in random order, so that a small draw has the histogram's mean."""
    edges = np.cumsum([0.0, *(share for *_, share in histogram)])
    lengths = []
    for quantile in (rng.permutation(count) + rng.random(count)) / count * edges[-1]:
        i = int(np.searchsorted(edges, quantile, side="right")) - 1
        low, high, share = histogram[i]
        lengths.append(int(low + (high - low) * (quantile - edges[i]) / share))
    return lengths


def make_groups(
    prompt_lengths: Sequence[int], response_lengths: Sequence[int], vocabulary: int
) -> list[Group]:
    """Random tokens; as many responses to each prompt."""
    rng = np.random.default_rng(1)
    per_prompt = len(response_lengths) // len(prompt_lengths)
    groups = []
    for prompt_id, length in enumerate(prompt_lengths):
        prompt = rng.integers(3, vocabulary, length).astype(np.int32)
        trajectories = []
        for tokens in response_lengths[prompt_id * per_prompt :][:per_prompt]:
            logprobs = -rng.exponential(1.0, tokens).astype(np.float32)
            reward = float(rng.integers(2))
            trajectories.append(
                Trajectory(
                    prompt_id=prompt_id,
                    prompt_tokens=prompt,
                    response_tokens=rng.integers(3, vocabulary, tokens).astype(np.int32),
                    behavior_logprobs=logprobs,
                    old_logprobs=logprobs,
                    reference_logprobs=logprobs,
                    reference_version=0,
                    reward=reward,
                    reward_parts={"correct": reward},
                    version_start=0,
                    version_end=0,
                    truncated=False,
                )
            )
        items = list(range(per_prompt))
        uses = [0] * per_prompt
        groups.append(Group(prompt_id=prompt_id, trajectories=trajectories, uses=uses, items=items))
    return groups


# --------------------------------------------------------------------------- the two ways


def padded_gradient(policy: PreTrainedModel, groups: Sequence[Group], stats: StepStats) -> None:
    """Adds the step's gradient to `.grad`, group by group, from padded rectangles."""
    width = max(len(group.trajectories[0].prompt_tokens) for group in groups)  # P
    for group in groups:
        shape = (len(group.trajectories), width + PADDED_RESPONSE)
        input_ids = torch.zeros(shape, dtype=torch.int64)
        mask = torch.zeros(shape, dtype=torch.int64)
        for row, t in enumerate(group.trajectories):
            tokens = np.concatenate([t.prompt_tokens, t.response_tokens]).astype(np.int64)
            start = width - len(t.prompt_tokens)
            input_ids[row, start : start + len(tokens)] = torch.from_numpy(tokens)
            mask[row, start : start + len(tokens)] = 1
        input_ids, mask = input_ids.to(DEVICE), mask.to(DEVICE)
        with torch.autocast(DEVICE.type, dtype=DTYPE):
            logits = policy(
                input_ids=input_ids,
                attention_mask=mask,
                position_ids=(mask.cumsum(1) - 1).clamp(min=0),
                use_cache=False,
            ).logits[:, width - 1 : -1]  # [K, 512, V]
        all_logprobs = F.log_softmax(logits.float() / TEMPERATURE, dim=-1)
        logprobs = all_logprobs.gather(2, input_ids[:, width:, None]).squeeze(2)  # [K, 512]
        batch = make_batch([group], logprobs[mask[:, width:].bool()], stats)
        tb_vargrad(batch, beta=BETA).loss.backward()


def packed_gradient(policy: PreTrainedModel, groups: Sequence[Group], stats: StepStats) -> None:
    """The same as the trainer computes it; a micro-batch holds the largest group and no more."""
    accumulate_gradient(
        policy,
        groups,
        objective=tb_vargrad,
        beta=BETA,
        temperature=TEMPERATURE,
        autocast=DTYPE,
        tokens_per_micro_batch=max(packed_tokens(group) for group in groups),
        stats=stats,
        layout=Layout(packed=True),
    )


def packed_tokens(group: Group) -> int:
    prompts, responses = sequences([group])
    return num_tokens(prompts, responses, share_prompts=True)


def sequences(groups: Sequence[Group]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    trajectories = [t for group in groups for t in group.trajectories]
    return [t.prompt_tokens for t in trajectories], [t.response_tokens for t in trajectories]


WAYS: dict[str, Callable[..., None]] = {"padded": padded_gradient, "packed": packed_gradient}


def prepare(policy: PreTrainedModel, way: str) -> None:
    """Which attention the model uses."""
    if way == "packed":
        prepare_for_packing(policy, "auto", compute_dtype=DTYPE)
    else:
        policy.set_attn_implementation("sdpa")


def step(
    way: str,
    policy: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    groups: Sequence[Group],
    *,
    keep_gradients: bool = False,
) -> None:
    """One optimizer step, as `trainer.update_policy` makes it."""
    WAYS[way](policy, groups, step_stats(groups, None, DEVICE))
    torch.nn.utils.clip_grad_norm_(policy.parameters(), MAX_GRAD_NORM)
    optimizer.step()
    optimizer.zero_grad(set_to_none=not keep_gradients)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def make_optimizer(policy: PreTrainedModel) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        policy.parameters(), lr=1e-6, betas=(0.9, 0.99), weight_decay=0.0, fused=True
    )


# --------------------------------------------------------------------------- time


def compare_gradients(policy: PreTrainedModel, groups: Sequence[Group]) -> float:
    """Cosine between the gradients of both ways; it warms them up, too."""
    flat = []
    for way, gradient in WAYS.items():
        prepare(policy, way)
        policy.zero_grad()
        gradient(policy, groups, step_stats(groups, None, DEVICE))
        flat.append(torch.cat([p.grad.flatten() for p in policy.parameters()]))
    policy.zero_grad()
    return float(F.cosine_similarity(flat[0].double(), flat[1].double(), dim=0))


def step_times(
    policy: PreTrainedModel, groups: Sequence[Group], rounds: int
) -> tuple[dict[str, float], list[float]]:
    """Median seconds of a step of each way, and rates of a matrix product (FLOP/s) in between."""
    optimizer = make_optimizer(policy)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    rates = [product_peak(DEVICE, DTYPE)]
    for number in range(rounds):
        for way in WAYS:
            prepare(policy, way)
            started = time.perf_counter()
            step(way, policy, optimizer, groups)
            seconds[way].append(time.perf_counter() - started)
            rates.append(product_peak(DEVICE, DTYPE))
        say(f"round {number}: " + ", ".join(f"{way} {s[-1]:.2f} s" for way, s in seconds.items()))
    return {way: median(values) for way, values in seconds.items()}, rates


# --------------------------------------------------------------------------- memory


def step_memory(way: str, size: Size, groups: Sequence[Group]) -> tuple[int, int]:
    """Bytes at rest, and the most above them in a step; in a process that does nothing else."""
    policy = open_policy(size)
    prepare(policy, way)
    optimizer = make_optimizer(policy)
    # Gradients and optimizer states come to be, and what libraries allocate but once.
    few = make_groups([4], [2, 2], 64)
    step(way, policy, optimizer, few, keep_gradients=True)
    rest = start_peak(DEVICE)
    step(way, policy, optimizer, groups, keep_gradients=True)
    return rest, peak_bytes(DEVICE) - rest


# --------------------------------------------------------------------------- what is printed


def grow(size: Size) -> dict[str, Any]:
    """Seconds and peak memory of our step as responses grow."""
    policy = open_policy(size)
    prepare(policy, "packed")
    optimizer = make_optimizer(policy)
    print(
        "response  row's tokens  seconds  of attention  us a token without it  peak MB  KB a token"
    )
    rows = []
    for length in GROWING_RESPONSES:
        groups = make_groups([GROWING_PROMPT], [length] * GROWING_COUNT, policy.config.vocab_size)
        tokens = packed_tokens(groups[0])
        took, attention = [], []
        for number in range(size.rounds + 1):  # the first is to warm up
            started = time.perf_counter()
            step("packed", policy, optimizer, groups)
            between = time.perf_counter()
            attend_alone(policy, groups)
            if number > 0:
                took.append(between - started)
                attention.append(time.perf_counter() - between)
        _, peak = in_fresh_process(step_memory, "packed", size, groups)
        seconds, own = min(took), min(attention)
        row = {
            "response_tokens": length,
            "tokens": tokens,
            "seconds": round(seconds, 4),
            "attention_s": round(own, 4),
            "us_per_token_without_attention": round(1e6 * (seconds - own) / tokens, 1),
            "peak_mb": round(peak / 1e6, 1),
            "kb_per_token": round(peak / 1e3 / tokens, 1),
        }
        rows.append(row)
        print(
            f"{length:8}  {tokens:12}  {seconds:7.3f}  {own:12.3f}  "
            f"{row['us_per_token_without_attention']:21}  {row['peak_mb']:7}  "
            f"{row['kb_per_token']:10}",
            flush=True,
        )
    return {"model": "random", "threads": torch.get_num_threads(), "rows": rows}


def attend_alone(policy: PreTrainedModel, groups: Sequence[Group]) -> None:
    """Attention of all layers over a step's row, forward and backward, on random numbers."""
    config = policy.config
    kind = ATTENTIONS[config._attn_implementation.removeprefix("packed_")]
    row = pack(*sequences(groups), share_prompts=True, device=DEVICE)
    plan = kind.plan(row, None)
    size = config.hidden_size // config.num_attention_heads
    query, key, value = (
        torch.randn(1, heads, row.input_ids.shape[1], size, dtype=DTYPE, device=DEVICE)
        for heads in (config.num_attention_heads, *[config.num_key_value_heads] * 2)
    )
    leaves = [x.requires_grad_() for x in (query, key, value)]
    for _ in range(config.num_hidden_layers):
        out = kind.attend(query, key, value, plan, None, None)
        torch.autograd.grad(out, leaves, query.detach())


def main(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small random model")
    parser.add_argument("--grow", action="store_true", help="a table of growing responses")
    parser.add_argument("--groups", type=int, help="prompts in a step")
    parser.add_argument("--responses", type=int, help="to each prompt")
    parser.add_argument("--rounds", type=int, default=3, help="of which the median counts")
    given = parser.parse_args(arguments)
    size = Size(
        quick=given.quick or given.grow,
        groups=given.groups or (2 if given.quick else 3),
        responses=given.responses or (4 if given.quick else 8),
        rounds=given.rounds,
    )
    if given.grow:
        return grow(size)
    policy = open_policy(size)
    rng = np.random.default_rng(0)
    groups = make_groups(
        draw_lengths(QUESTIONS, size.groups, rng),
        draw_lengths(ANSWERS, size.groups * size.responses, rng),
        policy.config.vocab_size,
    )
    prompts, responses = sequences(groups)
    response_tokens = sum(len(r) for r in responses)
    padded_tokens = len(responses) * (max(len(p) for p in prompts) + PADDED_RESPONSE)
    tokens = {"padded": padded_tokens, "packed": sum(packed_tokens(group) for group in groups)}
    say(
        f"{len(responses)} responses of {response_tokens / len(responses):.0f} tokens to "
        f"{len(groups)} prompts: {tokens['padded']} tokens padded, {tokens['packed']} packed"
    )

    memory = {}
    for way in WAYS:
        rest, memory[way] = in_fresh_process(step_memory, way, size, groups)
        say(f"{way}: {memory[way] / 1e6:,.0f} MB above {rest / 1e6:,.0f} MB at rest")

    cosine = compare_gradients(policy, groups[:1])
    say(f"cosine between the gradients of both, of one group: {cosine:.6f}")
    seconds, rates = step_times(policy, groups, size.rounds)
    needed = model_flops(policy).of(*sequences(groups), share_prompts=True)
    result: dict[str, Any] = {
        "speedup_vs_padded": seconds["padded"] / seconds["packed"],
        "peak_memory_ratio": memory["padded"] / memory["packed"],
        "mfu": needed / seconds["packed"] / max(rates),
        "mfu_of_median_product": needed / seconds["packed"] / median(rates),
        "product_gflop_per_s": max(rates) / 1e9,
        "median_product_gflop_per_s": median(rates) / 1e9,
        "needed_gflop": needed / 1e9,
        "gradient_cosine": cosine,
        "response_tokens_per_s": response_tokens / seconds["packed"],
    }
    for way in WAYS:
        result[f"{way}_s"] = seconds[way]
        result[f"{way}_mb"] = memory[way] / 1e6
    return {
        **{name: float(f"{value:.5g}") for name, value in result.items()},
        **{f"{way}_tokens": tokens[way] for way in WAYS},
        "response_tokens": response_tokens,
        "responses": len(responses),
        "groups": len(groups),
        "model": "random" if size.quick else "SmolLM2-135M",
        "dtype": str(DTYPE).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
