"""Greedy evaluation of an engine on a task's problems."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from engine import HFEngine, Sampling, VLLMEngine
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
    texts = tokenizer.batch_decode([group[0].tokens for group in groups], skip_special_tokens=True)
    return [float(sum(parts.values())) for parts in task.score(problems, texts)]
