"""Prompts become tokens: special tokens exactly once, the length limit kept, never in silence."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import config
from tasks.task import FittedPrompts, Problem, encode_prompt, fit_prompts, truncate_left
from train import fit

PAD, BOS, EOS, USER, END, ASSISTANT = range(6)
SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<end>", "<assistant>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?"
CHAT = (
    "{% for m in messages %}<user>{{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# What a tokenizer puts around text of its own accord, as families of models do.
BARE = None  # GPT-2, Qwen, SmolLM
BEGINS = "<bos> $A"  # Llama, Gemma, Mistral
ENCLOSES = "<bos> $A <eos>"
ENDS = "$A <eos>"  # T5


def make_tokenizer(
    adds: str | None = BARE, *, bos: bool = True, one_for_both: bool = False, chat: str = ""
) -> PreTrainedTokenizerFast:
    """One token a letter.

    Args:
        bos: whether it knows a beginning-of-text token at all.
        one_for_both: <eos> is the beginning of text, too, as in GPT-2.
    """
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *LETTERS])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    inner.normalizer = normalizers.Lowercase()
    inner.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(SPECIAL)
    if adds is not None:
        inner.post_processor = processors.TemplateProcessing(
            single=adds, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    names: dict[str, Any] = {"pad_token": "<pad>", "eos_token": "<eos>"}
    if bos:
        names["bos_token"] = "<eos>" if one_for_both else "<bos>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    tokenizer.chat_template = chat or None
    return tokenizer


def letters(text: str) -> list[int]:
    return [len(SPECIAL) + LETTERS.index(c) for c in text]


def problem(prompt: str, prompt_id: int = 0) -> Problem:
    return Problem(prompt_id=prompt_id, prompt=prompt, answer="x")


# --------------------------------------------------------------------------- special tokens


@pytest.mark.parametrize(
    ("tokenizer", "prompt", "want"),
    [
        (make_tokenizer(BARE), "ab", letters("ab")),
        (make_tokenizer(BARE, bos=False), "ab", letters("ab")),
        (make_tokenizer(BARE, one_for_both=True), "ab", letters("ab")),
        (make_tokenizer(BEGINS), "ab", [BOS, *letters("ab")]),
        (make_tokenizer(BEGINS, bos=False), "ab", [BOS, *letters("ab")]),
        (make_tokenizer(ENCLOSES), "ab", [BOS, *letters("ab")]),
        (make_tokenizer(ENDS), "ab", letters("ab")),
        # The text starts with the token already.
        (make_tokenizer(BARE), "<bos>ab", [BOS, *letters("ab")]),
        (make_tokenizer(BEGINS), "<bos>ab", [BOS, *letters("ab")]),
        (make_tokenizer(ENCLOSES), "<bos>ab", [BOS, *letters("ab")]),
        # Tokens that the prompt itself asks for, elsewhere, are its own business.
        (make_tokenizer(BEGINS), "a<bos>b", [BOS, *letters("a"), BOS, *letters("b")]),
        (make_tokenizer(ENCLOSES), "ab<eos>", [BOS, *letters("ab"), EOS]),
        (make_tokenizer(ENDS), "<eos>ab", [EOS, *letters("ab")]),
    ],
)
def test_text_has_one_beginning_and_no_end(tokenizer, prompt, want) -> None:
    assert encode_prompt(tokenizer, problem(prompt), chat=False) == want


@pytest.mark.parametrize("adds", [BARE, BEGINS, ENCLOSES, ENDS])
@pytest.mark.parametrize("begins", ["", "<bos>"])
def test_a_chat_template_alone_writes_special_tokens(adds, begins) -> None:
    tokenizer = make_tokenizer(adds, chat=begins + CHAT)
    want = [USER, *letters("ab"), END, ASSISTANT]
    want = [BOS, *want] if begins else want
    assert encode_prompt(tokenizer, problem("ab"), chat=True) == want


# --------------------------------------------------------------------------- the limit


class Plain:
    chat = False


class Chat:
    chat = True


class Shortens(Plain):
    """A task whose prompts lose words in the middle; those of one word stay long."""

    def shorten(self, problem: Problem, too_long: Any) -> Problem:
        words = problem.prompt.split(" ")
        while too_long(" ".join(words)):
            if len(words) == 1:
                raise ValueError(f"the prompt {problem.prompt!r} is one word")
            del words[len(words) // 2]
        return replace(problem, prompt=" ".join(words))


TEXTS = ["abcde", "abcdefgh", "abcdefghi", "abcdefghijklm", "a"]


def fitted(
    texts: list[str], rule: Any, *, adds: str | None = BARE, task: Any = Plain, limit: int = 8
) -> FittedPrompts:
    tokenizer = make_tokenizer(adds, chat=CHAT if task.chat else "")
    problems = [problem(text, i) for i, text in enumerate(texts)]
    return fit_prompts(tokenizer, problems, task=task(), max_tokens=limit, long_prompts=rule)


def test_dropped_problems_are_counted_and_the_others_keep_their_ids() -> None:
    result = fitted(TEXTS, "drop")
    assert [p.prompt_id for p in result.problems] == [0, 1, 4]
    assert result.tokens == [letters(TEXTS[i]) for i in (0, 1, 4)]
    assert (result.num_given, result.num_shortened, result.num_dropped) == (5, 0, 2)


def test_the_special_tokens_count() -> None:
    result = fitted(TEXTS, "drop", adds=BEGINS)
    assert [p.prompt_id for p in result.problems] == [0, 4]
    result = fitted(TEXTS, "drop", task=Chat)  # three tokens of the template
    assert [p.prompt_id for p in result.problems] == [0, 4]


def test_an_error_is_left_to_the_caller() -> None:
    result = fitted(TEXTS, "error")
    assert result.tokens == [letters(text) for text in TEXTS]
    assert (result.num_shortened, result.num_dropped) == (0, 0)


def test_truncation_keeps_the_end_and_the_beginning_of_text() -> None:
    result = fitted(TEXTS, "truncate_left")
    assert result.tokens == [letters(text[-8:]) for text in TEXTS]
    assert [p.prompt for p in result.problems] == TEXTS  # graders see all of it
    assert (result.num_shortened, result.num_dropped) == (2, 0)
    result = fitted(TEXTS, "truncate_left", adds=ENCLOSES)
    assert result.tokens == [[BOS, *letters(text[-7:])] for text in TEXTS]
    assert result.num_shortened == 3


def test_truncation_of_a_chat_prompt_leaves_the_template_whole() -> None:
    result = fitted(TEXTS, "truncate_left", task=Chat)
    assert result.tokens == [[USER, *letters(text[-5:]), END, ASSISTANT] for text in TEXTS]
    assert result.num_shortened == 3


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 5, 20])
@pytest.mark.parametrize("adds", [BARE, BEGINS])
def test_truncation_holds_at_any_limit(limit, adds) -> None:
    tokenizer = make_tokenizer(adds)
    whole = encode_prompt(tokenizer, problem("abcd"), chat=False)
    tokens = truncate_left(tokenizer, problem("abcd"), chat=False, max_tokens=limit)
    assert len(tokens) == min(limit, len(whole)) and tokens[0] == (BOS if adds else tokens[0])
    assert limit == 1 or tokens[-1] == whole[-1]


def test_a_template_longer_than_the_limit_is_named() -> None:
    with pytest.raises(ValueError, match="task.max_prompt_tokens=2.*template alone.*3 tokens"):
        fitted(["ab"], "truncate_left", task=Chat, limit=2)


def test_a_task_may_shorten_by_its_own_rule() -> None:
    texts = ["ab cd", "ab cd ef gh", "abcdefghijkl"]
    for rule, tokens, counts in (
        ("drop", ["ab cd", "ab cd gh"], (1, 1)),
        ("truncate_left", ["ab cd", "ab cd gh", "efghijkl"], (2, 0)),
    ):
        result = fitted(texts, rule, task=Shortens)
        assert result.tokens == [letters(text) for text in tokens]
        assert (result.num_shortened, result.num_dropped) == counts
        assert result.problems[1].prompt == "ab cd gh"  # what the policy was shown
    with pytest.raises(ValueError, match="is one word"):
        fitted(texts, "error", task=Shortens)


def test_nothing_left_is_an_error_and_nothing_given_is_not() -> None:
    with pytest.raises(ValueError, match="task.long_prompts=drop leaves none of 2.*tokens=8"):
        fitted(["abcdefghij"] * 2, "drop")
    assert fitted([], "drop").problems == []


# --------------------------------------------------------------------------- train.py


@pytest.mark.parametrize(
    ("rule", "kept", "said"),
    [
        ("error", 5, ""),
        ("drop", 3, "2 of 5 training prompts have more than task.max_prompt_tokens=8 tokens: 0 "),
        ("truncate_left", 5, "2 were shortened, 0 left out (task.long_prompts=truncate_left)"),
    ],
)
def test_the_log_says_what_became_of_long_prompts(rule, kept, said) -> None:
    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        overrides = [f"task.long_prompts={rule}", "task.max_prompt_tokens=8"]
        cfg = compose("config", overrides=overrides)
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tba")
    logger.addHandler(handler)
    given = [problem(text, i) for i, text in enumerate(TEXTS)]
    problems, tokens = fit(cfg, make_tokenizer(), Plain(), given, "training")  # type: ignore[arg-type]
    logger.removeHandler(handler)
    assert len(problems) == len(tokens) == kept
    assert all(array.dtype == "int32" for array in tokens)
    assert len(messages) == bool(said) and said in "".join(messages)
    if rule == "error":
        with pytest.raises(ValueError, match="2 prompts are longer than task.max_prompt_tokens=8"):
            config.check_lengths(cfg, tokens, None)
    else:
        config.check_lengths(cfg, tokens, None)
