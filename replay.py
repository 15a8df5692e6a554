"""`mode=replay`: the trainers of a recorded asynchronous run once more, without its searchers.

Each trainer is given the trajectories of the run's `.traj` files at the moments that its event log
names: the same draws follow, so the same losses. Needs `run.save_trajectories=true` in the recorded
run, and as many trainers as it had.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

from events import EXPIRED, PUBLISHED, read_events
from metrics import read_metrics, write_summary
from offline import read_messages
from trainer import (
    TrainerConfig,
    TrainerParts,
    complete_reference,
    draw,
    report,
    reset_reference,
    update_policy,
)


def replay(cfg: TrainerConfig, parts: TrainerParts, folder: Path) -> None:
    """Trains as the recorded run did, and compares the losses; all trainers must call it.

    Args:
        folder: of the recorded run.

    Raises:
        ValueError: the record is incomplete.
        RuntimeError: another draw came of it: the code or the settings have changed.
    """
    rank = parts.ranks.rank
    steps, threads = read_events(
        folder / "events" / f"trainer-{rank}.jsonl", parts.ranks.num_trainers
    )
    torch.set_num_threads(threads)  # sums are split by threads
    messages = list(read_messages(folder / "trajectories" / f"trainer-{rank}.traj"))
    losses = recorded_losses(folder)
    largest, compared = 0.0, 0
    parts.totals.training_started = time.monotonic()
    for recorded in steps[: cfg.steps]:
        step, started = recorded.step, time.monotonic()
        for event in recorded.before:
            if event == PUBLISHED:
                parts.buffer.new_window()
            elif event == EXPIRED:
                parts.buffer.expire(step)
            elif isinstance(event, int) and event < len(messages):
                parts.buffer.add(messages[event])
            else:
                raise ValueError(f"{folder}: message {event} is missing from its .traj file")
        if cfg.reference_reset_every and step and step % cfg.reference_reset_every == 0:
            reset_reference(parts, version=step)
        groups = draw(cfg, parts, cfg.batch_size // cfg.responses_per_prompt, step)
        if [item for group in groups for item in group.items] != recorded.items:
            raise RuntimeError(
                f"step {step} draws other responses than the recorded run did: code, data or "
                "settings are not the same"
            )
        complete_reference(cfg, parts, groups)
        values = update_policy(cfg, parts, groups, step)
        report(parts, step, groups, values, time.monotonic() - started, 0)
        if step + 1 in losses:
            compared += 1
            largest = max(largest, abs(values["loss/total"] - losses[step + 1]))
    if parts.metrics is None:
        return
    summary = {
        "steps": len(steps[: cfg.steps]),
        "compared_losses": compared,
        "largest_loss_difference": largest,
        "largest_loss": max((abs(loss) for loss in losses.values()), default=None),
    }
    write_summary(parts.run_dir, summary)
    parts.metrics.note(f"replayed {compared} losses: the largest difference is {largest:.3g}")


def recorded_losses(folder: Path) -> dict[int, float]:
    """The last loss that a run has logged of each step, by steps done."""
    return {
        int(record["step"]): record["loss/total"]
        for record in read_metrics(folder)
        if record.get("loss/total") is not None
    }
