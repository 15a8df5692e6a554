"""Greedy evaluation of an engine on a task's problems; responses as text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from engine import Completion, HFEngine, Sampling, VLLMEngine
from tasks.task import Problem, Task


def greedy_scores(
    engine: VLLMEngine | HFEngine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    prompt_tokens: Sequence[np.ndarray],
    *,
    max_response_tokens: int,
) -> list[float]:
    """Reward of the greedy response to each problem, in order.

    Args:
        prompt_tokens: int32 [P] of each problem.
    """
    if not problems:
        return []
    sampling = Sampling(n=1, temperature=0.0, max_tokens=max_response_tokens)
    groups = engine.generate(prompt_tokens, sampling)
    texts = response_texts(tokenizer, [group[0] for group in groups])
    return [float(sum(parts.values())) for parts in task.score(problems, texts)]


def response_texts(
    tokenizer: PreTrainedTokenizerBase, completions: Sequence[Completion]
) -> list[str]:
    """Text of each completion without the token that ended it.

    Other special tokens stay: a response that holds them is not the one without them.
    """
    tokens = [c.tokens if c.truncated else c.tokens[:-1] for c in completions]
    return tokenizer.batch_decode(tokens, skip_special_tokens=False)
