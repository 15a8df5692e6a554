"""pass@k against every subset, the bootstrap against its coverage."""

from __future__ import annotations

import doctest
import itertools
import math
from fractions import Fraction

import numpy as np
import pytest

import estimates
from estimates import intervals, pass_at_k, powers_of_two


def test_examples() -> None:
    results = doctest.testmod(estimates)
    assert results.attempted > 0 and results.failed == 0


# --------------------------------------------------------------------------- pass@k


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_response(n: int) -> None:
    for c in range(n + 1):
        right = [i < c for i in range(n)]
        for k in range(1, n + 1):
            subsets = list(itertools.combinations(right, k))
            share = sum(any(subset) for subset in subsets) / len(subsets)
            assert pass_at_k(n, c, k) == pytest.approx(share, abs=1e-12)


@pytest.mark.parametrize("k", [1, 2, 5, 10])
def test_pass_at_k_is_unbiased(k: int) -> None:
    n = 10
    for p in (0.05, 0.3, 0.9):
        chances = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
        mean = sum(chance * pass_at_k(n, c, k) for c, chance in enumerate(chances))
        assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)


@pytest.mark.parametrize(("n", "c", "k"), [(1024, 3, 256), (1024, 1, 1), (4096, 700, 512)])
def test_pass_at_k_of_many_responses(n: int, c: int, k: int) -> None:
    exact = 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-9)


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_pass_at_k_refuses_what_can_not_be(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k}"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(("limit", "powers"), [(1, [1]), (3, [1, 2]), (16, [1, 2, 4, 8, 16])])
def test_powers_of_two(limit: int, powers: list[int]) -> None:
    assert powers_of_two(limit) == powers


# --------------------------------------------------------------------------- intervals


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    """Accuracies of 80 problems, each with 4 responses that succeed or fail together somewhat."""
    rng = np.random.default_rng(0)
    num_problems, truth, trials = 80, 0.3, 400
    covered = 0
    for trial in range(trials):
        ability = rng.beta(0.6, 1.4, size=num_problems)  # mean 0.3
        values = rng.binomial(4, ability) / 4
        estimate = intervals({"a": values}, resamples=400, seed=trial)["a"]
        assert estimate["low"] <= estimate["mean"] <= estimate["high"]
        assert estimate["mean"] == pytest.approx(values.mean())
        covered += estimate["low"] <= truth <= estimate["high"]
    # four standard deviations of a binomial around 0.95, and a little for so few problems
    assert 0.90 < covered / trials < 0.99


def test_an_interval_is_as_wide_as_the_standard_error_says() -> None:
    values = np.random.default_rng(1).random(500)
    estimate = intervals({"a": values}, resamples=4000, seed=0)["a"]
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert estimate["high"] - estimate["mean"] == pytest.approx(half, rel=0.08)
    assert estimate["mean"] - estimate["low"] == pytest.approx(half, rel=0.08)


def test_a_seed_decides_and_other_values_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"a": np.random.default_rng(2).random(50), "b": np.arange(50.0)}
    both = intervals(values, resamples=300, seed=5)
    assert intervals(values, resamples=300, seed=5) == both
    assert intervals({"a": values["a"]}, resamples=300, seed=5)["a"] == both["a"]
    assert intervals(values, resamples=300, seed=6)["a"] != both["a"]
    monkeypatch.setattr(estimates, "_DRAWS_AT_ONCE", 50 * 7)  # a few resamples at a time
    assert intervals(values, resamples=300, seed=5) == both


@pytest.mark.parametrize("right", [0, 1])
@pytest.mark.parametrize("num_problems", [1, 30])
def test_a_share_of_none_or_all_has_the_binomials_interval(right: int, num_problems: int) -> None:
    values = {"share": np.full(num_problems, right), "other": np.full(num_problems, right)}
    found = intervals(values, resamples=50, seed=0, shares=["share"])
    assert found["other"] == {"mean": right, "low": right, "high": right}
    # the bound is where all P problems agree with a chance of 2.5%
    bound = found["share"]["high"] if right == 0 else 1 - found["share"]["low"]
    assert (1 - bound) ** num_problems == pytest.approx(0.025)
    assert found["share"]["low" if right == 0 else "high"] == right


def test_a_share_of_some_has_the_bootstraps_interval() -> None:
    values = {"share": np.array([0.0, 1.0, 0.0, 1.0]), "same": np.full(4, 0.5)}
    found = intervals(values, resamples=200, seed=0, shares=["share", "same"])
    assert found["share"] == intervals({"a": values["share"]}, resamples=200, seed=0)["a"]
    assert found["same"] == {"mean": 0.5, "low": 0.5, "high": 0.5}


def test_no_problems_is_an_error() -> None:
    with pytest.raises(ValueError, match="no problems"):
        intervals({"a": np.zeros(0)}, resamples=10, seed=0)
