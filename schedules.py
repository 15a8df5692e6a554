"""Schedules: beta, the learning rate and m as pure functions of the optimizer step.

Steps are counted from 0: `step` is the number of optimizer steps already done, so the first step
of a run is step 0. Nothing is remembered between calls, and a resumed run needs only its step.
"""

from __future__ import annotations

from typing import Literal, get_args

LRKind = Literal["wsd", "linear", "constant"]


def beta_at(step: int, *, initial: float, final: float, target_step: int, stop_step: int) -> float:
    """The KL coefficient at a step: linear towards `final`, aborted at `stop_step`.

    With u = step + 1 (the paper's count, from 1), from the code behind arXiv 2503.18929, Sec. 5:

        beta = final (u - 1) / target_step + initial (1 - (u - 1) / target_step)    if u < stop_step
        beta = final                                                                otherwise

    With `stop_step < target_step` beta jumps to `final` before the line reaches it.

    Args:
        step: optimizer steps done, >= 0.
        initial, final: reward units per nat; equal values give a constant beta.
        target_step: steps the line would take to reach `final`.
        stop_step: the step u from which beta is `final`; at most `target_step`.

    Raises:
        ValueError: step is negative, or `stop_step` is beyond `target_step`.

    The paper's summarisation run falls from 1 to about 0.78, then jumps:

    >>> beta = dict(initial=1.0, final=0.05, target_step=128, stop_step=32)
    >>> [round(beta_at(step, **beta), 4) for step in (0, 1, 30, 31, 200)]
    [1.0, 0.9926, 0.7773, 0.05, 0.05]
    """
    _check_step(step)
    if initial == final:
        return initial
    if stop_step > target_step:
        raise ValueError(
            f"beta's stop_step ({stop_step}) must be at most its target_step ({target_step}): "
            f"beyond target_step the line has passed the final value {final}"
        )
    if step + 1 >= stop_step:
        return final
    progress = step / target_step
    return final * progress + initial * (1 - progress)


def linear_at(step: int, *, initial: float, final: float, target_step: int) -> float:
    """A straight line from `initial` at step 0 to `final` at `target_step`, then constant.

    >>> [linear_at(step, initial=1.0, final=0.5, target_step=4) for step in (0, 2, 4, 9)]
    [1.0, 0.75, 0.5, 0.5]
    """
    _check_step(step)
    progress = _progress(step, target_step)
    return final * progress + initial * (1 - progress)


def lr_at(
    step: int,
    *,
    kind: LRKind,
    peak: float,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    total_steps: int,
    min_ratio: float = 0.0,
) -> float:
    """The learning rate of a step, all kinds with a linear warm-up.

    Warm-up (`step < warmup_steps`): `peak (step + 1) / warmup_steps`, never 0. After it:

        constant  peak
        linear    from peak at step `warmup_steps` down a line to the floor at step `total_steps`,
                  one step past the last of the run, so that no step is done at 0
        wsd       peak for `stable_steps`, then down a line over `decay_steps`, then the floor

    with the floor at `min_ratio * peak`.

    Args:
        step: optimizer steps done, >= 0.
        kind: 'wsd' (warm-up, stable, decay), 'linear' or 'constant'.
        peak: the largest learning rate.
        warmup_steps: steps of warm-up, 0 for none.
        stable_steps, decay_steps: used by 'wsd' alone.
        total_steps: steps of the run; used by 'linear' alone.
        min_ratio: the floor as a share of peak, in [0, 1].

    Raises:
        ValueError: an unknown kind, or a negative step.

    >>> wsd = dict(kind="wsd", peak=1.0, warmup_steps=2, stable_steps=2, decay_steps=2)
    >>> [lr_at(step, **wsd, total_steps=7) for step in range(7)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.5, 0.0]
    >>> linear = dict(kind="linear", peak=1.0, warmup_steps=0, stable_steps=0, decay_steps=0)
    >>> [lr_at(step, **linear, total_steps=4) for step in range(5)]
    [1.0, 0.75, 0.5, 0.25, 0.0]
    """
    _check_step(step)
    if kind not in get_args(LRKind):
        raise ValueError(f"unknown learning-rate kind {kind!r}: one of {get_args(LRKind)}")
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    after_warmup = step - warmup_steps
    if kind == "constant":
        return peak
    if kind == "linear":
        progress = _progress(after_warmup, total_steps - warmup_steps)
    else:
        progress = _progress(after_warmup - stable_steps, decay_steps)
    return peak * (1 - progress * (1 - min_ratio))


def _progress(done: int, length: int) -> float:
    """Share of a decay that is done, in [0, 1]; a decay of no length is over when it starts."""
    if done < 0:
        return 0.0
    return min(1.0, done / length) if length > 0 else 1.0


def _check_step(step: int) -> None:
    if step < 0:
        raise ValueError(f"step must be 0 or more, got {step}: steps are counted from 0")
