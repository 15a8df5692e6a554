"""A task whose rewards go wrong; light, because every worker process imports it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tasks.arithmetic import Arithmetic
from tasks.task import Problem


@dataclass(slots=True, kw_only=True)
class Unruly(Arithmetic):
    """Sums; scoring the responses to one prompt in 53 goes wrong.

    Attributes:
        how: hang, crash, raise or nan.
    """

    how: str

    def score(self, problems: Sequence[Problem], responses: Sequence[str]) -> list[Any]:
        if problems[0].prompt_id % 53 != 3:
            return Arithmetic.score(self, problems, responses)
        if self.how == "hang":
            time.sleep(3600)
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "raise":
            raise RuntimeError("this reward fails")
        return [{"correct": float("nan")} for _ in problems]
