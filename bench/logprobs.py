"""Log-probs in blocks against log-probs from all logits: time, memory and gradients.

    python bench/logprobs.py            two vocabularies; the last line is one JSON object
    python bench/logprobs.py --grow     response lengths and vocabularies: does it grow linearly?
    python bench/logprobs.py --blocks   block shapes: what the defaults were chosen from

A forward and a backward pass from hidden states through the head, with a gradient of its own for
each token, two ways that take turns:

    plain    `-cross_entropy((hidden @ weight.T).float() / temperature)`, over all logits
    blocks   `logprobs.selected_logprobs` with its default blocks

Times are wall-clock, the median of several rounds; `cpu_time_ratio` counts the process's own use
alone. Memory is the peak of the resident set of a process that does nothing else (Linux; on a GPU
what torch has allocated), above its rest with the inputs, less the gradients, which both must
return: plain need not hold them at its peak, so it is measured too small rather than too large.
`max_gradient_difference` is from plain's formula in float64, in units of a gradient's largest
entry; plain's own in float32 stands beside it. The `bfloat16` figures have the matrix products
under autocast; the others are float32. At the top level is the worst of both vocabularies.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from measure import in_fresh_process, peak_bytes, say, start_peak

from logprobs import CHUNK_TOKENS, CHUNK_VOCABULARY, selected_logprobs

VOCABULARIES = {"32k": 32_768, "152k": 151_936}
GROWING_VOCABULARIES = (32_768, 65_536, 151_936)
LENGTHS = (128, 256, 512, 1024, 2048, 4096)
BLOCKS = ((512, 1024), (1024, 1024), (4096, 512), (4096, 1024), (4096, 2048), (4096, 4096))
TEMPERATURE = 0.7
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one measurement computes."""

    tokens: int
    vocabulary: int
    hidden: int
    bfloat16: bool = False


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """Hidden states [N, H], head [V, H], targets [N] and each token's gradient [N]."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    gradient: Tensor


Function = Callable[[Inputs], Tensor]


def make_inputs(case: Case) -> Inputs:
    generator = torch.Generator(DEVICE).manual_seed(0)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return torch.empty(*shape, device=DEVICE).normal_(0, std, generator=generator)

    return Inputs(
        hidden=normal(case.tokens, case.hidden).requires_grad_(),
        # Logits of standard deviation 2, however wide the model.
        weight=normal(case.vocabulary, case.hidden, std=2 * case.hidden**-0.5).requires_grad_(),
        targets=torch.randint(case.vocabulary, (case.tokens,), device=DEVICE, generator=generator),
        gradient=normal(case.tokens),
    )


def plain(x: Inputs) -> Tensor:
    logits = F.linear(x.hidden, x.weight)
    return -F.cross_entropy(logits.float() / TEMPERATURE, x.targets, reduction="none")


def in_blocks(
    x: Inputs, chunk_tokens: int = CHUNK_TOKENS, chunk_vocabulary: int = CHUNK_VOCABULARY
) -> Tensor:
    return selected_logprobs(
        x.hidden,
        x.weight,
        None,
        x.targets,
        temperature=TEMPERATURE,
        chunk_tokens=chunk_tokens,
        chunk_vocabulary=chunk_vocabulary,
    )[0]


def forward_backward(function: Function, x: Inputs, bfloat16: bool) -> tuple[Tensor, ...]:
    """Gradients of hidden states and head."""
    context = torch.autocast(DEVICE.type, dtype=torch.bfloat16) if bfloat16 else nullcontext()
    with context:
        logprobs = function(x)
    grads = torch.autograd.grad(logprobs, (x.hidden, x.weight), x.gradient)
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return grads


# --------------------------------------------------------------------------- time


def times(
    functions: dict[str, Function], case: Case, rounds: int
) -> dict[str, tuple[float, float]]:
    """Median seconds of wall-clock and of processor use of each, taking turns."""
    x = make_inputs(case)
    wall: dict[str, list[float]] = {name: [] for name in functions}
    cpu: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 1):  # the first is to warm up
        for name, function in functions.items():
            before = time.perf_counter(), time.process_time()
            forward_backward(function, x, case.bfloat16)
            if turn > 0:
                wall[name].append(time.perf_counter() - before[0])
                cpu[name].append(time.process_time() - before[1])
    return {name: (median(wall[name]), median(cpu[name])) for name in functions}


def gradient_errors(case: Case) -> dict[str, float]:
    """Largest difference of each way's float32 gradients from the formula in float64.

    In units of the largest entry. Few tokens, for float64's sake.
    """
    x = make_inputs(Case(**{**asdict(case), "tokens": min(case.tokens, 128)}))
    leaves = (x.hidden, x.weight)
    doubles = [leaf.detach().double().requires_grad_() for leaf in leaves]
    logits = F.linear(*doubles) / TEMPERATURE
    logprobs = -F.cross_entropy(logits, x.targets, reduction="none")
    exact = torch.autograd.grad(logprobs, doubles, x.gradient.double())
    return {
        function.__name__: max(
            float((grad - true).abs().max() / true.abs().max())
            for grad, true in zip(forward_backward(function, x, False), exact, strict=True)
        )
        for function in (plain, in_blocks)
    }


# --------------------------------------------------------------------------- memory


def pass_memory(function: Function, case: Case) -> int:
    """Most bytes above the inputs and the gradients; in a process that does nothing else."""
    tiny = make_inputs(Case(tokens=64, vocabulary=256, hidden=64, bfloat16=case.bfloat16))
    forward_backward(function, tiny, case.bfloat16)  # what libraries allocate but once
    x = make_inputs(case)
    rest = start_peak(DEVICE)
    grads = forward_backward(function, x, case.bfloat16)
    return peak_bytes(DEVICE) - rest - sum(grad.nbytes for grad in grads)


# --------------------------------------------------------------------------- what is printed


def compare(hidden: int, tokens: int, rounds: int) -> dict[str, Any]:
    """The two ways for each vocabulary, and the worst of both."""
    by_vocabulary = {}
    for name, vocabulary in VOCABULARIES.items():
        case = Case(tokens=tokens, vocabulary=vocabulary, hidden=hidden)
        result: dict[str, float] = {}
        for suffix, rough in (("", False), ("_bfloat16", True)):
            this = Case(**{**asdict(case), "bfloat16": rough})
            memory = {
                f.__name__: in_fresh_process(pass_memory, f, this) for f in (plain, in_blocks)
            }
            took = times({"plain": plain, "in_blocks": in_blocks}, this, rounds)
            result["memory_ratio" + suffix] = memory["plain"] / memory["in_blocks"]
            result["time_ratio" + suffix] = took["in_blocks"][0] / took["plain"][0]
            result["cpu_time_ratio" + suffix] = took["in_blocks"][1] / took["plain"][1]
            for way in memory:
                result[f"{way}_s{suffix}"] = took[way][0]
                result[f"{way}_mb{suffix}"] = memory[way] / 1e6
                say(
                    f"{name}{suffix} {way}: {took[way][0]:.2f} s ({took[way][1]:.2f} s of "
                    f"processors), {memory[way] / 1e6:,.1f} MB"
                )
        errors = gradient_errors(case)
        say(f"{name} gradients' errors: " + ", ".join(f"{k} {v:.1e}" for k, v in errors.items()))
        result["max_gradient_difference"] = errors["in_blocks"]
        result["plain_max_gradient_difference"] = errors["plain"]
        by_vocabulary[name] = {k: float(f"{v:.4g}") for k, v in result.items()}
    worst = {
        key: (min if key.startswith("memory_ratio") else max)(
            r[key] for r in by_vocabulary.values()
        )
        for key in ("memory_ratio", "time_ratio", "cpu_time_ratio", "max_gradient_difference")
    }
    return {**worst, **surroundings(hidden), "tokens": tokens, "by_vocabulary": by_vocabulary}


def grow(hidden: int, rounds: int) -> dict[str, Any]:
    """Time and peak memory of the blocks as responses and vocabularies grow."""
    print("vocabulary  tokens  seconds  ns a token and word  peak MB  MB of all logits")
    rows = []
    for vocabulary in GROWING_VOCABULARIES:
        for tokens in LENGTHS:
            case = Case(tokens=tokens, vocabulary=vocabulary, hidden=hidden)
            seconds, _ = times({"in_blocks": in_blocks}, case, rounds)["in_blocks"]
            pairs = tokens * vocabulary
            row = {
                "vocabulary": vocabulary,
                "tokens": tokens,
                "seconds": round(seconds, 3),
                "ns_per_token_and_word": round(1e9 * seconds / pairs, 2),
                "peak_mb": round(in_fresh_process(pass_memory, in_blocks, case) / 1e6, 1),
            }
            rows.append(row)
            print(
                f"{vocabulary:10}  {tokens:6}  {seconds:7.2f}  {row['ns_per_token_and_word']:19}  "
                f"{row['peak_mb']:7}  {4e-6 * pairs:16.0f}",
                flush=True,
            )
    return {**surroundings(hidden), "rows": rows}


def block_shapes(hidden: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Time of block shapes over plain's."""
    ratios: dict[str, float] = {}
    for name, vocabulary in VOCABULARIES.items():
        for rough in (False, True):
            case = Case(tokens=tokens, vocabulary=vocabulary, hidden=hidden, bfloat16=rough)
            functions: dict[str, Function] = {"plain": plain}
            for n, v in BLOCKS:
                functions[f"{n}x{v}"] = lambda x, n=n, v=v: in_blocks(x, n, v)  # type: ignore
            took = times(functions, case, rounds)
            label = f"{name} {'bfloat16' if rough else 'float32'}"
            for shape, (wall, cpu) in took.items():
                ratios[f"{label} {shape}"] = round(wall / took["plain"][0], 3)
                ratio = cpu / took["plain"][1]
                say(
                    f"{label} {shape}: {wall:.2f} s, {wall / took['plain'][0]:.2f} of plain's "
                    f"({ratio:.2f} of its processor time)"
                )
    return {**surroundings(hidden), "tokens": tokens, "time_ratios": ratios}


def surroundings(hidden: int) -> dict[str, Any]:
    device = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu"
    return {"hidden": hidden, "device": device, "threads": torch.get_num_threads()}


def main(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--grow", action="store_true", help="a table of growing sizes")
    parser.add_argument("--blocks", action="store_true", help="a table of block shapes")
    parser.add_argument("--hidden", type=int, default=896, help="hidden size (Qwen2.5-0.5B's)")
    parser.add_argument("--tokens", type=int, default=2048, help="response tokens")
    parser.add_argument("--rounds", type=int, default=5, help="of which the median counts")
    options = parser.parse_args(arguments)
    if options.grow:
        return grow(options.hidden, options.rounds)
    if options.blocks:
        return block_shapes(options.hidden, options.tokens, options.rounds)
    return compare(options.hidden, options.tokens, options.rounds)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
