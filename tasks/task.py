"""What a task must provide, and how a problem becomes prompt tokens.

A task is an ordinary class with the attributes and methods of `Task`; nothing is inherited or
registered. To add one, write `tasks/<name>.py` and `conf/task/<name>.yaml`, whose `_target_` is
the class and whose other keys are the constructor's arguments. Tasks know nothing of ranks,
models or training.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "test"]


@dataclass(slots=True, kw_only=True, frozen=True)
class Problem:
    """One problem; filled by the task.

    Attributes:
        prompt_id: position in the list that `Task.problems` returned, from 0.
        prompt: text shown to the policy, before any chat template.
        answer: text of the gold answer, in the form the task's `score` reads.
    """

    prompt_id: int
    prompt: str
    answer: str


class Task(Protocol):
    """A source of problems with a reward.

    Attributes:
        name: short name used in logs and metrics.
        chat: True wraps the prompt as one user message with the tokenizer's chat template.
        max_prompt_tokens: most tokens a prompt may have, special and template tokens included.
        max_response_tokens: most tokens a response may have, the end-of-text token included.
    """

    name: str
    chat: bool
    max_prompt_tokens: int
    max_response_tokens: int

    def problems(self, split: Split) -> list[Problem]:
        """Problems of one split, always in the same order; `prompt_id` is the position."""
        ...

    def score(
        self, problems: Sequence[Problem], responses: Sequence[str]
    ) -> list[dict[str, float]]:
        """Named reward parts of each response, in order; their sum is its reward.

        Args:
            problems: the problem each response answers; the same one may appear many times.
            responses: decoded responses, without special tokens, as many as `problems`.
        """
        ...


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", problem: Problem, *, chat: bool
) -> list[int]:
    """Turn a problem's prompt into token ids, ready for the policy to continue.

    Plain prompts get a beginning-of-text token only where the tokenizer itself adds one, and
    never an end-of-text token: the policy would be continuing a finished text. Chat prompts are
    one user message followed by the opening of the assistant's turn.

    Args:
        tokenizer: the policy's tokenizer.
        problem: the problem whose `prompt` is encoded.
        chat: whether to wrap the prompt with the tokenizer's chat template.

    Returns:
        Token ids, at least one.

    Raises:
        ValueError: `chat` without a chat template, or a prompt that encodes to nothing.
    """
    if chat:
        if not tokenizer.chat_template:
            raise ValueError(
                f"task.chat is true but the tokenizer of {tokenizer.name_or_path!r} has no chat "
                "template: set task.chat=false, or use a model that ships one"
            )
        message = {"role": "user", "content": problem.prompt}
        # Two steps rather than tokenize=True, whose return type differs between transformers
        # versions. The template already holds the special tokens: adding them again would
        # double the beginning-of-text token.
        text = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokens = tokenizer(problem.prompt, add_special_tokens=True)["input_ids"]
        ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
        if tokens and tokens[-1] in ends:
            bare = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
            if bare[-1:] != tokens[-1:]:  # it was added, not written in the prompt
                tokens = tokens[:-1]
    if not tokens:
        raise ValueError(
            f"prompt {problem.prompt_id} ({problem.prompt!r}) encodes to no tokens: a policy "
            "needs at least one to continue from"
        )
    return [int(token) for token in tokens]
