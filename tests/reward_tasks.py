"""Tasks whose rewards misbehave when a response says so. Light: worker processes import it."""

from __future__ import annotations

import ctypes
import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tasks.task import Problem, Unparsed


class Told:
    """The reward of a number is that number; of a command, what becomes of it."""

    name = "told"
    chat = False
    max_prompt_tokens = max_response_tokens = 8
    reward_range = (-1e9, 1e9)

    def __init__(self, scale: float = 1.0, folder: str = "", refuse: str = "") -> None:
        if refuse:
            raise ValueError(refuse)
        self.scale, self.folder = scale, folder

    def problems(self, split: str) -> list[Problem]:
        return [Problem(prompt_id=i, prompt=f"{i}?", answer=str(i)) for i in range(4)]

    def score(self, problems: list[Problem], responses: list[str]) -> list[Any]:
        return [self.one(p, r) for p, r in zip(problems, responses, strict=True)]

    def one(self, problem: Problem, response: str) -> Any:
        if hasattr(self, response):
            return getattr(self, response)()
        return {"value": self.scale * float(response), "of": float(problem.answer)}

    # What returns.
    nan = staticmethod(lambda: {"value": math.nan})
    infinite = staticmethod(lambda: {"value": 1.0, "other": -math.inf})
    huge_sum = staticmethod(lambda: {"value": 1.7e308, "other": 1.7e308})
    huge_int = staticmethod(lambda: {"value": 10**400})
    beyond = staticmethod(lambda: {"value": 1e9, "other": 1e9})
    nothing = staticmethod(lambda: None)
    number = staticmethod(lambda: 1.0)
    text_part = staticmethod(lambda: {"value": "1.0"})
    none_part = staticmethod(lambda: {"value": None})
    no_parts = staticmethod(lambda: {})
    bad_name = staticmethod(lambda: {"Total Reward": 1.0})
    number_name = staticmethod(lambda: {1: 1.0})
    many_parts = staticmethod(lambda: {f"part_{i}": 1.0 for i in range(100_000)})
    long_name = staticmethod(lambda: {"x" * 10_000_000: 1.0})
    true = staticmethod(lambda: {"value": True})
    unparsed = staticmethod(lambda: Unparsed(value=-0.5))
    unparsed_nan = staticmethod(lambda: Unparsed(value=math.nan))

    # What raises.
    def raises(self) -> None:
        raise KeyError("no such\nkey")

    def raises_much(self) -> None:
        raise RuntimeError("x" * 10_000_000)

    def raises_unprintable(self) -> None:
        class Silent(Exception):
            def __str__(self) -> str:
                raise ValueError("no text")

        raise Silent

    def recurses(self) -> None:
        self.recurses()

    def exits(self) -> None:
        sys.exit(3)

    def interrupts(self) -> None:
        raise KeyboardInterrupt

    def asks(self) -> None:
        input("a question: ")

    def fills_memory(self) -> None:
        kept = []
        while True:
            kept.append(bytearray(1 << 30))

    # What ends its process.
    def leaves(self) -> None:
        os._exit(7)

    def kills_itself(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def reads_null(self) -> None:
        ctypes.string_at(0)

    def closes_files(self) -> None:
        os.closerange(0, 256)

    # What hangs.
    def loops(self) -> None:
        while True:
            pass

    def holds_the_lock(self) -> None:
        re.match(r"(a+)+$", "a" * 40 + "b")  # for years, and no thread of the process gets to run

    def ignores_signals(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)

    def starts_another(self) -> None:
        child = subprocess.Popen(["sleep", "1000"])
        Path(self.folder, "sleep.pid").write_text(str(child.pid))
        time.sleep(1000)

    # What is no failure.
    def prints(self) -> dict[str, float]:
        print('{"failed": ""}\n' * 10, '[{}, "ok", "", true]')
        print("\x1b]0;title\x07", "tab\there", file=sys.stderr)
        sys.stdout.flush()
        os.write(1, b'[{"value": 9.0}, "ok", "", true]\n')
        return {"value": 3.0}

    def forks(self) -> dict[str, float]:
        return {"value": float(os.fork() == 0)}  # the child comes back too

    def changes_folder(self) -> dict[str, float]:
        os.chdir("/")
        return {"value": 4.0}


class Facts(Told):
    """Its parts are what it is told of a response."""

    def score(
        self,
        problems: list[Problem],
        responses: list[str],
        *,
        num_tokens: list[int] | None = None,
        reference_logprob: list[float] | None = None,
    ) -> list[Any]:
        count = len(responses)
        tokens = [-1] * count if num_tokens is None else num_tokens
        logprobs = [-1.0] * count if reference_logprob is None else reference_logprob
        return [
            {
                "num_tokens": n,
                "unknown": float(math.isnan(v)),
                "logprob": 0.0 if math.isnan(v) else v,
            }
            for n, v in zip(tokens, logprobs, strict=True)
        ]


class Wrapper(Told):
    """Built from a config with a node of its own inside."""

    def __init__(self, inner: Told, settings: dict[str, Any]) -> None:
        super().__init__(scale=inner.scale * settings["factors"][1])


class Slow(Told):
    """Takes as many seconds as a response says."""

    def one(self, problem: Problem, response: str) -> dict[str, float]:
        time.sleep(float(response))
        return {"pid": float(os.getpid())}


class Echo(Told):
    """Tells a text from others."""

    def one(self, problem: Problem, response: str) -> dict[str, float]:
        return {"length": len(response), "sum": sum(map(ord, response))}


class LeavesAtZero(Told):
    """1 for any response but one that starts with 0, which ends the process."""

    def one(self, problem: Problem, response: str) -> dict[str, float]:
        if response.startswith("0"):
            self.leaves()
        return {"value": 1.0}


class Unruly(Told):
    """Every problem decides what becomes of all responses to it."""

    def __init__(self, max_prompt_tokens: int, max_response_tokens: int) -> None:
        super().__init__()
        self.max_prompt_tokens, self.max_response_tokens = max_prompt_tokens, max_response_tokens

    def problems(self, split: str) -> list[Problem]:
        fates = ["loops", "leaves", "raises", "nan", "beyond", "unparsed", "fine", "fine"]
        return [Problem(prompt_id=i, prompt=f"{i}+1=", answer=fate) for i, fate in enumerate(fates)]

    def one(self, problem: Problem, response: str) -> Any:
        return {"value": 1.0} if problem.answer == "fine" else super().one(problem, problem.answer)
