"""The user's own command, torchrun and all: runs that learn, and runs that must end."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
FAST = [
    "task=digits",
    "model=custom",
    "trainer.batch_size=64",
    "trainer.responses_per_prompt=8",
    "searcher.responses_per_prompt=8",
    "searcher.prompts_in_flight=16",
    "buffer.initial_trajectories=64",
    "trainer.lr.peak=2e-3",
    "trainer.lr.warmup_steps=5",
    "trainer.beta.initial=0.05",
    "cluster.timeout_s=90",
    "eval.every=20",
    "run.log_every_s=2",
]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory) -> str:
    from sft import tiny_model, tiny_tokenizer

    folder = tmp_path_factory.mktemp("models") / "random"
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed=0).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def command(num_ranks: int, *overrides: str) -> list[str]:
    """torchrun train.py on `num_ranks` ranks; plain python for 0."""
    if num_ranks:
        launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={num_ranks}"]
        # a rendezvous of its own on a free port, so that runs side by side can't meet
        launcher += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    else:
        launcher = []
    return [sys.executable, *launcher, "train.py", "--config-dir", "tests/conf", *overrides]


def environment() -> dict[str, str]:
    return {
        **{k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")},
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }


def run(num_ranks: int, *overrides: str, timeout_s: float = 240) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(num_ranks, *overrides),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def learns(tmp_path: Path, model: str, num_ranks: int, *overrides: str) -> dict:
    """Runs the digits task and checks what every whole run must show; returns its summary."""
    steps = [] if any(o.startswith("trainer.steps=") for o in overrides) else ["trainer.steps=60"]
    done = run(
        num_ranks,
        *FAST,
        *steps,
        f"model.path={model}",
        f"run.root={tmp_path}",
        "run.name=run",
        *overrides,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "run"
    summary = summary_of(folder)
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert summary["engine_logprob_gap"] < 1e-3
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert max(r["step"] for r in records) == summary["steps"]
    assert (folder / "training.png").stat().st_size > 10_000
    assert "prompt" in (folder / "rollouts" / "rollouts.jsonl").read_text()
    assert (folder / "config.yaml").is_file() and list((folder / "tensorboard").iterdir())
    assert "step 60/60" in done.stderr or "step 60/60" in done.stdout
    return summary


@pytest.mark.parametrize(
    ("num_ranks", "trainers"),
    [
        pytest.param(2, 1, id="1+1", marks=pytest.mark.slow),  # as the run with vLLM below
        pytest.param(3, 1, id="1+2", marks=pytest.mark.slow),
        pytest.param(4, 2, id="2+2", marks=pytest.mark.slow),
    ],
)
def test_asynchronous_runs_learn(tmp_path, random_model, num_ranks, trainers):
    summary = learns(tmp_path, random_model, num_ranks, "engine=hf", f"cluster.trainers={trainers}")
    assert summary["staleness_max"] >= 1  # nothing waited for the trainer


def test_one_process_learns_in_lockstep(tmp_path, random_model):
    summary = learns(tmp_path, random_model, 0, "engine=hf", "loss=rloo")
    assert summary["staleness_max"] == 0  # on-policy, every response of it


def test_packed_rows_change_no_loss(tmp_path, random_model):
    """The fixed-seed losses of lock-step training, step by step, are those of padded batches."""
    losses = {}
    for attention in ("off", "auto"):
        done = run(
            0,
            *FAST,
            "engine=hf",
            "mode=sync",
            "trainer.steps=6",
            "trainer.tokens_per_micro_batch=100",  # several micro-batches
            "eval.num_problems=4",
            f"trainer.packing.attention={attention}",
            f"trainer.profile={attention == 'auto'}",
            f"model.path={random_model}",
            f"run.root={tmp_path}",
            f"run.name={attention}",
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = (tmp_path / attention / "metrics.jsonl").read_text().splitlines()
        records = [json.loads(line) for line in lines]
        losses[attention] = [r["loss/total"] for r in records if "loss/total" in r]
    assert len(set(losses["off"])) == 6
    assert losses["auto"] == pytest.approx(losses["off"], rel=0, abs=1e-5)
    costs_are_accounted_for(tmp_path / "auto", records)
    assert not (tmp_path / "off" / "profile").exists()


def costs_are_accounted_for(folder: Path, records: list[dict]) -> None:
    """Time by phase, utilisation and a trace, of a run with `trainer.profile=true`."""
    last = [r for r in records if "time/mfu" in r][-1]
    parts = [last[f"time/{name}_s"] for name in ("forward", "logprobs", "backward")]
    assert 0.5 * last["time/gradient_s"] < sum(parts) < last["time/gradient_s"]
    assert min(parts) > 0 and last["time/optimizer_s"] > 0 and last["memory/peak_gb"] > 0.1
    summary = summary_of(folder)
    assert 0 < summary["mfu"] < 1
    rate = summary["model_tflop_per_s"]
    assert rate == pytest.approx(summary["mfu"] * summary["product_tflop_per_s"])
    with gzip.open(folder / "profile" / "trainer-0.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    named = Counter(e["name"] for e in events if e.get("cat") == "user_annotation")
    assert named["gradient"] == named["optimizer"] == named["publish"] == 3  # steps
    assert named["forward"] == named["logprobs"] >= 6  # micro-batches
    assert {"draw", "backward", "round"} <= named.keys()


@pytest.mark.slow
def test_lockstep_over_ranks_is_on_policy(tmp_path, random_model):
    summary = learns(tmp_path, random_model, 3, "engine=hf", "mode=sync", "loss=rloo")
    assert summary["staleness_max"] == 0
    assert summary["trajectories"] == summary["trained_trajectories"] == 60 * 64


@pytest.mark.vllm
def test_vllm_run_learns_and_its_checkpoint_opens(tmp_path, random_model):
    pytest.importorskip("vllm")
    learns(tmp_path, random_model, 2, "engine=vllm")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run" / "checkpoints" / "step-60"
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer("500:", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        answer = model.generate(tokens, max_new_tokens=3, do_sample=False)[0, tokens.shape[1] :]
    assert tokenizer.decode(answer).isdigit()  # the policy that was trained, not the one before


@pytest.mark.vllm
@pytest.mark.slow
def test_a_searcher_of_two_devices_learns(tmp_path, random_model):
    summary = learns(
        tmp_path,
        random_model,
        3,
        "searcher.tp=2",
        "engine.kv_cache_gb=0.1",
        "cluster.timeout_s=200",
    )
    assert summary["staleness_max"] >= 1


@pytest.mark.slow
def test_saved_trajectories_are_learned_from_without_a_searcher(tmp_path, random_model):
    """A run that explores, with a reference that moves, keeps its trajectories for others."""
    recorded = learns(
        tmp_path,
        random_model,
        2,
        "engine=hf",
        "run.save_trajectories=true",
        "trainer.reference_reset_every=40",
        "searcher.explore.temperature_prob=0.5",
        "searcher.explore.top_p_prob=0.5",
        "buffer.recency_prob_final=0.9",
        "buffer.max_staleness=50",
    )
    done = run(
        2,
        *FAST,
        f"model.path={random_model}",
        f"run.root={tmp_path}",
        "run.name=offline",
        "mode=offline",
        f"data={tmp_path / 'run'}",
        "loss=tb_learned_z",
        "trainer.steps=60",
        "buffer.capacity_per_prompt=10000",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path / "offline")
    # both trainers together read what the run's trainer received, a little of which was too late
    assert summary["trajectories"] > 0.9 * recorded["trajectories"] / 2
    assert summary["accuracy_before"] == pytest.approx(recorded["accuracy_before"])
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert summary["staleness_mean"] is None
    assert sorted(summary["accuracy_by_step"], key=int) == ["0", "20", "40", "60"]

    from checkpoint import load_log_z_head

    head = load_log_z_head(tmp_path / "offline" / "checkpoints" / "step-60")
    assert float(head.linear.bias.detach()) != 0.0


def test_one_of_two_trainers_lacks_reference_log_probs(tmp_path, random_model):
    """Both then hold their part of a sharded reference, and take equally many passes of it."""
    lines = [
        {"prompt": f"{100 + i}:", "response": text, "reward": reward}
        | ({"reference_logprobs": [-3.0, -3.0, -3.0]} if i % 2 else {})
        for i in range(16)
        for text, reward in (("12", 1.0), ("ab", 0.0))
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = run(
        2,
        *FAST,
        f"model.path={random_model}",
        f"run.root={tmp_path}",
        "run.name=run",
        "mode=offline",
        f"data={data}",
        "trainer.responses_per_prompt=2",
        "trainer.batch_size=16",
        "trainer.steps=3",
        "eval.num_problems=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = [json.loads(x) for x in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any("time/reference_s" in record for record in metrics)


@pytest.mark.slow
def test_offline_data_that_an_objective_cannot_use_is_refused(tmp_path, random_model):
    """JSONL from anywhere has no behavior log-probs, which a ratio needs."""
    lines = [
        {"prompt": f"{100 + i}:", "response": text, "reward": reward}
        for i in range(16)
        for text, reward in (("12", 1.0), ("ab", 0.0))
    ]
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (
        *FAST,
        f"model.path={random_model}",
        f"run.root={tmp_path}",
        "mode=offline",
        f"data={data}",
        "trainer.responses_per_prompt=2",
        "trainer.batch_size=16",
        "trainer.steps=10",
    )
    refused = run(0, *options, "loss=ppo", "run.name=ppo")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "behavior log-probs" in refused.stderr and "Traceback" not in refused.stderr
    done = run(0, *options, "run.name=tb")
    assert done.returncode == 0, done.stdout + done.stderr
    held_out = summary_of(tmp_path / "tb")["held_out_by_step"]  # "12" is two digits of three
    assert held_out["10"]["reward"] > max(0.5, held_out["0"]["reward"])


# --------------------------------------------------------------------------- ending


class Job:
    """A run in the background, its output in a file."""

    def __init__(self, tmp_path: Path, num_ranks: int, *overrides: str) -> None:
        self.log = tmp_path / "output.txt"
        with self.log.open("w") as file:
            self.process = subprocess.Popen(
                command(num_ranks, *FAST, *overrides),
                cwd=ROOT,
                env=environment(),
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, pattern: str, timeout_s: float = 120) -> None:
        deadline = time.monotonic() + timeout_s
        while not re.search(pattern, self.log.read_text()):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < deadline, f"no {pattern!r} in\n{self.log.read_text()}"
            time.sleep(0.1)

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def rank(self, rank: int) -> psutil.Process:
        for process in self.processes():
            if process.environ().get("RANK") == str(rank) and "train.py" in process.cmdline():
                return process
        raise AssertionError(f"no rank {rank}")

    def end(self, timeout_s: float) -> int:
        """Waits for the job and all its processes; kills and fails if they stay."""
        everyone = [psutil.Process(self.process.pid), *self.processes()]
        return self.all_gone(everyone, timeout_s)

    def all_gone(self, everyone: list[psutil.Process], timeout_s: float) -> int:
        try:
            code = self.process.wait(timeout=timeout_s)
            _, alive = psutil.wait_procs(everyone, timeout=20)
            assert not alive, f"still there: {[p.cmdline() for p in alive]}"
            return code
        finally:
            for process in everyone:
                if process.is_running():
                    process.kill()


def endless(tmp_path: Path, model: str, engine: str) -> list[str]:
    return [
        "trainer.steps=100000",
        f"model.path={model}",
        f"engine={engine}",
        f"run.root={tmp_path}",
        "run.name=run",
        "eval.every=0",
    ]


@pytest.mark.parametrize(
    "victim",
    [
        pytest.param(0, id="trainer", marks=pytest.mark.slow),
        pytest.param(2, id="searcher", marks=pytest.mark.slow),  # as in test_comm.py
    ],
)
def test_a_killed_rank_ends_the_job(tmp_path, random_model, victim):
    job = Job(tmp_path, 3, *endless(tmp_path, random_model, "hf"))
    job.wait_for(r"step \d+/100000")
    everyone = [psutil.Process(job.process.pid), *job.processes()]
    job.rank(victim).kill()
    assert job.all_gone(everyone, timeout_s=60) != 0


@pytest.mark.vllm
@pytest.mark.slow
def test_a_killed_searcher_takes_its_engine_along(tmp_path, random_model):
    pytest.importorskip("vllm")
    job = Job(tmp_path, 2, *endless(tmp_path, random_model, "vllm"))
    job.wait_for(r"step \d+/100000", timeout_s=180)
    everyone = [psutil.Process(job.process.pid), *job.processes()]
    assert any("EngineCore" in " ".join(p.cmdline()) for p in everyone)
    job.rank(1).kill()
    assert job.all_gone(everyone, timeout_s=60) != 0


def test_interrupt_ends_all_ranks_with_the_reason_once(tmp_path, random_model):
    job = Job(tmp_path, 3, *endless(tmp_path, random_model, "hf"))
    job.wait_for(r"step \d+/100000")
    everyone = [psutil.Process(job.process.pid), *job.processes()]
    for process in everyone:  # as a terminal does: to every process of the foreground
        process.send_signal(signal.SIGINT)
    assert job.all_gone(everyone, timeout_s=60) != 0
    assert job.log.read_text().count("interrupted (Ctrl-C)") == 1


@pytest.mark.slow
def test_a_reward_model_that_never_works_is_named_once_and_ends_all_ranks(tmp_path, random_model):
    job = Job(
        tmp_path,
        3,
        *endless(tmp_path, random_model, "hf"),
        "task._target_=tests.test_end_to_end.Failing",
    )
    assert job.end(timeout_s=120) != 0
    text = job.log.read_text()
    assert text.count("the job ends:") == 1
    assert "RuntimeError: this reward always fails" in text


# --------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["task=gsm8k", "task.data_dir=/nowhere"], ["task.data_dir", "/nowhere"]),
        pytest.param(
            ["model=custom", "model.path=/nowhere"],
            ["model.path", "/nowhere"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["task=digits", "task.max_response_tokens=600"],
            ["task.max_response_tokens", "512"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["task=digits", "task.max_prompt_tokens=2"],
            ["task.max_prompt_tokens", "4"],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["data", "model", "context", "prompt"],
)
def test_a_mistake_in_data_or_model_is_one_line(tmp_path, random_model, overrides, words):
    if "model=custom" not in overrides:
        overrides = ["model=custom", f"model.path={random_model}", *overrides]
    done = run(2, "engine=hf", f"run.root={tmp_path}", *overrides)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "the job ends" in line]
    assert len(lines) == 1, done.stderr
    assert all(word in lines[0] for word in words), lines[0]
    assert "Traceback" not in done.stderr.split("the job ends")[0]  # torchrun's own comes later
    assert not list(tmp_path.iterdir())  # nothing was started


@pytest.mark.slow
def test_an_existing_run_folder_is_refused(tmp_path, random_model):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "summary.json").write_text("{}")
    done = run(
        2,
        *FAST,
        "engine=hf",
        f"model.path={random_model}",
        f"run.root={tmp_path}",
        "run.name=taken",
    )
    assert done.returncode != 0
    assert "run.name='taken'" in done.stderr
    assert (tmp_path / "taken" / "summary.json").read_text() == "{}"


class Failing:
    """Digits whose reward, a model on the searcher's device, always fails."""

    def __new__(cls, **options):
        from tests.digits import Digits

        task = Digits(**options)

        def fail(problems, responses):
            raise RuntimeError("this reward always fails")

        task.score, task.in_workers = fail, False
        return task
