"""A mistake in data, model, task, folder or port: one line that names it and the fix."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tiny
import torch
from digits import Digits
from hydra import compose, initialize_config_dir
from loss_cases import CASES, batch_for, case_name, gradients, run
from plain_losses import random_groups
from safetensors.torch import load_file, save_file
from test_end_to_end import FAST, random_model  # noqa: F401  (a fixture)
from test_end_to_end import run as run_train
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
)

import model as modeling
import offline
import train
import trainer
from checks import check_loss, check_rule
from comm import ranks_from_environment
from config import UserError, register
from rewards import FAILURES, LocalScorer, RewardConfig, make_scorer
from run_folder import hold
from sft import tiny_tokenizer
from tasks.arithmetic import Arithmetic
from tasks.gsm8k import GSM8K
from tasks.math import Math
from tasks.records import read_file, text_field
from tasks.task import Problem, check_problems, check_task, fit_prompts, reward_range
from tasks.tldr import _read_parquet, query

ROOT = Path(__file__).resolve().parent.parent

# --------------------------------------------------------------------------- data sets

GSM8K_ROW = '{"question": "1+1?", "answer": "#### 2"}\n'


def gsm8k(folder: Path, content: bytes) -> None:
    (folder / "train.jsonl").write_bytes(GSM8K_ROW.encode() + content)
    (folder / "test.jsonl").write_text(GSM8K_ROW)
    GSM8K(data_dir=str(folder)).problems("train")


def whole_gsm8k(folder: Path, content: bytes) -> None:
    (folder / "train.jsonl").write_bytes(content)
    (folder / "test.jsonl").write_text(GSM8K_ROW)
    GSM8K(data_dir=str(folder)).problems("train")


def math(folder: Path, content: bytes) -> None:
    (folder / "train.json").write_bytes(content)
    (folder / "math500.jsonl").write_text('{"problem": "1+1?", "answer": "2"}\n')
    Math(data_dir=str(folder)).problems("train")


def jsonl(folder: Path, content: bytes) -> None:
    path = folder / "data.jsonl"
    path.write_bytes(b'{"prompt": "1+1=", "response": "2", "reward": 1}\n' + content)
    limits = {"max_prompt_tokens": 99, "max_response_tokens": 99, "vocab_size": 100}
    offline.load([str(path)], tiny_tokenizer(), chat=False, **limits)


DATA = {
    "malformed": (gsm8k, b"{'question': 1}", ["train.jsonl, line 2", "not valid JSON"]),
    "cut": (gsm8k, b'{"question": "a", "ans', ["train.jsonl, line 2", "not valid JSON"]),
    "no object": (gsm8k, b"[1, 2]", ["train.jsonl, line 2", "'question'", "found list"]),
    "empty": (whole_gsm8k, b"", ["task.data_dir", "no problems"]),
    "blank": (whole_gsm8k, b"\n \n", ["task.data_dir", "no problems"]),
    "binary": (gsm8k, b"\x1f\x8b\x08\xff\xfe", ["train.jsonl", "line 2", "not UTF-8"]),
    "latin-1": (gsm8k, b'{"question": "caf\xe9"}', ["train.jsonl", "line 2", "not UTF-8"]),
    "zeros": (gsm8k, b"\0\0\0\0", ["train.jsonl, line 2", "not valid JSON"]),
    "field": (
        gsm8k,
        b'{"questoin": "a", "answer": "#### 1"}',
        ["line 2", "'question' must be text", "is it 'questoin'?"],
    ),
    "type": (gsm8k, b'{"question": 5, "answer": "#### 1"}', ["line 2", "'question'", "is int"]),
    "half a character": (
        gsm8k,
        b'{"question": "\\ud83d", "answer": "#### 1"}',
        ["line 2", "'question' holds half of a character"],
    ),
    "math malformed": (math, b"[{]", ["train.json", "not valid JSON"]),
    "math empty": (math, b"[]", ["task.data_dir", "no problem with an answer"]),
    "math field": (
        math,
        b'[{"problem": "a", "anwser": "1"}]',
        ["train.json, row 0", "'answer' must be text, a number or null", "is it 'anwser'?"],
    ),
    "offline malformed": (jsonl, b"{1}", ["data.jsonl, line 2", "not JSON"]),
    "offline binary": (jsonl, b"\xff\xfe\0", ["data.jsonl, line 2", "not UTF-8"]),
    "offline field": (
        jsonl,
        b'{"prompt": "1", "respones": "2", "reward": 1}',
        ["data.jsonl, line 2", "'respones'", "did you mean 'response'?"],
    ),
    "offline blank prompt": (
        jsonl,
        b'{"prompt": "", "response": "2", "reward": 1}',
        ["data.jsonl, line 2", "no tokens"],
    ),
    "offline special prompt": (
        jsonl,
        b'{"prompt": "<eos>", "response": "2", "reward": 1}',
        ["data.jsonl, line 2", "nothing but special or unknown tokens"],
    ),
    "offline empty response": (
        jsonl,
        b'{"prompt": "1", "response": "", "truncated": true, "reward": 1}',
        ["data.jsonl, line 2", "'response' is empty and 'truncated' is true", "leave the line"],
    ),
    "offline no response tokens": (
        jsonl,
        b'{"prompt": "1", "response_tokens": [], "reward": 1}',
        ["data.jsonl, line 2", "'response_tokens' is empty"],
    ),
    "offline vocabulary": (
        jsonl,
        b'{"prompt": "1", "response_tokens": [5, 100], "reward": 1}',
        ["data.jsonl, line 2", "100 is outside the model's vocabulary of 100"],
    ),
    "offline reward": (
        jsonl,
        b'{"prompt": "1", "response": "2", "reward": NaN}',
        ["data.jsonl, line 2", "'reward' must be a finite number"],
    ),
}


def one_line(error: BaseException, words: list[str]) -> None:
    message = str(error)
    assert all(word in message for word in words), message
    assert "\n" not in message and len(message) < 600, message


@pytest.mark.parametrize("mistake", DATA)
def test_bad_data_is_named_with_its_line(tmp_path: Path, mistake: str) -> None:
    read, content, words = DATA[mistake]
    with pytest.raises(ValueError) as caught:
        read(tmp_path, content)
    one_line(caught.value, words)


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).mkdir()
        with pytest.raises(ValueError, match=rf"task.data_dir: .*{name} can't be read: Is a dir"):
            list(read_file(tmp_path / name))


def test_a_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    for name, text in (("a.jsonl", '{"a": 1}'), ("a.json", '[{"a": 1}]')):
        (tmp_path / name).write_text(text, encoding="utf-8-sig")
        assert [row for _, row in read_file(tmp_path / name)] == [{"a": 1}]


def test_a_misspelt_column_of_parquet_is_suggested(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    table = pyarrow.table({"subreddit": ["a"], "titel": ["b"], "post": ["c"], "n": [1]})
    parquet.write_table(table, tmp_path / "a.parquet")
    [(where, row)] = _read_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a.parquet, row 0: .*'title'.* is it 'titel'\?"):
        query(where, row)


def test_nothing_near_is_not_suggested() -> None:
    with pytest.raises(ValueError, match=r"is not among \['zzz'\]$"):
        text_field("row 1", {"zzz": 1}, "question")


# --------------------------------------------------------------------------- prompts


class Chat:
    chat = True


class Plain:
    chat = False


@pytest.mark.parametrize("task", [Plain(), Chat()])
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", ["prompt 1 ('')"]),
        (" \n", ["prompt 1 (' \\n')", "leave the problem out"]),
        ("<bos><eos>", ["prompt 1 ('<bos><eos>')", "special", "leave the problem out"]),
    ],
)
def test_a_prompt_that_says_nothing_is_named(task: object, prompt: str, words: list[str]) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "<bos>{% for m in messages %}({{ m.content }}){% endfor %}"
    problems = [Problem(prompt_id=i, prompt=p, answer="") for i, p in enumerate(["1+1=", prompt])]
    options = {"task": task, "max_tokens": 20, "long_prompts": "error"}
    with pytest.raises(ValueError) as caught:
        fit_prompts(tokenizer, problems, **options)
    one_line(caught.value, words)
    assert len(fit_prompts(tokenizer, problems[:1], **options).tokens) == 1


def test_a_chat_template_that_fails_is_named() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no roles please') }}"
    with pytest.raises(ValueError) as caught:
        fit_prompts(
            tokenizer,
            [Problem(prompt_id=0, prompt="1+1=", answer="")],
            task=Chat(),
            max_tokens=20,
            long_prompts="error",
        )
    one_line(caught.value, ["task.chat=true", "fails on prompt 0", "no roles please"])


# --------------------------------------------------------------------------- tasks and settings


class ScoresOne(Digits):
    def score(self, response: str) -> float:  # type: ignore[override]
        return 0.0


class NoProblems(Digits):
    problems = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (ScoresOne(), ["task ScoresOne", "score(problems, responses)"]),
        (NoProblems(), ["task NoProblems", "problems(split)"]),
    ],
)
def test_a_task_that_can_not_be_called_is_named(task: Any, words: list[str]) -> None:
    check_task(Digits())
    with pytest.raises(ValueError) as caught:
        check_task(task)
    one_line(caught.value, words)


@pytest.mark.parametrize(
    ("problems", "words"),
    [
        (None, ["problems('test')", "not NoneType"]),
        ("1+1=", ["problems('test')", "not str"]),
        (iter([]), ["problems('test')", "a list of Problem"]),
        ([], ["problems('test') is empty"]),
        ([{"prompt": "?"}], ["number 0 is a dict"]),
        ([Problem(prompt_id=0, prompt=5, answer="")], ["number 0: prompt must be text"]),  # type: ignore[arg-type]
    ],
)
def test_problems_that_are_none_are_named(problems: Any, words: list[str]) -> None:
    check_problems(Digits().problems("test"), "test")
    with pytest.raises(ValueError) as caught:
        check_problems(problems, "test")
    one_line(caught.value, words)


def composed(*overrides: str) -> Any:
    register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return compose("config", overrides=list(overrides))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["loss.importance=sequnce"], ["loss: importance='sequnce'"]),
        (["loss=grpo", "loss.clip_low=-3"], ["loss: ", "clip_low"]),
        (["loss=alpha_tb", "loss.alpha=nan"], ["loss: ", "alpha"]),
        (["buffer=softmax", "buffer.rule.inverse_temperature=nan"], ["buffer.rule: ", "nan"]),
        (["buffer.rule._target_=losses.tb_vargrad"], ["buffer.rule: "]),
    ],
)
def test_what_only_a_loss_or_a_rule_refuses_is_found_before_the_first_step(
    overrides: list[str], words: list[str]
) -> None:
    cfg = composed(*overrides)
    with pytest.raises(ValueError) as caught:
        check_loss(cfg)
        check_rule(cfg)
    one_line(caught.value, words)


@pytest.mark.parametrize("loss", sorted(p.stem for p in (ROOT / "conf" / "loss").glob("*.yaml")))
def test_every_loss_passes(loss: str) -> None:
    check_loss(composed(f"loss={loss}"))
    check_loss(composed(f"loss={loss}", "trainer.log_z_lr=0.1"))


@pytest.mark.parametrize("rule", sorted(p.stem for p in (ROOT / "conf" / "buffer").glob("*.yaml")))
def test_every_rule_passes(rule: str) -> None:
    check_rule(composed(f"buffer={rule}"))


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK": "5", "WORLD_SIZE": "2"}, ["RANK='5'", "from 0 to 1", "torchrun"]),
        ({"RANK": "1"}, ["RANK='1'", "torchrun"]),
        ({"RANK": "abc", "WORLD_SIZE": "2"}, ["RANK='abc'", "torchrun"]),
        ({"WORLD_SIZE": "0"}, ["WORLD_SIZE='0'", "from 1 on", "torchrun"]),
        ({"LOCAL_WORLD_SIZE": "0"}, ["LOCAL_WORLD_SIZE='0'", "torchrun"]),
    ],
)
def test_variables_that_torchrun_would_not_set_so_are_named(
    monkeypatch, capsys, variables: dict[str, str], words: list[str]
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError) as caught:
        ranks_from_environment(1)
    one_line(caught.value, words)
    train.say_once(str(caught.value))  # whatever its rank may be
    assert words[0] in capsys.readouterr().err


# --------------------------------------------------------------------------- models


def llama(folder: Path, **options: object) -> str:
    """A config of a tiny Llama, and the tokenizer of 48 tokens."""
    sizes = {"vocab_size": tiny.VOCABULARY, "hidden_size": 8, "num_attention_heads": 1} | options
    config = LlamaConfig(num_hidden_layers=1, intermediate_size=8, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    tiny.save_tokenizer(folder)
    return str(folder)


def edit(path: Path, **values: object) -> None:
    content = json.loads(path.read_text()) | values
    path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))


def small_vocabulary(folder: Path) -> None:
    path = llama(folder, vocab_size=tiny.VOCABULARY - 1)
    tokenizer = modeling.load_tokenizer(path)
    modeling.check_tokenizer(path, tokenizer, given=None, trust_remote_code=False)


def larger_tokenizer(folder: Path) -> None:
    path, other = llama(folder), folder / "other"
    tiny_tokenizer().save_pretrained(other)
    tokenizer = modeling.load_tokenizer(str(other))
    modeling.check_tokenizer(path, tokenizer, given=str(other), trust_remote_code=False)


def other_tokenizer(folder: Path) -> None:
    path, other = llama(folder, vocab_size=200), folder / "other"
    tiny_tokenizer().save_pretrained(other)
    tokenizer = modeling.load_tokenizer(str(other))
    modeling.check_tokenizer(path, tokenizer, given=str(other), trust_remote_code=False)


def no_end_of_text(folder: Path) -> None:
    edit(Path(llama(folder)) / "tokenizer_config.json", eos_token=None)
    modeling.load_tokenizer(str(folder))


def bert(folder: Path) -> None:
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=9)
    BertForMaskedLM(config).save_pretrained(folder)
    modeling.check_causal(str(folder))


def t5(folder: Path) -> None:
    T5Config().save_pretrained(folder)
    modeling.check_causal(str(folder))


def classifier(folder: Path) -> None:
    edit(Path(llama(folder)) / "config.json", architectures=["LlamaForSequenceClassification"])
    modeling.check_causal(str(folder))


def unknown_architecture(folder: Path) -> None:
    edit(Path(llama(folder)) / "config.json", model_type="unheard_of")
    modeling.check_causal(str(folder))


def no_weights(folder: Path) -> None:
    modeling.load_policy(llama(folder), device=torch.device("cpu"), dtype=torch.float32)


def weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any], **config: int) -> None:
    """A model whose file of weights was changed, opened."""
    path = folder / "model.safetensors"
    LlamaForCausalLM(LlamaConfig.from_pretrained(llama(folder))).save_pretrained(folder)
    if config:
        edit(folder / "config.json", **config)
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    modeling.load_policy(str(folder), device=torch.device("cpu"), dtype=torch.float32)


def truncated(folder: Path) -> None:
    llama(folder)
    (folder / "model.safetensors").write_bytes(b"\x80\x02" * 9)
    modeling.load_policy(str(folder), device=torch.device("cpu"), dtype=torch.float32)


def half_a_tokenizer(folder: Path) -> None:
    llama(folder)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    modeling.load_tokenizer(str(folder))


def no_such_activation(folder: Path) -> None:
    weights(folder, lambda t: None, hidden_act="nonsense")  # type: ignore[arg-type]


NORM = "model.norm.weight"
MODELS: dict[str, tuple[Callable[[Path], None], list[str]]] = {
    "a weight less": (
        lambda folder: weights(folder, lambda t: t.pop(NORM)),
        ["lack 1 of the model's weights, such as model.norm.weight", "config.json"],
    ),
    "a layer less": (
        lambda folder: weights(folder, lambda t: None, num_hidden_layers=2),
        ["weights, such as model.layers.1.", "config.json"],
    ),
    "other shapes": (
        lambda folder: weights(folder, lambda t: t.update({NORM: torch.ones(9)})),
        ["model.path=", "can't be opened"],
    ),
    "not a number": (
        lambda folder: weights(folder, lambda t: t[NORM].fill_(float("nan"))),
        ["model.norm.weight holds NaN or infinity"],
    ),
    "truncated": (truncated, ["model.path=", "can't be opened"]),
    "half a tokenizer": (half_a_tokenizer, ["the tokenizer of", "can't be opened"]),
    "activation": (no_such_activation, ["model.path=", "can't be opened", "nonsense"]),
    "small vocabulary": (
        small_vocabulary,
        ["token ids up to 47", "knows 47 tokens", "set model.tokenizer"],
    ),
    "larger tokenizer": (larger_tokenizer, ["knows 48 tokens", "leave model.tokenizer out"]),
    "other tokenizer": (
        other_tokenizer,
        ["model.tokenizer=", "is not the tokenizer of model.path", "leave model.tokenizer out"],
    ),
    "no end of text": (no_end_of_text, ["no end-of-text token", "set model.tokenizer"]),
    "masked model": (bert, ["model.path=", "BertForMaskedLM", "ForCausalLM"]),
    "encoder-decoder": (t5, ["model.path=", "no causal language model but t5"]),
    "classifier": (classifier, ["model.path=", "LlamaForSequenceClassification"]),
    "unknown": (unknown_architecture, ["model.path=", "can't be opened", "unheard_of"]),
    "no weights": (no_weights, ["model.path=", "can't be opened"]),
}


@pytest.mark.parametrize("mistake", MODELS)
def test_a_model_that_does_not_fit_is_named(tmp_path: Path, mistake: str) -> None:
    check, words = MODELS[mistake]
    with pytest.raises(ValueError) as caught:
        check(tmp_path)
    if mistake in ("unknown", "no weights"):  # transformers' own words are long
        assert "\n" not in str(caught.value) and all(w in str(caught.value) for w in words)
    else:
        one_line(caught.value, words)


def test_weights_of_no_layer_are_said(tmp_path: Path, caplog) -> None:
    weights(tmp_path, lambda t: t.update({"value_head.weight": torch.ones(1)}))
    assert "1 weights in its files are not of this model, such as value_head" in caplog.text


def test_models_that_fit_pass(tmp_path: Path, tiny_models: dict[str, str]) -> None:
    for path in tiny_models.values():
        modeling.check_causal(path)
        for given in (None, path):
            tokenizer = modeling.load_tokenizer(path)
            modeling.check_tokenizer(path, tokenizer, given=given, trust_remote_code=False)
    path = llama(tmp_path / "bare")
    (tmp_path / "bare" / "tokenizer.json").unlink()  # nothing to compare a given tokenizer with
    other = modeling.load_tokenizer(tiny_models["llama"])
    modeling.check_tokenizer(path, other, given=tiny_models["llama"], trust_remote_code=False)


def test_a_token_of_a_prompt_that_the_model_does_not_know_is_named(tmp_path: Path) -> None:
    path, known = llama(tmp_path), np.array([tiny.VOCABULARY - 1], np.int32)
    modeling.check_prompt_ids(path, [known], trust_remote_code=False)
    with pytest.raises(ValueError, match="a prompt has the token id 48, .* knows 48 tokens"):
        modeling.check_prompt_ids(path, [known, known + 1], trust_remote_code=False)


def test_without_a_pad_token_the_end_of_text_is_used(tmp_path: Path) -> None:
    edit(Path(llama(tmp_path)) / "tokenizer_config.json", pad_token=None)
    assert AutoTokenizer.from_pretrained(tmp_path).pad_token is None
    tokenizer = modeling.load_tokenizer(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == tiny.EOS


# --------------------------------------------------------------------------- rewards


class Declares:
    """Gives what a response says, with a bonus, and declares 0 to 1."""

    name = "declares"
    reward_range = (0.0, 1.0)

    def score(self, problems, responses):
        return [{"value": float(r), "bonus": 0.5} for r in responses]


def test_a_reward_outside_of_its_range_is_a_failure_with_the_penalty(caplog) -> None:
    problems = [Problem(prompt_id=i, prompt="", answer="") for i in range(4)]
    with caplog.at_level(logging.WARNING, "tba"):
        logging.getLogger("tba").propagate = True
        scored = LocalScorer(Declares(), penalty=-3.0).score(
            problems, ["0.5", "0.6", "-0.5", "-0.51"]
        )
    assert [s.status for s in scored] == ["ok", "range", "ok", "range"] and "range" in FAILURES
    assert [s.reward for s in scored] == [1.0, -3.0, 0.0, -3.0]
    assert "1.1 is outside of the declared range 0 to 1; penalty -3" in caplog.text


@pytest.mark.parametrize("declared", [(1, 0), (0,), (0, "x"), "ab", 5, (0, float("inf"))])
def test_a_range_that_is_none_is_named(declared: object) -> None:
    task = Declares()
    task.reward_range = declared  # type: ignore[assignment]
    with pytest.raises(ValueError, match="task declares: reward_range="):
        make_scorer(task, {}, RewardConfig(num_workers=0))


def test_tasks_declare_what_holds(tmp_path: Path) -> None:
    assert reward_range(Arithmetic()) == reward_range(GSM8K()) == (0.0, 1.0)
    assert reward_range(Digits()) == (-np.inf, np.inf)


def arrivals(*rewards: float) -> trainer.TrainerParts:
    """A trainer of which nothing but its arrivals exists."""

    class Parts:
        ranks = type("Ranks", (), {"rank": 0, "num_trainers": 1})
        totals = trainer.Totals()
        arrivals = trainer.Arrivals(received=len(rewards))

    Parts.arrivals.reward_bounds = min(rewards), max(rewards)
    return Parts  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("rewards", "said"), [([0.5] * 8, 1), ([0.5] * 7, 0), ([0.5] * 7 + [0.6], 0)]
)
def test_equal_rewards_are_said_once_when_there_are_enough(caplog, rewards, said) -> None:
    parts = arrivals(*rewards)
    logging.getLogger("tba").propagate = True
    with caplog.at_level(logging.WARNING, "tba"):
        for _ in range(3):
            trainer.note_equal_rewards(parts, 8)
    assert caplog.text.count("responses so far have the same reward, 0.5") == said


@pytest.mark.parametrize("case", CASES, ids=case_name)
@pytest.mark.parametrize("reward", [0.0, 1.0, -1e4])
def test_equal_rewards_give_a_finite_loss_and_gradient(case, reward) -> None:
    groups = random_groups(3, [3, 2, 4])
    for group in groups:
        for response in group:
            response.reward = reward
    batch = batch_for(case, groups)
    output = run(case, batch)
    assert torch.isfinite(output.loss)
    assert all(np.isfinite(values).all() for values in gradients(output, batch))
    assert all(np.isfinite(float(value)) for value in output.metrics.values())


# --------------------------------------------------------------------------- the command


def refused(*overrides: str, num_ranks: int = 0, words: list[str]) -> None:
    """Exit code 2, and one line that says why, before anything is started."""
    done = run_train(num_ranks, *FAST, "engine=hf", *overrides, timeout_s=100)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if "error: " in line or " ends: " in line]
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_run_folder_that_can_not_be_made_is_named(tmp_path, random_model) -> None:  # noqa: F811
    (tmp_path / "file").write_text("")
    refused(
        f"model.path={random_model}",
        f"run.root={tmp_path / 'file'}",
        "run.name=x",
        words=["run.root=", "file", "can't be written"],
    )


@pytest.mark.slow
def test_a_read_only_folder_is_named(random_model) -> None:  # noqa: F811
    refused(f"model.path={random_model}", "run.root=/proc/x", words=["run.root='/proc/x'"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.stepz=3"], ["unknown key trainer.stepz; did you mean trainer.steps?"]),
        (["run.name=taken"], ["run.name='taken'", "holds a run already"]),
    ],
)
def test_a_typo_or_an_existing_run_is_named(
    tmp_path,
    random_model,  # noqa: F811
    overrides,
    words,
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "summary.json").write_text("{}")
    refused(f"model.path={random_model}", f"run.root={tmp_path}", *overrides, words=words)


HOLDER = """
import sys, time
from pathlib import Path
from run_folder import hold
held = hold(Path(sys.argv[1]))
if child := __import__("os").fork():
    print(child, flush=True)
