"""Sums of two whole numbers, 'a+b=': a task that a tiny model learns in a minute on a laptop."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.task import Problem, Split


@dataclass(slots=True, kw_only=True)
class Arithmetic:
    """Addition problems 'a+b=' for all a, b in 0..max_operand, split at random.

    The reward is 1 for a response that is exactly the digits of the sum, else 0.

    Attributes:
        max_operand: largest operand, >= 1.
        num_test: problems held out as the test split; the others are the train split.
        seed: decides the shuffle, hence the split and the order of the problems.
        chat: wrap the prompt with the tokenizer's chat template.
        max_prompt_tokens: 'a+b=' at one token a character, plus a beginning-of-text token.
        max_response_tokens: the digits of the sum, the end-of-text token, and one to spare so
            that an answer which is too long can be told from one that was cut.

    Raises:
        ValueError: a setting that leaves no problems or no room for an answer.

    >>> task = Arithmetic(max_operand=1, num_test=1, seed=0)
    >>> [len(task.problems(split)) for split in ("train", "test")]
    [3, 1]
    >>> task.score([Problem(prompt_id=0, prompt="1+1=", answer="2")] * 2, ["2", "02"])
    [{'correct': 1.0}, {'correct': 0.0}]
    """

    max_operand: int = 99
    num_test: int = 256
    seed: int = 0
    chat: bool = False
    max_prompt_tokens: int = 8
    max_response_tokens: int = 5
    name: str = field(default="arithmetic", init=False)
    reward_range: tuple[float, float] = field(default=(0.0, 1.0), init=False)

    def __post_init__(self) -> None:
        if self.max_operand < 1:
            raise ValueError(f"task.max_operand={self.max_operand}: must be at least 1")
        total = (self.max_operand + 1) ** 2
        if not 1 <= self.num_test < total:
            raise ValueError(
                f"task.num_test={self.num_test}: must lie in 1..{total - 1}, so that some of the "
                f"{total} problems are left to train on"
            )
        longest = len(str(2 * self.max_operand)) + 1
        if self.max_response_tokens < longest:
            raise ValueError(
                f"task.max_response_tokens={self.max_response_tokens}: the longest sum of "
                f"operands up to {self.max_operand} needs {longest} tokens, one a digit and the "
                "end of text"
            )

    def problems(self, split: Split) -> list[Problem]:
        """Problems of one split; the two splits share none and cover every pair (a, b)."""
        if split not in ("train", "test"):
            raise ValueError(f"split={split!r}: must be 'train' or 'test'")
        base = self.max_operand + 1
        order = list(range(base * base))
        random.Random(self.seed).shuffle(order)
        chosen = order[: self.num_test] if split == "test" else order[self.num_test :]
        pairs = (divmod(index, base) for index in chosen)
        return [
            Problem(prompt_id=prompt_id, prompt=f"{a}+{b}=", answer=str(a + b))
            for prompt_id, (a, b) in enumerate(pairs)
        ]

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        """Part 'correct': 1.0 where the response is exactly the answer, else 0.0."""
        return [
            {"correct": float(response == problem.answer)}
            for problem, response in zip(problems, responses, strict=True)
        ]
