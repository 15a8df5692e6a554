"""The tiny starter: its tokenizer, its examples, its stop, and the folder it leaves."""

import logging

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sft
from tasks.arithmetic import Arithmetic
from tasks.task import Problem, encode_prompt

QUICK = {"max_steps": 3, "batch_size": 8, "warmup_steps": 1}
_TOKENIZER = sft.tiny_tokenizer()


@pytest.fixture(scope="module")
def quick_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    sft.build_tiny(folder, **QUICK)
    return folder


# ------------------------------------------------------------------------- tokenizer


def test_tokenizer_has_a_token_for_every_character():
    tokenizer = sft.tiny_tokenizer()
    assert len(tokenizer) == 100
    tokens = tokenizer(sft.CHARACTERS)["input_ids"]
    assert sorted(tokens) == list(range(4, 100))
    special = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
    assert special == (0, 1, 2) and tokenizer.unk_token_id == 3
    assert tokenizer("é\t")["input_ids"] == [3, 3]


@given(st.text(alphabet=sft.CHARACTERS.replace("<", "")))
@settings(max_examples=200, deadline=None)
def test_tokenizer_round_trip(text):
    tokens = _TOKENIZER(text)["input_ids"]
    assert len(tokens) == len(text)
    assert _TOKENIZER.decode(tokens) == text
    assert _TOKENIZER.batch_decode([tokens + [2, 0]], skip_special_tokens=True) == [text]


def test_saved_tokenizer_is_the_same(quick_folder):
    saved = AutoTokenizer.from_pretrained(quick_folder)
    text = " a  . , 's n't\n\n12+3= <eos>!"
    assert saved(text)["input_ids"] == _TOKENIZER(text)["input_ids"]
    assert saved.decode(saved(text)["input_ids"]) == text
    ids = (saved.pad_token_id, saved.bos_token_id, saved.eos_token_id, saved.unk_token_id)
    assert ids == (0, 1, 2, 3)
    assert saved.model_max_length == sft.MAX_POSITIONS and not saved.chat_template


# ------------------------------------------------------------------------- training


def test_loss_falls_on_the_answer_and_the_end_of_text_only():
    problems = [
        Problem(prompt_id=0, prompt="1+2=", answer="3"),
        Problem(prompt_id=1, prompt="55+66=", answer="121"),
    ]
    tokens, labels = sft.encode_examples(_TOKENIZER, problems)
    assert tokens.shape == labels.shape == (2, 9)
    ids = _TOKENIZER.convert_tokens_to_ids
    assert tokens[0].tolist() == ids(list("1+2=3")) + [2, 0, 0, 0]
    assert labels[0].tolist() == [-100] * 3 + ids(["3"]) + [2] + [-100] * 4
    assert tokens[1].tolist() == ids(list("55+66=121"))
    assert labels[1].tolist() == [-100] * 5 + ids(list("121")) + [2]


def train_on_few(target: float, max_steps: int = 150):
    """A model that has learned eight problems by heart, as far as the target asks."""
    problems = Arithmetic().problems("train")[:8]
    examples = sft.encode_examples(_TOKENIZER, problems)
    model = sft.tiny_model(_TOKENIZER, seed=0)
    reports = []
    accuracy = sft.train_until(
        model, examples, examples, seed=0, target_accuracy=target, max_steps=max_steps,
        batch_size=16, learning_rate=1e-3, warmup_steps=5,
        report=lambda step, loss, accuracy: reports.append((step, loss, accuracy)),
    )  # fmt: skip
    return model, problems, accuracy, reports


def test_training_stops_at_the_first_evaluation_that_reaches_the_target():
    _, _, accuracy, reports = train_on_few(0.5)
    assert accuracy >= 0.5
    assert [step for step, _, _ in reports] == list(range(1, len(reports) + 1))
    assert all(seen < 0.5 for _, _, seen in reports[:-1]) and reports[-1][2] == accuracy
    assert reports[-1][1] < reports[0][1]


def test_greedy_accuracy_is_what_generation_scores():
    model, learned, _, _ = train_on_few(0.75)
    task = Arithmetic()
    problems = learned + task.problems("test")[:24]
    accuracy = sft.greedy_accuracy(model, *sft.encode_examples(_TOKENIZER, problems))
    responses = []
    for problem in problems:
        prompt = torch.tensor([encode_prompt(_TOKENIZER, problem, chat=False)])
        output = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
            max_new_tokens=task.max_response_tokens,
        )  # fmt: skip
        response = output[0, prompt.shape[1] :].tolist()
        # A response that was cut is no answer: the end of text belongs to it.
        ended = response[-1] == _TOKENIZER.eos_token_id
        responses.append(_TOKENIZER.decode(response, skip_special_tokens=True) if ended else "")
    scores = [parts["correct"] for parts in task.score(problems, responses)]
    assert sum(scores) / len(scores) == pytest.approx(accuracy)
    assert 0.1 < accuracy < 0.9


