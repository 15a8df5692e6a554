"""Every mistake in the config has one line that names the key and the fix; every yaml file fits."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from test_comm import make_ranks

import config

ROOT = Path(config.__file__).parent
CHOICES = [(p.parent.name, p.stem) for p in sorted(Path(config.conf_dir()).glob("*/*.yaml"))]


@pytest.fixture(autouse=True)
def schema() -> None:
    config.register()


SIZES = [  # what the tests reckon with, whatever the files of conf/ choose
    "trainer.steps=300",
    "trainer.batch_size=140",
    "trainer.responses_per_prompt=20",
    "trainer.publish_every=1",
    "trainer.lr.warmup_steps=20",
    "trainer.lr.decay_steps=0",
    "searcher.responses_per_prompt=20",
    "buffer.capacity_per_prompt=100",
]


def chosen(*overrides: str) -> DictConfig:
    with initialize_config_dir(version_base="1.3", config_dir=config.conf_dir()):
        return compose("config", overrides=["engine=hf", *overrides])


def composed(*overrides: str) -> DictConfig:
    return chosen(*SIZES, *overrides)


def complaint(cfg: DictConfig, world_size: int = 2) -> str:
    """The one line that `validate` raises."""
    with pytest.raises(ValueError) as caught:
        config.validate(cfg, make_ranks(0, world_size, cfg.cluster.trainers))
    message = str(caught.value)
    assert message and "\n" not in message
    return message


# --------------------------------------------------------------------------- what is right


@pytest.mark.parametrize(
    ("overrides", "world_size"),
    [
        ([], 2),
        ([], 8),
        (["cluster.trainers=2", "trainer.batch_size=160"], 3),
        (["mode=sync"], 1),
        (["mode=sync"], 2),
        (["mode=sync", "trainer.batch_size=120"], 4),
        (["mode=sync", "loss=rloo"], 1),
        (["trainer.beta.final=0.004", "trainer.beta.stop_step=100"], 2),
        (["trainer.max_grad_norm=null", "seed=0", "eval.every=0", "run.rollouts_every=0"], 2),
        (["trainer.steps=3"], 2),  # shorter than its warm-up: a trial run
        (["buffer=softmax", "buffer.rule.inverse_temperature=0"], 2),
        (["mode=offline", "data=runs/a"], 1),
        (["mode=offline", "data=[a.jsonl,b.traj]", "searcher.responses_per_prompt=2"], 7),
        (["buffer.recency_prob_final=0", "buffer.max_staleness=9", "loss=tb_learned_z"], 2),
        (["searcher.explore.temperature_prob=0.3", "searcher.explore.temperature_high=2"], 2),
        (["trainer.packing.attention=off", "trainer.tokens_per_micro_batch=1"], 2),
        (["trainer.packing.attention=varlen", "trainer.precision=bfloat16"], 2),
        (["trainer.packing.attention=segments", "trainer.packing.share_prompts=false"], 2),
        (["trainer.parallel.cpu_offload=true", "cluster.trainers=2", "trainer.batch_size=120"], 4),
        (["trainer.parallel.kind=shard", "trainer.parallel.reshard_after_forward=false"], 2),
        (  # as many as the longest prompt and response have
            ["trainer.tokens_per_micro_batch=13", "searcher.reference_tokens_per_micro_batch=13"],
            2,
        ),
        (  # searchers then have no reference
            ["trainer.reference_reset_every=9", "searcher.reference_tokens_per_micro_batch=1"],
            2,
        ),
        (["task.long_prompts=drop", "rewards.penalty=-1", "rewards.num_workers=0"], 2),
    ],
)
def test_a_good_config_passes_as_it_is_readonly(overrides, world_size):
    cfg = composed(*overrides)
    before = OmegaConf.to_yaml(cfg)
    OmegaConf.set_readonly(cfg, True)
    trainers = world_size if cfg.mode == "offline" else cfg.cluster.trainers
    config.validate(cfg, make_ranks(world_size - 1, world_size, trainers))
    assert config.check_lengths(cfg, [[1, 2], [3]], 1024) == (
        cfg.task.max_prompt_tokens + cfg.task.max_response_tokens
    )
    assert OmegaConf.to_yaml(cfg) == before


def test_prompts_per_step_and_in_flight():
    cfg = composed("trainer.batch_size=120", "trainer.publish_every=2")
    assert config.prompts_per_step(cfg) == 6
    assert config.prompts_in_flight(cfg, make_ranks(1, 4)) == cfg.searcher.prompts_in_flight
    cfg.mode = "sync"
    assert config.prompts_in_flight(cfg, make_ranks(1, 4)) == 4  # 2 steps x 6 prompts / 3 searchers
    assert config.prompts_in_flight(cfg, make_ranks(0, 1)) == 12


# --------------------------------------------------------------------------- what is wrong

MISTAKES = [
    (["mode=online"], 2, ["mode='online'", "async, sync, offline, replay"]),
    (["deterministic=true"], 2, ["deterministic=true needs mode=sync"]),
    (["resume=auto"], 2, ["resume=auto needs run.name"]),
    (["checkpoint.keep=0"], 2, ["checkpoint.keep=0 must be positive"]),
    (["mode=offline"], 2, ["mode=offline", "data=", "jsonl"]),
    (["data=runs/a"], 2, ["data=runs/a", "mode=offline"]),
    (["mode=offline", "data=[a,3]"], 2, ["data=", "path"]),
    (["mode=offline", "data=3"], 2, ["data=3", "path"]),
    (["buffer.eviction=newest"], 2, ["buffer.eviction='newest'", "lowest_reward"]),
    (["buffer.prompt_priority=hard"], 2, ["buffer.prompt_priority='hard'", "difficulty"]),
    (["buffer.recency_prob_final=2"], 2, ["buffer.recency_prob_final=2", "between"]),
    (["buffer.max_staleness=0"], 2, ["buffer.max_staleness=0", "positive"]),
    (["trainer.log_z_lr=0"], 2, ["trainer.log_z_lr=0", "positive"]),
    (["searcher.explore.top_p_prob=2"], 2, ["searcher.explore.top_p_prob=2", "between"]),
    (
        ["searcher.explore.top_p_low=0.9", "searcher.explore.top_p_high=0.8"],
        2,
        ["searcher.explore.top_p_low=0.9", "top_p_high=0.8"],
    ),
    (
        ["searcher.explore.temperature_low=2", "searcher.explore.temperature_high=1"],
        2,
        ["searcher.explore.temperature_low=2", "temperature_high=1"],
    ),
    ([], 1, ["mode=async", "searcher", "torchrun", "mode=sync"]),
    (["cluster.trainers=2"], 2, ["cluster.trainers=2", "no searcher", "1 or less"]),
    (["cluster.trainers=9"], 4, ["cluster.trainers=9", "4 ranks", "3 or less"]),
    (["mode=sync", "cluster.trainers=2"], 1, ["cluster.trainers=2", "one rank"]),
    (["mode=sync", "cluster.trainers=2", "trainer.batch_size=160"], 3, ["cluster.trainers=1"]),
    (["trainer.batch_size=150"], 2, ["trainer.batch_size=150", "20", "try 140"]),
    (["trainer.batch_size=10"], 2, ["trainer.batch_size=10", "try 20"]),
    (["cluster.trainers=2"], 3, ["trainer.batch_size=140", "cluster.trainers = 40", "try 120"]),
    (
        ["searcher.responses_per_prompt=10"],
        2,
        ["responses_per_prompt=10", "raise S to 20"],
    ),
    (["trainer.responses_per_prompt=1"], 2, ["trainer.responses_per_prompt=1", "at least 2"]),
    (["mode=sync"], 4, ["mode=sync", "7 prompts", "3 searchers", "trainer.batch_size"]),
    (["buffer.capacity_per_prompt=19"], 2, ["buffer.capacity_per_prompt=19", "=20"]),
    (["+loss.normalise=true"], 2, ["unknown key loss.normalise", "loss.normalize?"]),
    (["loss=rloo", "+loss.normalize=true"], 2, ["unknown key loss.normalize"]),
    (["+task.max_operands=9"], 2, ["unknown key task.max_operands", "task.max_operand?"]),
    (["+buffer.rule.inverse_temp=1"], 2, ["unknown key buffer.rule.inverse_temp"]),
    (["+model.build.sed=1"], 2, ["unknown key model.build.sed", "model.build.seed?"]),
    (["+trainer.stepz=1"], 2, ["unknown key trainer.stepz", "trainer.steps?"]),
    (["+trainer.lr.peek=1"], 2, ["unknown key trainer.lr.peek", "trainer.lr.peak?"]),
    (["+trane={}"], 2, ["unknown key trane", "trainer?"]),
    (["loss._target_=losses.tb"], 2, ["loss._target_='losses.tb'", "can't be imported"]),
    (["loss._target_=lozzes.tb"], 2, ["loss._target_='lozzes.tb'", "lozzes"]),
    (["loss._target_=tb_vargrad"], 2, ["loss._target_='tb_vargrad'", "module.name"]),
    (["loss._target_=losses.__doc__"], 2, ["loss._target_", "not a function"]),
    (["loss._partial_=false"], 2, ["loss", "_partial_: true"]),
    (["~loss._target_"], 2, ["loss needs a `_target_`", "conf/loss"]),
    (["~loss"], 2, ["loss needs a `_target_`", "conf/loss"]),
    (["~task"], 2, ["task needs a `_target_`", "conf/task"]),
    (["~buffer"], 2, ["buffer.rule needs a `_target_`", "conf/buffer"]),
    (["task.max_response_tokens=0"], 2, ["task.max_response_tokens=0", "positive"]),
    (["task.max_prompt_tokens=many"], 2, ["task.max_prompt_tokens='many'", "positive"]),
    (["~task.max_prompt_tokens"], 2, ["task.max_prompt_tokens=None", "positive"]),
    (["trainer.beta.initial=0"], 2, ["trainer.beta.initial=0", "positive"]),
    (["trainer.beta.final=0"], 2, ["trainer.beta.final=0", "positive"]),
    (
        ["trainer.beta.final=0.004", "trainer.beta.target_step=10", "trainer.beta.stop_step=20"],
        2,
        ["trainer.beta:", "stop_step (20)", "target_step (10)"],
    ),
    (["trainer.lr.kind=cosine"], 2, ["trainer.lr.kind='cosine'", "wsd, linear, constant"]),
    (["trainer.lr.min_ratio=2"], 2, ["trainer.lr.min_ratio=2", "between 0.0 and 1.0"]),
    (["trainer.precision=fp16"], 2, ["trainer.precision='fp16'", "float32, bfloat16"]),
    (["trainer.packing.attention=paged"], 2, ["trainer.packing.attention='paged'", "segments"]),
    (["trainer.packing.attention=false"], 2, ["trainer.packing.attention", '"off" in quotes']),
    (
        ["trainer.packing.attention=varlen", "trainer.precision=float32"],
        2,
        ["trainer.packing.attention=varlen", "trainer.precision=bfloat16", "flex"],
    ),
    (["trainer.parallel.kind=ddp"], 2, ["trainer.parallel.kind='ddp'", "auto, replicate, shard"]),
    (
        ["trainer.parallel.cpu_offload=true"],
        2,
        ["trainer.parallel.cpu_offload=True", "trainer.parallel.kind=shard"],
    ),
    (
        ["trainer.parallel.kind=replicate", "trainer.parallel.reshard_after_forward=false"],
        2,
        ["trainer.parallel.reshard_after_forward=False", "trainer.parallel.kind=shard"],
    ),
    (["trainer.logprobs.chunk_tokens=0"], 2, ["trainer.logprobs.chunk_tokens=0", "positive"]),
    (
        ["trainer.logprobs.chunk_vocabulary=0"],
        2,
        ["trainer.logprobs.chunk_vocabulary=0", "positive"],
    ),
    (
        ["trainer.tokens_per_micro_batch=12"],
        2,
        ["trainer.tokens_per_micro_batch=12", "task.max_response_tokens = 13", "to 13 or more"],
    ),
    (
        ["searcher.reference_tokens_per_micro_batch=12"],
        2,
        ["searcher.reference_tokens_per_micro_batch=12", "= 13", "to 13 or more"],
    ),
    (
        ["mode=offline", "data=runs/a", "trainer.tokens_per_micro_batch=12"],
        2,
        ["trainer.tokens_per_micro_batch=12", "to 13 or more"],
    ),
    (["engine.name=sglang"], 2, ["engine.name='sglang'", "vllm or hf"]),
    (["engine.dtype=int8"], 2, ["engine.dtype='int8'", "float16"]),
    (["cluster.device=tpu"], 2, ["cluster.device='tpu'", "cuda"]),
    (["weights.backend=mpi"], 2, ["weights.backend='mpi'", "gloo"]),
    (["searcher.top_p=0"], 2, ["searcher.top_p=0", "positive"]),
    (["searcher.top_p=1.5"], 2, ["searcher.top_p=1.5", "between"]),
    (["searcher.temperature=0"], 2, ["searcher.temperature=0", "positive"]),
    (["buffer.recency_prob=1.1"], 2, ["buffer.recency_prob=1.1", "between"]),
    (["trainer.max_grad_norm=0"], 2, ["trainer.max_grad_norm=0", "positive"]),
    (["trainer.adam_betas=[0.9,1.5]"], 2, ["trainer.adam_betas", "1.5"]),
    (["trainer.adam_betas=[0.9]"], 2, ["trainer.adam_betas=[0.9]", "two numbers"]),
    (["trainer.adam_betas=[1,1]"], 2, ["trainer.adam_betas=[1.0, 1.0]", "below 1"]),
    (["seed=99999999999999999999"], 2, ["seed=99999999999999999999", "below"]),
    (["run.name=.."], 2, ["run.name='..'", "run.root=runs"]),
    (["run.name=/tmp/x"], 2, ["run.name='/tmp/x'"]),
    (["run.name=a/../../b"], 2, ["run.name='a/../../b'"]),
    (["run.root="], 2, ["run.root is empty"]),
    (["rewards.num_workers=1000000"], 2, ["rewards.num_workers=1000000", "1024"]),
    (["rewards.memory_limit_gb=0.001"], 2, ["rewards.memory_limit_gb=0.001"]),
    (["buffer.max_tokens=100"], 2, ["buffer.max_tokens=100", "trainer.batch_size=140"]),
    (["trainer.lora.targets=3"], 2, ["trainer.lora.targets=3", "all-linear"]),
    (["eval.num_problems=0"], 2, ["eval.num_problems=0", "positive"]),
    (["eval.top_p=1.5"], 2, ["eval.top_p=1.5", "between"]),
    (["eval.temperature=0"], 2, ["eval.temperature=0", "positive"]),
    (["eval.limit=0"], 2, ["eval.limit=0", "positive"]),
    (["eval.out=figures.json"], 2, ["eval.out=figures.json", ".jsonl"]),
    (["rewards.time_limit_s=0"], 2, ["rewards.time_limit_s=0", "positive"]),
    (
        ["rewards.time_limit_s=60", "cluster.timeout_s=60"],
        2,
        ["rewards.time_limit_s=60", "less than cluster.timeout_s=60"],
    ),
    (["engine.hang_timeout_s=0"], 2, ["engine.hang_timeout_s=0", "positive"]),
    (
        ["engine.hang_timeout_s=60", "cluster.timeout_s=60"],
        2,
        ["engine.hang_timeout_s=60", "less than cluster.timeout_s=60"],
    ),
    (
        ["task.long_prompts=cut"],
        2,
        ["task.long_prompts='cut'", "error, drop, truncate_left"],
    ),
]


def tensor_parallel(trainers: int, tp: int, world_size: int, per_node: int) -> None:
    cfg = composed(
        "engine=vllm",
        f"searcher.tp={tp}",
        f"cluster.trainers={trainers}",
        f"trainer.batch_size={20 * trainers}",
    )
    ranks = replace(make_ranks(0, world_size, trainers), local_world_size=per_node, tp=max(tp, 1))
    config.validate(cfg, ranks)


@pytest.mark.parametrize(
    ("trainers", "tp", "world_size", "per_node"),
    [(1, 2, 3, 3), (2, 2, 8, 4), (4, 4, 16, 8), (1, 3, 4, 4), (3, 1, 8, 4), (1, 7, 8, 8)],
)
def test_searchers_of_several_ranks(monkeypatch, trainers, tp, world_size, per_node):
    monkeypatch.setattr(config, "check_engine", lambda name: None)
    tensor_parallel(trainers, tp, world_size, per_node)


@pytest.mark.parametrize(
    ("trainers", "tp", "world_size", "per_node", "message"),
    [
        (1, 0, 2, 2, "searcher.tp=0 must be positive"),
        (
            1, 2, 4, 4,
            "searcher.tp=2: the 3 ranks beside cluster.trainers=1 can't be shared out in "
            "searchers of 2: start 3 ranks, or change cluster.trainers",
        ),
        (2, 4, 4, 4, "searchers of 4: start 6 ranks, or"),
        (
            1, 2, 9, 4,  # ranks 1 2 | 3 4 | 5 6 | 7 8
            "searcher.tp=2: ranks 3 to 4 of searcher 1 are not on one node of 4 ranks: make "
            "cluster.trainers and --nproc_per_node multiples of 2",
        ),
        (2, 2, 6, 3, "ranks 2 to 3 of searcher 0 are not on one node of 3 ranks"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_make_searchers(monkeypatch, trainers, tp, world_size, per_node, message):
    monkeypatch.setattr(config, "check_engine", lambda name: None)
    with pytest.raises(ValueError, match=re.escape(message)):
        tensor_parallel(trainers, tp, world_size, per_node)


def test_several_devices_need_vllm_and_ranks():
    assert complaint(composed("searcher.tp=2"), 3) == (
        "searcher.tp=2 needs engine=vllm: transformers runs on one device"
    )
    one = complaint(composed("searcher.tp=2", "engine=vllm", "mode=sync"), 1)
    assert one == (
        "searcher.tp=2 needs a rank for each device: run `torchrun --nproc_per_node=3 train.py "
        "...`, or set searcher.tp=1"
    )


@pytest.mark.parametrize(("overrides", "world_size", "fragments"), MISTAKES)
def test_a_mistake_is_named_with_its_fix(overrides, world_size, fragments):
    message = complaint(composed(*overrides), world_size)
    for fragment in fragments:
        assert fragment in message


def numbers(node: DictConfig, prefix: str = "") -> Iterator[tuple[str, type]]:
    """Keys of the dataclasses that hold one number, with its type."""
    for key in node:
        inner = node._get_node(key)
        kind = inner._metadata.ref_type
        if isinstance(inner, DictConfig) and not inner._is_missing():
            yield from numbers(inner, f"{prefix}{key}.")
        elif kind in (int, float):
            yield f"{prefix}{key}", kind


NUMBERS = list(numbers(OmegaConf.structured(config.Config)))


def test_the_numbers_are_found():
    keys = dict(NUMBERS)
    assert len(keys) > 30 and keys["seed"] is int and keys["trainer.beta.final"] is float


@pytest.fixture(scope="module")
def good() -> DictConfig:
    config.register()
    return composed()


def changed(cfg: DictConfig, key: str, value: float) -> DictConfig:
    """A copy with one value changed: composing hundreds of configs would take a minute."""
    cfg = copy.deepcopy(cfg)
    OmegaConf.update(cfg, key, value)
    return cfg


@pytest.mark.parametrize(("key", "kind"), [n for n in NUMBERS if n[0] != "rewards.penalty"])
def test_no_number_may_be_negative_but_a_penalty(good, key, kind):
    assert key in complaint(changed(good, key, kind(-1)))


@pytest.mark.parametrize("value", ["nan", "inf"])
@pytest.mark.parametrize("key", [key for key, kind in NUMBERS if kind is float])
def test_no_number_may_be_nan_or_infinite(good, key, value):
    assert key in complaint(changed(good, key, float(value)))


def test_vllm_must_be_installed_to_be_chosen(monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "vllm" else find_spec(name)
    )
    message = complaint(composed("engine=vllm"))
    assert "engine=vllm" in message and "make setup" in message and "engine=hf" in message
    config.validate(composed(), make_ranks(0, 2))


@pytest.mark.parametrize(
    ("overrides", "prompts", "context_length", "fragments"),
    [
        (
            [],
            [[1] * 8, [1] * 11, [1] * 9],
            None,
            ["2 prompts", "prompt 1 has 11", "it to 11", "task.long_prompts=drop"],
        ),
        (["task.max_response_tokens=60"], [[1]], 64, ["= 68", "64 tokens", "to 56 or less"]),
        (["task.max_prompt_tokens=64"], [[1]], 64, ["max_prompt_tokens=64", "64 tokens", "lower"]),
        ([], [], 64, ["task has no problems"]),
    ],
)
def test_lengths_that_do_not_fit(overrides, prompts, context_length, fragments):
    with pytest.raises(ValueError) as caught:
        config.check_lengths(composed(*overrides), prompts, context_length)
    assert "\n" not in str(caught.value)
    for fragment in fragments:
        assert fragment in str(caught.value)


def test_lengths_that_just_fit():
    assert config.check_lengths(composed(), [[1] * 8], 13) == 13
    assert config.check_lengths(composed(), [[1] * 8], None) == 13


def test_a_task_is_built_from_its_own_keys_alone():
    cfg = composed("task=gsm8k", "task.long_prompts=drop", "+task.twice=${trainer.batch_size}")
    node = config.task_node(cfg)
    assert set(cfg.task) - set(node) == {"long_prompts"} and cfg.task.long_prompts == "drop"
    assert node.twice == 140  # interpolations still find the rest
    OmegaConf.set_readonly(cfg, True)
    assert config.task_node(cfg) == node
    assert config.task_node(composed("~task")) == {}


# --------------------------------------------------------------------------- the command line

TYPOS = {
    "trainer.stepz=3": "trainer.steps",
    "trainer.batchsize=3": "trainer.batch_size",
    "trainer.lr.peek=1": "trainer.lr.peak",
    "trainer.beta.inital=1": "trainer.beta.initial",
    "searcher.temprature=1": "searcher.temperature",
    "sercher.temperature=1": "searcher.temperature",
    "buffer.recency_probability=1": "buffer.recency_prob",
    "cluster.trainer=2": "cluster.trainers",
    "engine.max_seqs=2": "engine.max_num_seqs",
    "wieghts.bucket_mb=2": "weights.bucket_mb",
    "eval.evry=2": "eval.every",
    "run.nmae=a": "run.name",
    "sead=2": "seed",
    "taks=gsm8k": "task",
    "batch_size=20": "trainer.batch_size",
    "loss.normalise=true": "loss.normalize",
    "task.max_operands=9": "task.max_operand",
    "task.long_prompt=drop": "task.long_prompts",
    "model.build.target_acuracy=0.5": "model.build.target_accuracy",
    "buffer.rule.inverse_temprature=2": "buffer.rule.inverse_temperature",
}


def explained(*overrides: str) -> str:
    """What the user reads after a command line that Hydra refuses."""
    with pytest.raises((HydraException, ValueError)) as caught:
        composed(*overrides)
    message = config.explain(caught.value, overrides)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize("typo", TYPOS)
def test_an_unknown_key_is_answered_with_the_nearest(typo):
    choices = ["buffer=softmax"] if typo.startswith("buffer.rule") else []
    key = typo.partition("=")[0]
    assert explained(*choices, typo) == f"unknown key {key}; did you mean {TYPOS[typo]}?"


def test_the_keys_of_the_chosen_files_are_known():
    message = explained("task=gsm8k", "task.answer_rule=strict", "trainer.stepz=3")
    assert message == "unknown key trainer.stepz; did you mean trainer.steps?"
    message = explained("loss=rloo", "loss.normalize=true")
    assert message.startswith("unknown key loss.normalize")


def test_nothing_near_points_to_the_list():
    assert explained("qqqqqqqq=1") == "unknown key qqqqqqqq (see `python train.py --cfg job`)"


def test_good_overrides_need_no_explanation():
    overrides = ["task=gsm8k", "trainer.steps=3", "+x=1", "~loss", "hydra.verbose=true", "--cfg"]
    assert config.explain_unknown_key(composed("task=gsm8k"), overrides) is None


@pytest.mark.parametrize(
    ("override", "fragments"),
    [
        ("trainer.steps=abc", ["trainer.steps", "'abc'", "Integer"]),
        ("trainer.steps=1.5", ["trainer.steps", "'1.5'", "Integer"]),
        ("trainer.lr.peak=high", ["trainer.lr.peak", "'high'", "Float"]),
        ("buffer.deduplicate=perhaps", ["buffer.deduplicate", "'perhaps'", "bool"]),
        ("trainer.steps=null", ["trainer.steps: can't be null"]),
        ("trainer=3", ["trainer"]),
        ("loss=trpo", ["loss/trpo", "rloo", "tb_vargrad"]),
        ("trainer.steps=[", ["'trainer.steps=['", "key=value"]),
    ],
)
def test_a_value_that_does_not_fit_is_named(override, fragments):
    message = explained(override)
    for fragment in fragments:
        assert fragment in message


COMMANDS = {
    "list": ["--cfg", "job"],
    "unknown key": ["trainer.stepz=3"],
    "wrong type": ["trainer.steps=abc"],
}


@pytest.fixture(scope="module")
def commands(tmp_path_factory) -> dict[str, tuple[int, str, str, list[str]]]:
    """Exit code, stdout, stderr and files left by `python train.py ...`, run side by side."""
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    running = {}
    for name, arguments in COMMANDS.items():
        folder = tmp_path_factory.mktemp("command")
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        running[name] = (
            folder,
            subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            ),
        )
    results = {}
    for name, (folder, process) in running.items():
        out, err = process.communicate(timeout=200)
        results[name] = process.returncode, out, err, sorted(p.name for p in folder.iterdir())
    return results


def test_the_command_lists_its_config(commands):
    code, out, err, files = commands["list"]
    assert (code, err, files) == (0, "", [])
    keys = config.flat_keys(OmegaConf.create(out))
    missing = set(config.flat_keys(OmegaConf.structured(config.Config))) - set(keys)
    assert not missing and "loss.normalize" in keys


@pytest.mark.parametrize(
    ("name", "fragments"),
    [
        ("unknown key", ["error: unknown key trainer.stepz; did you mean trainer.steps?"]),
        ("wrong type", ["error: trainer.steps: value 'abc'", "Integer"]),
    ],
)
def test_the_command_answers_a_mistake_with_one_line(commands, name, fragments):
    code, out, err, files = commands[name]
    assert (code, out, files) == (2, "", [])
    (line,) = err.splitlines()
    for fragment in fragments:
        assert fragment in line


# --------------------------------------------------------------------------- the yaml files


def yaml_file(group: str, choice: str) -> Path:
    return Path(config.conf_dir()) / group / f"{choice}.yaml"


def leaves(node: object, prefix: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(node, dict):
        for key, value in node.items():
            yield from leaves(value, f"{prefix}{key}.")
    else:
        yield prefix.rstrip("."), node


def test_there_are_choices_in_every_group():
    assert {group for group, _ in CHOICES} >= {"task", "model", "loss", "engine", "buffer"}


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_choice_composes_and_its_targets_take_its_keys(group, choice):
    cfg = chosen(f"{group}={choice}")
    world_size = 3 if cfg.mode == "sync" else 8
    config.validate(cfg, make_ranks(0, world_size, cfg.cluster.trainers))


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_no_yaml_repeats_a_default(group, choice):
    """Of the dataclasses; an experiment's, of the choices that it builds on."""
    path = yaml_file(group, choice)
    everywhere = "@package _global_" in path.read_text()
    prefix = "" if everywhere else f"{group}."
    content = OmegaConf.to_container(OmegaConf.load(path))
    assert isinstance(content, dict)
    chosen_first = [entry for entry in content.pop("defaults", []) if isinstance(entry, dict)]
    if group == "experiment":
        builds_on = [
            f"{key.split('/')[-1]}={choice}" for e in chosen_first for key, choice in e.items()
        ]
        defaults = dict(leaves(OmegaConf.to_container(chosen(*builds_on))))
    else:
        defaults = dict(leaves(OmegaConf.to_container(OmegaConf.structured(config.Config))))
    repeated = [
        f"{key}: {value}"
        for key, value in leaves(content, prefix)
        if key in defaults and defaults[key] == value
        if key not in ("engine.name", "model.name")  # the choice's own name
    ]
    assert not repeated, f"{path.name} repeats {repeated}"


@pytest.mark.parametrize(("group", "choice"), CHOICES)
def test_every_yaml_says_what_it_is_for(group, choice):
    assert "# " in yaml_file(group, choice).read_text()
