"""What a task must provide, and how a problem becomes prompt tokens.

A task is an ordinary class with the attributes and methods of `Task`; nothing is inherited or
registered. To add one, write `tasks/<name>.py` and `conf/task/<name>.yaml`, whose `_target_` is
the class and whose other keys are the constructor's arguments. Tasks know nothing of ranks,
models or training.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "test"]
LongPrompts = Literal["error", "drop", "truncate_left"]  # see `fit_prompts`


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


class Unparsed(dict[str, float]):
    """Reward parts of a response in which the task found nothing to grade.

    `Task.score` returns it in place of a plain dict. The parts count as they are; that nothing
    was found is counted too, so that a policy which stopped answering is told from one that is
    wrong.

    >>> Unparsed(correct=0.0) == {"correct": 0.0}
    True
    """


class Task(Protocol):
    """A source of problems with a reward.

    Attributes:
        name: short name used in logs and metrics.
        chat: True wraps the prompt as one user message with the tokenizer's chat template.
        max_prompt_tokens: most tokens a prompt may have, special and template tokens included.
        max_response_tokens: most tokens a response may have, the end-of-text token included.

    A task may also have any of these, and functions below fill in where it has not:
        in_workers: False for a reward that is a model: it is computed in the searcher's process,
            on its device, in batches. All others are scored in worker processes.
        splits: tuple of the names that `problems` takes beyond 'train' and 'test'.
        reward_range: (low, high), both finite, between which every reward lies. The scoring of a
            response has failed if its reward does not (`rewards.Scored`, status 'range').
        right_answers: False for a reward that is no grade, such as a preference model's: no
            response is right or wrong, and no accuracy is reported.
        answer_rule: name of the grading rule, which results state beside the task's name.
        gold(answer): `Problem.answer` from a gold answer in the data set's own form, as in a file
            of saved responses; what it returned before is returned as it is. ValueError says why
            a text is no gold answer.
        final_answer(response): the answer that a response gives, so that equal answers in other
            words count once; None if it gives none. It never raises.
        shorten(problem, too_long): a prompt that is too long, cut by the task's own rule
            (`fit_prompts`).
        place(device): where a reward that is a model shall run; called before the first `score`.

    Evaluation asks for more, where a task has it:
        eval_temperature: of the responses that are evaluated, for a task whose greedy ones would
            all be the same; without it they are greedy.
        measure(problems, responses): what is reported of each response besides its reward, one
            dict each, with the same names in all; figures are their means. May take the keywords
            `truncated` and `num_tokens` of `score`.
        summarize(problems, responses): what is reported of all responses at once, name -> number.
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

        A part named 'correct' decides what evaluation counts as a right answer (`is_correct`).
        Names are of a-z, 0-9 and _. Workers call it with one response at a time, on a task built
        from the same config: it may use what a `Problem` holds, and nothing that `problems` kept.

        Args:
            problems: the problem each response answers; the same one may appear many times.
            responses: decoded responses, without special tokens, as many as `problems`.

        It may also take any of these keywords, as many values each, and must do without them:
            truncated: bool, cut by the length limit, so without an end-of-text token.
            num_tokens: int, of the response, its end-of-text token included.
            reference_logprob: float, nats, of the response under the reference at the training
                temperature; NaN where the searcher does not have the reference.
        """
        ...


def splits(task: Task) -> tuple[str, ...]:
    """Names that `task.problems` takes."""
    return ("train", "test", *getattr(task, "splits", ()))


def answer_rule(task: Task) -> str:
    """Name of the task's grading rule; of its class where it has only one."""
    return str(getattr(task, "answer_rule", type(task).__name__))


def gold_answer(task: Task, answer: str) -> str:
    """`Problem.answer` from a gold answer in the data set's own form.

    Raises:
        ValueError: the task finds no gold answer in the text.
    """
    gold = getattr(task, "gold", None)
    return answer if gold is None else gold(answer)


def final_answer(task: Task, response: str) -> str | None:
    """The answer that a response gives; the response itself where the task can't tell."""
    read = getattr(task, "final_answer", None)
    return response.strip() if read is None else read(response)


def has_right_answers(task: Task) -> bool:
    """Whether a response is right or wrong, so that accuracy means something."""
    return bool(getattr(task, "right_answers", True))


