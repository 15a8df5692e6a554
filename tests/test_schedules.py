"""beta_at and lr_at at their corners."""

from __future__ import annotations

import doctest

import pytest

import schedules
from schedules import beta_at, lr_at

TLDR = dict(initial=1.0, final=0.05, target_step=128, stop_step=32)
GSM8K = dict(initial=0.012, final=0.004, target_step=500, stop_step=500)


def paper_beta(u: int, *, initial: float, final: float, target_step: int, stop_step: int) -> float:
    """The published formula as printed, u counted from 1."""
    if u < stop_step:
        return final * ((u - 1) / target_step) + initial * (1 - (u - 1) / target_step)
    return final


@pytest.mark.parametrize("schedule", [TLDR, GSM8K])
def test_beta_is_the_papers_schedule(schedule):
    for step in range(600):
        assert beta_at(step, **schedule) == pytest.approx(paper_beta(step + 1, **schedule))


def test_beta_starts_at_initial_and_ends_at_final():
    assert beta_at(0, **GSM8K) == 0.012
    assert beta_at(498, **GSM8K) == pytest.approx(0.012 - 0.008 * 498 / 500)
    assert beta_at(499, **GSM8K) == 0.004
    assert beta_at(10_000, **GSM8K) == 0.004


def test_beta_jumps_when_aborted_early():
    assert beta_at(30, **TLDR) == pytest.approx(1 - 0.95 * 30 / 128)  # u = 31: about 0.78
    assert beta_at(31, **TLDR) == 0.05  # u = 32 = stop_step


def test_constant_beta_needs_no_schedule():
    for step in (0, 1, 1000):
        assert beta_at(step, initial=0.1, final=0.1, target_step=0, stop_step=0) == 0.1


def test_beta_without_a_line_is_final_at_once():
    assert beta_at(0, initial=1.0, final=0.1, target_step=0, stop_step=0) == 0.1


def test_beta_refuses_to_overshoot():
    with pytest.raises(ValueError, match="stop_step.*target_step"):
        beta_at(0, initial=1.0, final=0.1, target_step=10, stop_step=11)


def lr(step: int, kind: str, **changes: float) -> float:
    settings = dict(
        peak=2.0, warmup_steps=4, stable_steps=3, decay_steps=5, total_steps=14, min_ratio=0.0
    )
    return lr_at(step, kind=kind, **{**settings, **changes})


@pytest.mark.parametrize("kind", ["wsd", "linear", "constant"])
def test_warm_up_is_never_zero_and_reaches_the_peak(kind):
    assert [lr(step, kind) for step in range(4)] == [0.5, 1.0, 1.5, 2.0]
    assert lr(4, kind) == 2.0
    assert lr(0, kind, warmup_steps=0) == 2.0


def test_wsd_is_flat_then_decays():
    assert [lr(step, "wsd") for step in range(4, 8)] == [2.0] * 4  # stable, and the decay's start
    assert [lr(step, "wsd") for step in range(8, 13)] == pytest.approx([1.6, 1.2, 0.8, 0.4, 0.0])
    assert lr(1000, "wsd") == 0.0
    assert lr(7, "wsd", decay_steps=0) == 0.0


def test_linear_reaches_zero_at_the_end_of_the_run():
    assert lr(9, "linear") == pytest.approx(1.0)  # halfway from step 4 to step 14
    assert lr(13, "linear") == pytest.approx(0.2)  # the last step still learns
    assert lr(14, "linear") == 0.0
    assert lr(15, "linear") == 0.0


@pytest.mark.parametrize("kind", ["wsd", "linear"])
def test_decay_ends_at_the_floor(kind):
    rates = [lr(step, kind, min_ratio=0.25) for step in range(4, 40)]
    assert rates[0] == 2.0
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.5)


def test_constant_stays():
    assert lr(10_000, "constant") == 2.0


def test_user_errors_name_the_value():
    with pytest.raises(ValueError, match="cosine"):
        lr(0, "cosine")
    with pytest.raises(ValueError, match="-1"):
        lr(-1, "wsd")
    with pytest.raises(ValueError, match="-1"):
        beta_at(-1, **TLDR)


def test_documented_examples_hold():
    results = doctest.testmod(schedules)
    assert results.attempted >= 5 and results.failed == 0
