"""What the scale of the gradient changes: trajectory balance as printed against normalised.

    python experiments/gradient_scale.py

The gradient of arXiv 2503.18929's Eq. 5 is 2 / beta times that of A grad log pi (`losses.py`). Adam
divides a constant factor out again; a clipping threshold does not, and an annealed beta changes the
factor while Adam remembers. So `loss.normalize` true and false are run on arithmetic, with constant
and annealed beta, with and without clipping. Lock-step runs: at the same seed nothing but the scale
differs between the two. Prints and writes a table, with the share of steps whose gradient is cut.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import sys
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from experiments.warm import NUM_RANKS, Server  # noqa: E402
from metrics import read_metrics  # noqa: E402

CLIP = 1.0
BETAS = {
    "0.2": ["trainer.beta.initial=0.2"],
    "0.5 to 0.05": ["trainer.beta.initial=0.5", "trainer.beta.final=0.05"],
}


def overrides(beta: str, clip: bool, normalize: bool, seed: int, steps: int) -> list[str]:
    """The command line of train.py for one run."""
    return [
        *("task=arithmetic", "model=tiny", "engine=hf", "mode=sync", f"seed={seed}"),
        *(f"loss.normalize={str(normalize).lower()}", *BETAS[beta]),
        f"trainer.max_grad_norm={CLIP if clip else 'null'}",
        *(f"trainer.steps={steps}", "trainer.batch_size=128", "eval.every=0"),
        "run.rollouts_every=0",
    ]


def measure(folder: Path) -> dict[str, float]:
    """A finished run's accuracy, gradient norms, and share of steps beyond `CLIP`."""
    records = read_metrics(folder)
    norms = [r["loss/grad_norm"] for r in records if "loss/grad_norm" in r]
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "accuracy": summary["accuracy_after"],
        "norm_first": fmean(norms[:10]),
        "norm_last": fmean(norms[-10:]),
        "beyond_clip": fmean(norm > CLIP for norm in norms),
    }


def table(results: dict[tuple[str, bool, bool], list[dict[str, float]]]) -> str:
    """Markdown; a row a setting, means over seeds."""
    lines = [
        "| beta | clipping | scale | accuracy, by seed | mean | gradient norm, first and last 10 "
        f"steps | steps with norm > {CLIP:g} |",
        "|---|---|---|---|---|---|---|",
    ]
    for (beta, clip, normalize), runs in results.items():
        mean = {name: fmean(run[name] for run in runs) for name in runs[0]}
        by_seed = ", ".join(f"{run['accuracy']:.3f}" for run in runs)
        lines.append(
            f"| {beta} | {CLIP if clip else 'none'} | {'normalised' if normalize else 'as printed'}"
            f" | {by_seed} | {mean['accuracy']:.3f} | {mean['norm_first']:.3g}, "
            f"{mean['norm_last']:.3g} | {mean['beyond_clip']:.0%} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--out", type=Path, default=ROOT / "experiments" / "results")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "gradient_scale")
    args = parser.parse_args()
    server = Server()
    args.runs.mkdir(parents=True, exist_ok=True)
    settings = list(product(BETAS, (False, True), (True, False)))
    results: dict[tuple[str, bool, bool], list[dict[str, float]]] = {s: [] for s in settings}
    for number, (setting, seed) in enumerate(product(settings, args.seeds), start=1):
        beta, clip, normalize = setting
        name = "-".join(
            [beta.replace(" ", ""), "clip" if clip else "free", str(normalize), str(seed)]
        )
        folder = args.runs / name
        if not (folder / "summary.json").is_file():  # an earlier call may have done it
            shutil.rmtree(folder, ignore_errors=True)  # of a call that was interrupted
            logs = [args.runs / f"{name}.rank{rank}.log" for rank in range(NUM_RANKS)]
            where = [f"run.root={json.dumps(str(args.runs.resolve()))}", f"run.name={name}"]
            chosen = [*overrides(beta, clip, normalize, seed, args.steps), *where]
            reason = server.execute(chosen, logs, timeout_s=1800)
            if reason:
                print(f"error: {name}: {reason}, see {logs[0]}", file=sys.stderr)
                return 1
        figures = measure(folder)
        results[setting].append(figures)
        shown = "  ".join(f"{key} {value:.3g}" for key, value in figures.items())
        print(f"[{number}/{len(settings) * len(args.seeds)}] {name}: {shown}", flush=True)
    text = table(results)
    write(args.out, text, args)
    print(text)
    return 0


def write(out: Path, text: str, args: Any) -> None:
    """The table with the command that made it."""
    out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "experiments/gradient_scale.py", *sys.argv[1:]])
    (out / "gradient_scale.md").write_text(
        "# Trajectory balance as printed and normalised\n\n"
        f"`{command}`: arithmetic, model tiny, lock-step, {args.steps} steps of 128 responses, "
        f"seeds {', '.join(map(str, args.seeds))}; held-out greedy accuracy of 256 sums.\n\n"
        f"{text}\n"
    )


if __name__ == "__main__":
    sys.exit(main())
