"""Estimates from graded responses: pass@k, and intervals that resample problems. Pure numpy.

Every figure is a mean over problems of one value per problem, so one bootstrap serves them all: a
problem is drawn with all its responses, which are not independent of each other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

LEVEL = 0.95  # of the intervals
_DRAWS_AT_ONCE = 4_000_000  # resampled problems in memory


def pass_at_k(num_responses: int, num_correct: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k responses is right, from n >= k of them.

    1 - C(n - c, k) / C(n, k): the share of the k-subsets of the n that hold one of the c right
    ones (arXiv 2107.03374, Eq. 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)

    Raises:
        ValueError: k is not in 1..n, or c not in 0..n.
    """
    n, c = num_responses, num_correct
    if not 1 <= k <= n or not 0 <= c <= n:
        raise ValueError(f"pass@{k} of {n} responses with {c} right ones: 1 <= k <= n, 0 <= c <= n")
    if n - c < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(n - c + 1, n + 1)))


def powers_of_two(limit: int) -> list[int]:
    """1, 2, 4, ... up to `limit`.

    >>> powers_of_two(20)
    [1, 2, 4, 8, 16]
    """
    return [1 << i for i in range(limit.bit_length())]


def intervals(
    values: Mapping[str, np.ndarray],
    *,
    resamples: int,
    seed: int,
    shares: Collection[str] = (),
) -> dict[str, dict[str, float]]:
    """Mean over problems of each kind of value, with its 95% interval.

    The interval is the percentile bootstrap's: quantiles of the mean over P problems drawn with
    replacement. All kinds of value see the same draws, whatever other kinds there are. Where every
    problem has the same value the bootstrap knows no spread; for the kinds in `shares`, whose
    values lie in 0..1, a mean of exactly 0 or 1 then gets the binomial's exact interval
    (Clopper-Pearson: 0 of P right is compatible with up to 1 - 0.025^(1/P)).

    >>> estimate = intervals({"a": np.zeros(30)}, resamples=100, seed=0, shares=["a"])["a"]
    >>> estimate["mean"], estimate["low"], round(estimate["high"], 4)
    (0.0, 0.0, 0.1157)

    Args:
        values: name -> float [P], one value a problem.
        resamples: bootstrap draws.
        seed: of the draws.
        shares: names of the values that are shares.

    Returns:
        name -> {"mean", "low", "high"}.

    Raises:
        ValueError: there is no problem.
    """
    columns = {name: np.asarray(column, dtype=np.float64) for name, column in values.items()}
    num_problems = max((len(column) for column in columns.values()), default=0)
    if num_problems == 0:
        raise ValueError("no problems: there is nothing to estimate")
    means: dict[str, list[np.ndarray]] = {name: [] for name in columns}
    rng = np.random.default_rng(seed)
    chunk = max(1, _DRAWS_AT_ONCE // num_problems)
    for start in range(0, resamples, chunk):
        rows = min(chunk, resamples - start)
        draws = rng.integers(num_problems, size=(rows, num_problems))
        draws += np.arange(rows)[:, None] * num_problems
        counts = np.bincount(draws.ravel(), minlength=rows * num_problems)
        counts = counts.reshape(rows, num_problems)  # how often each problem was drawn [rows, P]
        for name, column in columns.items():
            # not a matrix product: its last bits would depend on the number of threads
            means[name].append((counts * column).sum(axis=1) / num_problems)
    return {
        name: _interval(column, np.concatenate(means[name]), name in shares)
        for name, column in columns.items()
    }


def _interval(column: np.ndarray, means: np.ndarray, is_share: bool) -> dict[str, float]:
    tail = (1.0 - LEVEL) / 2
    mean = float(column.mean())
    low, high = np.quantile(means, [tail, 1.0 - tail]).tolist()
    if is_share and mean == 0.0:
        high = 1.0 - tail ** (1.0 / len(column))
    if is_share and mean == 1.0:
        low = tail ** (1.0 / len(column))
    return {"mean": mean, "low": low, "high": high}
