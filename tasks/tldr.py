"""TL;DR: one-sentence summaries of Reddit posts, rewarded by a model of people's preferences.

Rows come from `<data_dir>/<split>.jsonl` or `.parquet`, or from the Hugging Face hub, with the text
fields of vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144: `query` (or
`subreddit`, `title` and `post`, which make one) and `reference_response` (or `summary`). Query
format, the cut of long posts, penalty and evaluation are those of the TBA paper (arXiv 2503.18929,
section 5 and its reference code), which took them from arXiv 2403.17031 and 2410.18252.

The reward is a model: it runs on the searcher's device, in batches, and is opened at the first use.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from model import unique_response_logprobs
from tasks.models import Checkpoint, Judge
from tasks.records import read_file, read_hub, text_field
from tasks.task import Problem, encode_prompt

QUERY = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
END_OF_TEXT = "<|endoftext|>"  # as the data set writes it, whatever the policy's own token is

_POST, _AFTER_POST = "\n\nPOST: ", "\n\nTL;DR:"
_FIELDS = ("query", "subreddit", "title", "post", "reference_response", "summary")
_NO_HUB = "set task.data_dir to a folder with train, validation and test as .jsonl or .parquet"
_SCORED_TOKENS = 8192  # padded tokens of one forward pass of the SFT model


@dataclass(slots=True, kw_only=True)
class TLDR:
    """Summaries, rewarded by a reward model; -1 for one that has no end.

    Attributes:
        reward_model: judge of query and response, such as `tasks.models.RewardModel`.
        gold_model: a better judge, for evaluation alone; None leaves the win rate out.
        sft_model: name or folder of the model before training (the paper's reference), under which
            evaluation computes perplexities; None leaves them out.
        dataset: name on the hub, used where `data_dir` is None.
        data_dir: folder with <split>.jsonl or <split>.parquet of train, validation and test.
        no_end_penalty: the whole reward of a response without an end-of-text token.
        chat: wrap the prompt with the tokenizer's chat template.
        max_prompt_tokens: the paper's; longer queries lose the end of their post (`shorten`).
        max_response_tokens: the paper trains and evaluates TBA with 128, its baselines with 53.

    Raises:
        ValueError: a data_dir that lacks a split.
    """

    reward_model: Judge
    gold_model: Judge | None = None
    sft_model: str | None = None
    dataset: str = "vwxyzjn/summarize_from_feedback_tldr_3_filtered_oai_preprocessing_1706381144"
    data_dir: str | None = None
    no_end_penalty: float = -1.0
    chat: bool = False
    max_prompt_tokens: int = 512
    max_response_tokens: int = 128
    name: str = field(default="tldr", init=False)
    in_workers: bool = field(default=False, init=False)
    right_answers: bool = field(default=False, init=False)
    splits: tuple[str, ...] = field(default=("validation",), init=False)  # the paper evaluates on
    _sft: Checkpoint | None = field(default=None, init=False, repr=False)
    _gold_of_reference: dict[tuple[str, str], float] = field(
        default_factory=dict, init=False, repr=False
    )

    def __post_init__(self) -> None:
        if self.data_dir is not None:
            for split in ("train", "test"):
                _split_file(self.data_dir, split)
        if self.sft_model is not None:
            self._sft = Checkpoint(self.sft_model, AutoModelForCausalLM)

    def place(self, device: torch.device) -> None:
        """Where the models shall run; called before the first `score`, and loads nothing."""
        self.reward_model.place(device)
        if self.gold_model is not None:
            self.gold_model.place(device)
        if self._sft is not None:
            self._sft.place(device)

    def problems(self, split: str) -> list[Problem]:
        """Problems of one split in the data's order; `answer` is the reference summary.

        Raises:
            ValueError: an unknown split, a row that lacks a field (the file and line are named),
                or a hub that can't be reached.
        """
        if split not in ("train", "test", *self.splits):
            raise ValueError(f"split={split!r}: must be 'train', 'validation' or 'test'")
        if self.data_dir is None:
            rows = read_hub(self.dataset, None, split, fix=_NO_HUB)
        else:
            path = _split_file(self.data_dir, split)
            rows = _read_parquet(path) if path.suffix == ".parquet" else read_file(path)
        problems = [
            Problem(prompt_id=i, prompt=query(where, row), answer=reference(where, row))
            for i, (where, row) in enumerate(rows)
        ]
        if not problems:
            raise ValueError(f"task.data_dir={self.data_dir}: the {split} split has no rows")
        return problems

    def shorten(self, problem: Problem, too_long: Callable[[str], bool]) -> Problem:
        """The problem with its post cut until the prompt fits, by the data set's own rule.

        Args:
            too_long: whether a prompt has more tokens than it may have.

        Raises:
            ValueError: the prompt is no query of this format, or too long without any post.
        """
        return dataclasses.replace(problem, prompt=cut_post(problem.prompt, too_long))

    def gold(self, answer: str) -> str:
        """The reference summary as it follows a query: one space, the text, no end-of-text."""
        return _after_query(answer)

    def score(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        *,
        truncated: Sequence[bool] | None = None,
    ) -> list[dict[str, float]]:
        """Parts 'reward_model', and 'no_end' for a response that the length limit cut.

        One of the two is 0: the paper replaces the reward of a cut response, whatever it says.

        Args:
            truncated: which responses have no end-of-text token; None: all have one.

        Raises:
            ValueError: a problem without a prompt: a reward model reads it.
        """
        cut = _cut_flags(problems, responses, truncated)
        ended = [i for i, was_cut in enumerate(cut) if not was_cut]
        rewards = self.reward_model(
            [problems[i].prompt for i in ended], [responses[i] for i in ended]
        )
        of_ended = dict(zip(ended, rewards, strict=True))
        return [
            {
                "reward_model": of_ended.get(i, 0.0),
                "no_end": self.no_end_penalty if was_cut else 0.0,
            }
            for i, was_cut in enumerate(cut)
        ]

    def measure(
        self,
        problems: Sequence[Problem],
        responses: Sequence[str],
        *,
        truncated: Sequence[bool] | None = None,
    ) -> list[dict[str, float]]:
        """What evaluation reports besides the reward, one dict a response; means are the metrics.

        With `gold_model`: 'win' (1 where the response's gold reward is above the reference
        summary's: its mean is the win rate), 'gold_reward' and 'gold_margin' over the reference.
        With `sft_model`, of the response's tokens with its end: 'perplexity_paper' and
        'perplexity_response' (`perplexities`).

        Args:
            truncated: which responses have no end-of-text token; None: all have one.
        """
        cut = _cut_flags(problems, responses, truncated)
        measured: list[dict[str, float]] = [{} for _ in responses]
        if self.gold_model is not None:
            rewards = self.gold_model([p.prompt for p in problems], responses, cut)
            references = self._reference_rewards(problems)
            for values, reward, of_reference in zip(measured, rewards, references, strict=True):
                values["win"] = float(reward > of_reference)
                values["gold_reward"] = reward
                values["gold_margin"] = reward - of_reference
        if self._sft is not None:
            likelihoods = self._sft_likelihoods(problems, responses, cut)
            for values, (logprob, prompt_tokens, response_tokens) in zip(
                measured, likelihoods, strict=True
            ):
                paper, per_token = perplexities(logprob, prompt_tokens, response_tokens)
                values["perplexity_paper"], values["perplexity_response"] = paper, per_token
        return measured

    def _reference_rewards(self, problems: Sequence[Problem]) -> list[float]:
        """Gold rewards of the reference summaries, each computed once."""
        assert self.gold_model is not None
        known = self._gold_of_reference
        new = list(dict.fromkeys((p.prompt, p.answer) for p in problems))
        new = [pair for pair in new if pair not in known]
        rewards = self.gold_model([prompt for prompt, _ in new], [answer for _, answer in new])
        known.update(zip(new, rewards, strict=True))
        return [known[p.prompt, p.answer] for p in problems]

    def _sft_likelihoods(
        self, problems: Sequence[Problem], responses: Sequence[str], cut: Sequence[bool]
    ) -> list[tuple[float, int, int]]:
        """Summed log-prob of each response (nats), prompt tokens and response tokens."""
        assert self._sft is not None
        tokenizer = self._sft.tokenizer
        prompts, answers = [], []
        for problem, response, was_cut in zip(problems, responses, cut, strict=True):
            prompt = encode_prompt(tokenizer, problem, chat=self.chat)
            tokens = tokenizer(response, add_special_tokens=False)["input_ids"]
            end = [] if was_cut or tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            prompts.append(np.array(prompt, dtype=np.int32))
            answers.append(np.array([*tokens, *end], dtype=np.int32))
        logprobs = unique_response_logprobs(
            self._sft.model,
            prompts,
            answers,
            temperature=1.0,
            tokens_per_micro_batch=_SCORED_TOKENS,
        )
        return [
            (float(values.sum(dtype=np.float64)), len(prompt), len(answer))
            for values, prompt, answer in zip(logprobs, prompts, answers, strict=True)
        ]


def perplexities(logprob: float, prompt_tokens: int, response_tokens: int) -> tuple[float, float]:
    """Perplexity of one response, the paper's way and per response token.

        paper         exp(-logprob / (prompt_tokens + response_tokens - 1))
        per response  exp(-logprob / response_tokens)

    The paper's code sums over the response but divides by all tokens that were predicted, prompt
    included, which draws every value towards 1: it reports about 1.13. Both are averaged over
    responses.

    Args:
        logprob: summed over the response's tokens, nats.

    >>> [round(value, 4) for value in perplexities(-40.0, 381, 20)]
    [1.1052, 7.3891]
    """
    paper = math.exp(-logprob / max(prompt_tokens + response_tokens - 1, 1))
    return paper, math.exp(-logprob / max(response_tokens, 1))


# --------------------------------------------------------------------------- rows


def query(where: str, row: object) -> str:
    """The row's query: as it is there, else made of its subreddit, title and post.

    Raises:
        ValueError: a field is missing or no text; `where` names the row.

    >>> query("row 0", {"subreddit": "tea", "title": "Help", "post": "It is cold."})
    'SUBREDDIT: r/tea\\n\\nTITLE: Help\\n\\nPOST: It is cold.\\n\\nTL;DR:'
    """
    if isinstance(row, dict) and row.get("query") is not None:
        return text_field(where, row, "query").strip()
    names = ("subreddit", "title", "post")
    return QUERY.format(**{name: text_field(where, row, name) for name in names})


def reference(where: str, row: object) -> str:
    """The row's reference summary with one space before it and no end-of-text.

    >>> reference("row 0", {"summary": "Tea is cold."})
    ' Tea is cold.'
    >>> reference("row 0", {"reference_response": " Tea is cold.<|endoftext|>"})
    ' Tea is cold.'
    """
    given = isinstance(row, dict) and row.get("reference_response") is not None
    return _after_query(text_field(where, row, "reference_response" if given else "summary"))


def cut_post(prompt: str, too_long: Callable[[str], bool]) -> str:
    """A query with its post cut at its last newline, again and again, until it fits.

    A post without a newline loses one character at a time: the rule of arXiv 2009.01325's code,
    which made the data set's own queries. A query that fits is returned as it is.

    Raises:
        ValueError: the prompt has no post to cut, or is too long without it.

    >>> long = QUERY.format(subreddit="a", title="b", post="one\\ntwo\\nthree")
    >>> cut_post(long, lambda text: "three" in text).partition("POST: ")[2]
    'one\\ntwo\\n\\nTL;DR:'
    """
    if not too_long(prompt):
        return prompt
    head, post_mark, rest = prompt.partition(_POST)
    post, after_mark, tail = rest.rpartition(_AFTER_POST)
    if not post_mark or not after_mark:
        raise ValueError(
            f"the prompt {prompt[:60]!r}... is longer than task.max_prompt_tokens and has no post "
            "between 'POST: ' and 'TL;DR:' to cut: raise the limit, or give subreddit, title and "
            "post in place of a query"
        )
    while post:
        newline = post.rfind("\n")
        post = post[:newline] if newline >= 0 else post[:-1]
        shorter = head + post_mark + post + after_mark + tail
        if not too_long(shorter):
            return shorter
    raise ValueError(
        f"the prompt {prompt[:60]!r}... is longer than task.max_prompt_tokens even without its "
        "post: raise the limit"
    )


def _after_query(summary: str) -> str:
    return " " + summary.removesuffix(END_OF_TEXT).removeprefix(" ")


def _cut_flags(
    problems: Sequence[Problem], responses: Sequence[str], truncated: Sequence[bool] | None
) -> list[bool]:
    """Which responses were cut; checks that what the models need is there."""
    flags = [False] * len(responses) if truncated is None else [bool(t) for t in truncated]
    for what, count in (("problems", len(problems)), ("truncated flags", len(flags))):
        if count != len(responses):
            raise ValueError(f"{count} {what} for {len(responses)} responses")
    if any(not problem.prompt for problem in problems):
        raise ValueError(
            "tldr's reward model reads the query: give saved responses with a 'prompt' beside "
            "'answer' and 'response'"
        )
    return flags


# --------------------------------------------------------------------------- files


def _split_file(folder: str, split: str) -> Path:
    """The split's file.

    Raises:
        ValueError: there is none.
    """
    for ending in ("jsonl", "parquet"):
        path = Path(folder).expanduser() / f"{split}.{ending}"
        if path.is_file():
            return path
    raise ValueError(
        f"task.data_dir={folder}: neither {split}.jsonl nor {split}.parquet there; point "
        "task.data_dir to a folder with train, validation and test, or leave it unset to load "
        "task.dataset from the Hugging Face hub"
    )


def _read_parquet(path: Path) -> Iterator[tuple[str, object]]:
    """Yield ('task.data_dir: file, row n', row), with the text columns; all others are None."""
    import pyarrow
    import pyarrow.parquet

    try:
        names = pyarrow.parquet.read_schema(path).names
        columns = [c for c in _FIELDS if c in names]
        rows = pyarrow.parquet.read_table(path, columns=columns).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"task.data_dir: {path} is no Parquet file ({error})") from error
    others = dict.fromkeys(names)  # for errors: one of them may be a misspelt name
    for number, row in enumerate(rows):
        yield f"task.data_dir: {path}, row {number}", others | row