def reward_range(task: Task) -> tuple[float, float]:
    """Between which every reward lies; without limits where the task does not say.

    Raises:
        ValueError: what the task declares is no range.
    """
    declared = getattr(task, "reward_range", None)
    if declared is None:
        return -math.inf, math.inf
    try:
        low, high = map(float, declared)
    except (TypeError, ValueError):
        low, high = math.nan, math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise ValueError(
            f"task {task.name}: reward_range={declared!r} must be two finite numbers (low, high)"
        )
    return low, high


def check_task(task: "Task") -> None:
    """Checks what a task declares, before anything is computed.

    Raises:
        ValueError: its range of rewards is none, or `score` can't be called as it will be.
    """
    reward_range(task)
    for name, parameters in (("problems", ["split"]), ("score", ["problems", "responses"])):
        try:  # what is no function has no signature: a TypeError too
            inspect.signature(getattr(task, name, None)).bind(*parameters)  # type: ignore[arg-type]
        except TypeError as error:
            raise ValueError(
                f"task {type(task).__name__}: {name} is called as {name}({', '.join(parameters)}): "
                f"{error}"
            ) from error


def check_problems(problems: Any, split: str) -> None:
    """Raises ValueError unless they are a list of problems with text, and there is one at least.

    Args:
        split: which ones, as in `Task.problems`.
    """
    if isinstance(problems, str) or not isinstance(problems, Sequence):
        raise ValueError(
            f"task.problems({split!r}) must give a list of Problem, not {type(problems).__name__}"
        )
    if not problems:
        raise ValueError(f"task.problems({split!r}) is empty: see the task's data and its limits")
    for number, problem in enumerate(problems):
        if not isinstance(problem, Problem):
            raise ValueError(
                f"task.problems({split!r}) must give a list of Problem, but number {number} is a "
                f"{type(problem).__name__}"
            )
        if not isinstance(problem.prompt, str):
            raise ValueError(f"task.problems({split!r}), number {number}: prompt must be text")


def is_correct(parts: Mapping[str, float]) -> bool:
    """Whether a graded response is a right answer.

    The part named 'correct' says so where there is one, else the reward: at least 1.

    >>> is_correct({"correct": 1.0, "format": -0.5}), is_correct({"share": 0.75, "bonus": 0.25})
    (True, True)
    """
    return parts.get("correct", sum(parts.values())) >= 1.0


