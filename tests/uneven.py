"""Roles of very different speed, for tests: a searcher or a trainer that sleeps."""

from __future__ import annotations

import os
import time

from losses import LossOutput, tb_vargrad
from tasks.task import Problem
from tests.digits import Digits
from trajectory import Batch


class SlowSearchers(Digits):
    """Digits, whose scores keep some ranks from everything else for a while."""

    in_workers = False

    def __init__(self, slow_ranks: list[int], seconds: float, **options: int) -> None:
        super().__init__(**options)
        self.seconds = seconds if int(os.environ.get("RANK", 0)) in slow_ranks else 0.0

    def score(self, problems: list[Problem], responses: list[str]) -> list[dict[str, float]]:
        time.sleep(self.seconds)
        return super().score(problems, responses)


def slow_tb(batch: Batch, *, beta: float, seconds: float) -> LossOutput:
    """`tb_vargrad` that takes longer, on every micro-batch."""
    time.sleep(seconds)
    return tb_vargrad(batch, beta=beta)