time.sleep(100)
"""


def test_a_folder_that_another_job_writes_into_is_refused_until_it_ends(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        child = psutil.Process(int(holder.stdout.readline()))
        try:
            with pytest.raises(UserError, match=rf"another job .* \(process {holder.pid} on .*\)"):
                hold(tmp_path)
            holder.kill()
            holder.wait()
            assert child.is_running()  # and keeps open what the killed job had open
            with hold(tmp_path) as file:
                file.seek(0)
                assert file.read().startswith(f"process {os.getpid()} on ")
        finally:
            child.kill()


@pytest.mark.slow
def test_another_tokenizer_is_named_before_anything_starts(tmp_path, random_model) -> None:  # noqa: F811
    tiny.save_tokenizer(tmp_path / "tokenizer")
    refused(
        f"model.path={random_model}",
        f"model.tokenizer={tmp_path / 'tokenizer'}",
        f"run.root={tmp_path / 'runs'}",
        words=["model.tokenizer=", "is not the tokenizer of"],
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_a_port_in_use_is_named(tmp_path, random_model, monkeypatch) -> None:  # noqa: F811
    from test_end_to_end import environment

    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = str(taken.getsockname()[1])
        variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        variables |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        env = environment() | variables
        monkeypatch.setattr("test_end_to_end.environment", lambda: env)
        refused(
            f"model.path={random_model}",
            f"run.root={tmp_path}",
            words=[f"MASTER_PORT={port} is in use", "set MASTER_PORT to a free port"],
        )


def only_end_of_text(folder: Path) -> str:
    """A model whose responses all are the end-of-text token alone."""
    tokenizer = tiny_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
    )
    policy = LlamaForCausalLM(config)
    with torch.no_grad():  # every state points to where the end of text is
        policy.get_input_embeddings().weight.add_(1.0)
        policy.get_output_embeddings().weight[tokenizer.eos_token_id] = 0.5
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow
def test_a_run_of_empty_responses_with_equal_rewards_goes_on_and_says_so(tmp_path: Path) -> None:
    done = run_train(
        0,
        *FAST,
        "engine=hf",
        f"model.path={only_end_of_text(tmp_path / 'model')}",
        f"run.root={tmp_path}",
        "run.name=run",
        "trainer.steps=6",
        "eval.num_problems=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss/total" in line]
    assert [line["reward/response_tokens_mean"] for line in steps] == [1.0] * 6
    assert all(line[name] is not None for line in steps for name in line)  # null: not finite
    assert done.stderr.count("all 256 responses so far have the same reward, 0: ") == 1