def test_same_seed_same_weights_and_global_state_is_left_alone(quick_folder, tmp_path):
    first = load_file(quick_folder / "model.safetensors")
    threads = torch.get_num_threads()
    torch.manual_seed(99)
    before = torch.get_rng_state()
    sft.build_tiny(tmp_path / "again", **QUICK, num_threads=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == threads
    sft.build_tiny(tmp_path / "other", **QUICK, seed=1)
    again = load_file(tmp_path / "again" / "model.safetensors")
    other = load_file(tmp_path / "other" / "model.safetensors")
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)


# ------------------------------------------------------------------------- the folder


def test_folder_opens_as_an_ordinary_model(quick_folder):
    model = AutoModelForCausalLM.from_pretrained(quick_folder)
    assert model.dtype == torch.float32
    assert 0.8e6 < model.num_parameters() < 0.95e6
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.head_dim == 32 and model.config.vocab_size == 100
    for config in (model.config, model.generation_config):
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == (0, 1, 2)
    names = {file.name for file in quick_folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "generation_config.json",
                     "tokenizer.json", "tokenizer_config.json"}  # fmt: skip
    assert [file.name for file in quick_folder.parent.iterdir()] == ["tiny"]


def test_budget_below_the_target_is_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        accuracy = sft.build_tiny(tmp_path / "tiny", **QUICK)
    assert accuracy < 0.45
    assert "below target_accuracy" in caplog.text
    assert "step 3/3" in caplog.text and "held-out accuracy" in caplog.text


def test_crash_leaves_nothing_behind(tmp_path, monkeypatch):
    def crash(*args, **kwargs):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sft, "train_until", crash)
    with pytest.raises(RuntimeError, match="out of memory"):
        sft.build_tiny(tmp_path / "tiny", **QUICK)
    assert list(tmp_path.iterdir()) == []


def test_existing_folder_is_refused_before_training(quick_folder, monkeypatch):
    monkeypatch.setattr(sft, "train_until", lambda *args, **kwargs: pytest.fail("it trained"))
    with pytest.raises(ValueError, match="already exists"):
        sft.build_tiny(quick_folder, **QUICK)


@pytest.mark.parametrize(
    ("key", "value"),
    [("target_accuracy", 0.0), ("target_accuracy", 45), ("max_steps", 0), ("num_threads", 0)],
)
def test_settings_out_of_range_are_refused(tmp_path, key, value):
    with pytest.raises(ValueError, match=f"{key}={value}"):
        sft.build_tiny(tmp_path / "tiny", **{key: value})


def test_command_line(tmp_path, monkeypatch, capsys):
    arguments = ["--out", str(tmp_path / "tiny"), "--max-steps", "2", "--seed", "5"]
    monkeypatch.setattr("sys.argv", ["sft.py", *arguments])
    sft.main()
    assert "held-out greedy accuracy 0.0" in capsys.readouterr().out
    assert (tmp_path / "tiny" / "model.safetensors").is_file()
    with pytest.raises(SystemExit, match="already exists"):
        sft.main()


@pytest.mark.slow
def test_full_build_stops_half_way_and_stays_unsure(tmp_path):
    accuracy = sft.build_tiny(tmp_path / "tiny")
    assert 0.35 <= accuracy <= 0.6
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny")
    held_out = sft.encode_examples(_TOKENIZER, Arithmetic().problems("test"))
    assert sft.greedy_accuracy(model, *held_out) == pytest.approx(accuracy)
    with torch.no_grad():
        logprobs = model(input_ids=held_out[0]).logits.log_softmax(-1)
    answered = held_out[1] != sft.IGNORED
    gold = logprobs.gather(-1, held_out[1].clamp(min=0)[..., None])[..., 0] * answered
    sampled = gold.sum(-1).exp()  # probability of the right answer at temperature 1
    assert 0.15 < sampled.mean() < accuracy
    assert ((sampled > 0.02) & (sampled < 0.98)).float().mean() > 0.7