def encode_prompt(
    tokenizer: "PreTrainedTokenizerBase", problem: Problem, *, chat: bool
) -> list[int]:
    """Turn a problem's prompt into token ids, ready for the policy to continue.

    Plain prompts get a beginning-of-text token only where the tokenizer itself adds one, once also
    where the text starts with it, and never an end-of-text token: the policy would be continuing a
    finished text. Chat prompts are one user message followed by the opening of the assistant's
    turn, with the special tokens that the template writes and no others.

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
        try:
            text = tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # the template is a program of the model's
            raise ValueError(
                f"task.chat=true: the chat template of {tokenizer.name_or_path!r} fails on prompt "
                f"{problem.prompt_id}: {type(error).__name__}: {error}"
            ) from error
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        tokens = tokenizer(problem.prompt, add_special_tokens=True)["input_ids"]
        begin = tokenizer.bos_token_id
        if begin is not None and tokens[:2] == [begin, begin]:
            bare = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
            if bare[:2] != [begin, begin]:  # the tokenizer put its own before the text's
                tokens = tokens[1:]
        ends = {tokenizer.eos_token_id, tokenizer.sep_token_id} - {None}
        if tokens and tokens[-1] in ends:
            bare = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
            if tokens[-1 - len(bare) : -1] == bare:  # it was added, not written in the prompt
                tokens = tokens[:-1]
    if not tokens:
        raise ValueError(
            f"prompt {problem.prompt_id} ({problem.prompt!r}) encodes to no tokens: a policy "
            "needs at least one to continue from"
        )
    return [int(token) for token in tokens]


def check_prompt(
    tokenizer: "PreTrainedTokenizerBase", problem: Problem, tokens: Sequence[int], *, chat: bool
) -> None:
    """Raises ValueError if a prompt says nothing: blank, or nothing but special tokens.

    Args:
        tokens: of the whole prompt, as `encode_prompt` gives them.
    """
    special = set(tokenizer.all_special_ids)
    if chat and problem.prompt.strip():  # the template's own tokens say nothing of the message
        tokens = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
    if problem.prompt.strip() and not special.issuperset(tokens):
        return
    what = "holds nothing but special or unknown tokens" if problem.prompt.strip() else "is blank"
    raise ValueError(
        f"prompt {problem.prompt_id} ({problem.prompt[:80]!r}) {what}: give it text, or leave the "
        "problem out of the task's data"
    )


@dataclass(slots=True, kw_only=True)
class FittedPrompts:
    """Problems whose prompts keep the limit, and what became of those that did not.

    Attributes:
        problems: in their order; each still has the `prompt_id` that its task gave it.
        tokens: of each problem's prompt, at least one.
        num_given: problems before any was left out.
        num_shortened: prompts cut by the task's own rule, or by `truncate_left`.
        num_dropped: problems left out.
    """

    problems: list[Problem]
    tokens: list[list[int]]
    num_given: int
    num_shortened: int = 0
    num_dropped: int = 0


def fit_prompts(
    tokenizer: "PreTrainedTokenizerBase",
    problems: Sequence[Problem],
    *,
    task: Task,
    max_tokens: int,
    long_prompts: LongPrompts,
) -> FittedPrompts:
    """Encodes prompts; those of more than `max_tokens` tokens are shortened, or dropped, or kept.

    A task may have a rule of its own, `shorten(problem, too_long) -> Problem`, which comes first:
    `too_long` tells of a text whether it is as a prompt, and ValueError that the rule can't help.

    Args:
        task: gives `chat`, and may have `shorten`.
        long_prompts: what becomes of a prompt that is too long still: 'error' keeps it, for the
            caller to complain; 'drop' leaves its problem out; 'truncate_left' cuts its beginning
            (`truncate_left`), while the problem stays as it is for the grader.

    Raises:
        ValueError: a prompt that can't be encoded or says nothing, or no problem is left of some.
    """
    fitted = FittedPrompts(problems=[], tokens=[], num_given=len(problems))
    shorten = getattr(task, "shorten", None)

    def encode(problem: Problem) -> list[int]:
        return encode_prompt(tokenizer, problem, chat=task.chat)

    def too_long_for(problem: Problem) -> Callable[[str], bool]:
        return lambda text: len(encode(replace(problem, prompt=text))) > max_tokens

    for problem in problems:
        tokens = encode(problem)
        check_prompt(tokenizer, problem, tokens, chat=task.chat)
        if len(tokens) > max_tokens and shorten is not None:
            try:
                problem = shorten(problem, too_long_for(problem))
            except ValueError:
                if long_prompts == "error":
                    raise
            else:
                tokens = encode(problem)
                fitted.num_shortened += len(tokens) <= max_tokens
        if len(tokens) > max_tokens and long_prompts == "drop":
            fitted.num_dropped += 1
            continue
        if len(tokens) > max_tokens and long_prompts == "truncate_left":
            tokens = truncate_left(tokenizer, problem, chat=task.chat, max_tokens=max_tokens)
            fitted.num_shortened += 1
        fitted.problems.append(problem)
        fitted.tokens.append(tokens)
    if problems and not fitted.problems:
        raise ValueError(
            f"task.long_prompts=drop leaves none of {len(problems)} problems: every prompt is "
            f"longer than task.max_prompt_tokens={max_tokens}; raise it"
        )
    return fitted


def truncate_left(
    tokenizer: "PreTrainedTokenizerBase", problem: Problem, *, chat: bool, max_tokens: int
) -> list[int]:
    """A prompt's tokens without its beginning, so that at most `max_tokens` are left.

    A plain prompt keeps its beginning-of-text token and its last tokens. Of a chat prompt the
    user's message loses its beginning, and the template around it stays whole.

    Raises:
        ValueError: the template alone is longer than that.
    """
    tokens = encode_prompt(tokenizer, problem, chat=chat)
    if not chat:
        begin = tokens[:1] if tokens[0] == tokenizer.bos_token_id else []
        return begin + tokens[max(len(tokens) - max_tokens, 0) + len(begin) :]
    message = tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
    # Cut text may encode to more or other tokens than were left of it, at its first characters.
    while len(tokens) > max_tokens and message:
        message = message[len(tokens) - max_tokens :]
        text = tokenizer.decode(message, clean_up_tokenization_spaces=False)
        tokens = encode_prompt(tokenizer, replace(problem, prompt=text), chat=True)
    if len(tokens) > max_tokens:
        raise ValueError(
            f"task.max_prompt_tokens={max_tokens} is less than the chat template alone takes "
            f"({len(tokens)} tokens): raise it, or set task.chat=false"
        )
    return tokens
