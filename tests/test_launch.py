"""The Slurm scripts: dry runs and, with stand-ins for the programs of Slurm, real ones."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from test_end_to_end import FAST, random_model  # noqa: F401  (a fixture)

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = sorted([*ROOT.glob("launch/*.sbatch"), *ROOT.glob("launch/*.sh")])
SCONTROL = """#!/usr/bin/env bash
echo "scontrol $*" >>"$CALLS"
if [ "$1 $2" = "show hostnames" ]; then tr , '\\n' <<<"$3"; fi
"""
SRUN = """#!/usr/bin/env bash
# Every node is this machine, under a loopback address of its own.
echo "srun $*" >>"$CALLS"
while [[ $1 == --* ]]; do shift; done
pids=() node=0
trap 'kill -TERM "${pids[@]}"' TERM
for host in ${SLURM_JOB_NODELIST//,/ }; do
  SLURM_NODEID=$node SLURMD_NODENAME=$host "$@" &
  pids+=($!) node=$((node + 1))
done
code=0
# a signal ends a wait, not what is waited for: once more
for pid in "${pids[@]}"; do wait "$pid" || wait "$pid" || code=$?; done
exit $code
"""
SLOW_TO_END = """#!/usr/bin/env bash
# In place of python: a torchrun that needs a moment to end its ranks.
trap 'sleep 0.3; echo ended >>"$CALLS"; exit 1' TERM
echo started >>"$CALLS"
while true; do sleep 0.05; done
"""


@pytest.fixture
def slurm(tmp_path) -> dict[str, str]:
    """Environment of a job of Slurm's, with stand-ins for its programs first in PATH."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("slow_python", SLOW_TO_END)):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM", "OMP_", "TBA_"))}
    return {
        **kept,
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "CALLS": str(tmp_path / "calls"),
        "PYTHON": sys.executable,
        "LOGS": str(tmp_path / "logs"),
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "4711",
        "SLURM_JOB_NODELIST": "a1,a2,b7",
        "SLURM_GPUS_ON_NODE": "4",
        "SLURM_CPUS_PER_TASK": "32",
        "SLURMD_NODENAME": "a1",
    }


def start(
    script: str, env: Mapping[str, str], *arguments: str, **more: str
) -> subprocess.CompletedProcess:
    """Runs a script as Slurm does, from another folder."""
    return subprocess.run(
        ["bash", str(ROOT / "launch" / script), *arguments],
        cwd="/",
        env={**env, **more},
        capture_output=True,
        text=True,
        timeout=170,
    )


def dry_run(script: str, env: Mapping[str, str], *arguments: str, **more: str) -> list[list[str]]:
    """The printed commands, as words."""
    done = start(script, env, *arguments, DRY_RUN="1", **more)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


def value(words: list[str], option: str) -> str:
    [found] = [w.partition("=")[2] for w in words if w.startswith(f"{option}=")]
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_syntax(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""


@pytest.mark.parametrize("script", [s for s in SCRIPTS if s.suffix == ".sbatch"], ids=str)
def test_headers_come_first_and_ask_for_whole_tasks(script):
    lines = script.read_text().splitlines()
    count = sum(line.startswith("#SBATCH") for line in lines)
    headers = lines[1 : 1 + count]  # sbatch reads none after the first command
    assert all(line.startswith("#SBATCH --") for line in headers)
    for option in ("ntasks-per-node=1", "gpus-per-node=", "cpus-per-task=", "time=", "requeue"):
        assert any(h.startswith(f"#SBATCH --{option}") for h in headers), option
    assert "#SBATCH --signal=B:USR1@120" in headers


def test_one_node(slurm):
    [words] = dry_run("one_node.sbatch", slurm, "task=gsm8k", "task.mixture={gcd: 2}")
    assert words[:2] == ["a1:", "OMP_NUM_THREADS=8"]  # 32 cores for 4 ranks
    assert words[2:5] == [sys.executable, "-m", "torch.distributed.run"]
    assert value(words, "--nnodes") == "1" and value(words, "--nproc-per-node") == "4"
    assert value(words, "--rdzv-endpoint") == "localhost:0"  # any free port
    assert value(words, "--log-dir") == f"{slurm['LOGS']}/slurm-4711/a1"
    program = words[words.index("train.py") :]
    assert program[:3] == ["train.py", "run.name=slurm-4711", "resume=auto"]
    assert program[3] == f"run.stop_file={slurm['LOGS']}/slurm-4711/stop"
    assert program[4:] == ["task=gsm8k", "task.mixture={gcd: 2}"]


def test_dry_runs_need_no_slurm(slurm):
    bare = {k: v for k, v in slurm.items() if not k.startswith("SLURM")}
    bare["PATH"] = os.environ["PATH"]
    for script, nodes in (("one_node.sbatch", 1), ("many_nodes.sbatch", 2)):
        done = subprocess.run(
            ["bash", f"launch/{script}"],
            cwd=ROOT,
            env={**bare, "DRY_RUN": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("torch.distributed.run") == nodes


def test_many_nodes(slurm):
    srun, *nodes = dry_run("many_nodes.sbatch", slurm, "task=math", "cluster.trainers=2")
    assert srun[0] == "srun" and "--cpus-per-task=32" in srun
    assert value(srun, "--nodes") == value(srun, "--ntasks") == "3"
    assert srun[-4:] == ["bash", "launch/node.sh", "task=math", "cluster.trainers=2"]
    assert [words[0] for words in nodes] == ["a1:", "a2:", "b7:"]
    assert [value(words, "--local-addr") for words in nodes] == ["a1", "a2", "b7"]
    hosts = [value(words, "--rdzv-conf").split(",")[0] for words in nodes]
    assert hosts == ["is_host=true", "is_host=false", "is_host=false"]
    assert {value(words, "--rdzv-endpoint").split(":")[0] for words in nodes} == {"a1"}
    assert {value(words, "--nnodes") for words in nodes} == {"3"}
    assert len({value(words, "--log-dir") for words in nodes}) == 3
    calls = Path(slurm["CALLS"]).read_text().splitlines()
    assert calls == ["scontrol show hostnames a1,a2,b7"]  # nothing was started


def test_ports_do_not_collide(slurm):
    """Neither between jobs with neighbouring ids, nor with engines, nor with outgoing ports."""
    from engine import engine_port

    ports = {}
    for job in ("4711", "4712", "4999", "5000", "7210"):
        _, first, *others = dry_run("many_nodes.sbatch", slurm, SLURM_JOB_ID=job)
        ports[job] = value(first, "--rdzv-endpoint").split(":")[1]
        assert all(value(w, "--rdzv-endpoint").endswith(f":{ports[job]}") for w in others)
    assert len(set(ports.values())) == len(ports)
    engines = [engine_port(rank, str(job)) for rank in range(8) for job in range(1000)]
    assert max(engines) + 32 <= min(map(int, ports.values()))
    assert max(map(int, ports.values())) < 32768  # Linux: ip_local_port_range


def test_a_restarted_job_goes_on_with_logs_of_its_own(slurm):
    [words] = dry_run("one_node.sbatch", slurm, SLURM_RESTART_COUNT="2")
    assert "run.name=slurm-4711" in words and "resume=auto" in words  # the run goes on
    assert value(words, "--log-dir").endswith("/slurm-4711-restart-2/a1")


def test_the_users_own_run_name_counts(slurm):
    arguments = ("--config-dir", "tests/conf", "task=digits", "run.name=mine")
    [words] = dry_run("one_node.sbatch", slurm, *arguments)
    program = words[words.index("train.py") + 1 :]
    # Hydra takes the last of two, and no option between overrides
    log = value(words, "--log-dir").rpartition("/")[0]
    mine = ["run.name=slurm-4711", "resume=auto", f"run.stop_file={log}/stop"]
    assert program == [*arguments[:2], *mine, *arguments[2:]]


def test_sweep(slurm, tmp_path):
    file = tmp_path / "lines.txt"
    file.write_text("# two runs\n\nseed=1 'task.mixture={gcd: 2}'\n  loss=rloo seed=2\n")
    array = {"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "1"}
    [words] = dry_run("sweep.sbatch", slurm, str(file), "task=gsm8k", **array)
    program = words[words.index("train.py") + 1 :]
    assert program[0] == "run.name=slurm-4700_1"
    assert program[3:] == ["task=gsm8k", "seed=1", "task.mixture={gcd: 2}"]
    array["SLURM_ARRAY_TASK_ID"] = "2"
    [words] = dry_run("sweep.sbatch", slurm, str(file), **array)
    assert words[-2:] == ["loss=rloo", "seed=2"] and "run.name=slurm-4700_2" in words
    array["SLURM_ARRAY_TASK_ID"] = "3"
    done = start("sweep.sbatch", slurm, str(file), **array)
    assert done.returncode != 0 and "no line 3" in done.stderr


def test_the_example_of_a_sweep_is_valid():
    """Every line composes; the keys exist."""
    from hydra import compose, initialize_config_dir

    import config

    config.register()
    lines = [x for x in (ROOT / "launch" / "sweep.txt").read_text().splitlines() if x[:1] != "#"]
    assert len(lines) >= 4
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        for line in lines:
            assert compose("config", overrides=line.split()).trainer.steps > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"SLURM_JOB_ID": ""}, ["sbatch", "DRY_RUN"]),
        ({"SLURM_GPUS_ON_NODE": ""}, ["RANKS_PER_NODE"]),
        ({"SLURM_SUBMIT_DIR": "/"}, ["train.py", "checkout"]),
    ],
    ids=["no-slurm", "no-gpus", "elsewhere"],
)
def test_mistakes_are_one_line(slurm, changes, words):
    if changes.get("SLURM_SUBMIT_DIR"):
        done = start("one_node.sbatch", slurm, **changes)
        assert done.returncode != 0  # bash itself: no launch/batch.sh there
        return
    done = start("one_node.sbatch", slurm, **changes)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1
    assert all(word in done.stderr for word in words)


@pytest.mark.parametrize("script", ["one_node.sbatch", "many_nodes.sbatch"])
@pytest.mark.parametrize(
    ("number", "changes", "requeued"),
    [
        (signal.SIGUSR1, {"MAX_REQUEUES": "2", "SLURM_RESTART_COUNT": "1"}, True),
        (signal.SIGUSR1, {"MAX_REQUEUES": "2", "SLURM_RESTART_COUNT": "2"}, False),
        (signal.SIGUSR1, {"MAX_REQUEUES": "0"}, False),
        (signal.SIGTERM, {"MAX_REQUEUES": "2"}, False),  # Slurm itself does
        (signal.SIGUSR1, {"MAX_REQUEUES": "2", "THEN": "TERM"}, True),  # the last warning
    ],
    ids=["time-limit", "too-often", "not-asked", "preempted", "time-is-up"],
)
def test_signals_end_torchrun_before_the_job_is_queued_anew(
    slurm, tmp_path, script, number, changes, requeued
):
    calls = Path(slurm["CALLS"])
    calls.touch()
    num_nodes = 3 if script == "many_nodes.sbatch" else 1
    job = subprocess.Popen(
        ["bash", str(ROOT / "launch" / script)],
        cwd=ROOT,
        env={
            **slurm,
            "PYTHON": str(tmp_path / "bin" / "slow_python"),
            "STOP_GRACE_S": "1",
            **changes,
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 20
        while calls.read_text().count("started") < num_nodes:
            assert time.monotonic() < deadline and job.poll() is None, calls.read_text()
            time.sleep(0.05)
        job.send_signal(number)
        if "THEN" in changes:
            time.sleep(0.3)
            job.send_signal(signal.SIGTERM)
        code = job.wait(timeout=20)
    finally:
        job.kill()
    lines = [x for x in calls.read_text().splitlines() if not x.startswith(("srun", "scontrol s"))]
    ends = ["ended"] * num_nodes + ["scontrol requeue 4711"] * requeued
    assert lines == ["started"] * num_nodes + ends
    assert code != 0
    asked = list((tmp_path / "logs").rglob("stop"))
    assert len(asked) == (number == signal.SIGUSR1)  # before it was told to end


def free_job_id() -> str:
    """A job id whose rendezvous port is free now."""
    for job in range(100, 2500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", 30240 + job)) != 0:
                return str(job)
    raise AssertionError("no free port")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "nodes", "ranks"),
    [("one_node.sbatch", ["here"], 2), ("many_nodes.sbatch", ["127.0.0.1", "127.0.0.2"], 1)],
    ids=["one", "many"],
)
def test_a_real_run(slurm, tmp_path, random_model, script, nodes, ranks):  # noqa: F811
    job = free_job_id()
    done = start(
        script,
        slurm,
        *("--config-dir", "tests/conf", *FAST, "engine=hf", "trainer.steps=4", "eval.every=0"),
        *(f"model.path={random_model}", f"run.root={tmp_path / 'runs'}"),
        SLURM_JOB_ID=job,
        SLURM_JOB_NODELIST=",".join(nodes),
        SLURMD_NODENAME=nodes[0],
        RANKS_PER_NODE=str(ranks),
        OMP_NUM_THREADS="1",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / f"slurm-{job}"
    assert json.loads((run / "summary.json").read_text())["steps"] == 4
    assert json.loads((run / "origin.json").read_text())["world_size"] == 2
    logs = tmp_path / "logs" / f"slurm-{job}"
    assert sorted(p.name for p in logs.iterdir()) == nodes
    for node in nodes:
        texts = [p.read_text() for p in sorted(logs.glob(f"{node}/*/attempt_0/*/std*.log"))]
        assert len(texts) == 2 * ranks
        assert any("trainer 0" in text for text in texts) == (node == nodes[0])
    assert re.search(r"step 4/4", done.stdout + done.stderr)  # of the first rank, here too


def test_multirun_under_torchrun_is_refused_in_one_line(tmp_path):
    """Its second run would hang."""
    done = subprocess.run(
        [sys.executable, "train.py", "--multirun", "seed=1,2", f"run.root={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, "RANK": "0", "WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 2
    assert done.stderr.count("--multirun") == 1 and len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_multirun_in_one_process(tmp_path, random_model):  # noqa: F811
    done = subprocess.run(
        [sys.executable, "train.py", "--config-dir", "tests/conf", "--multirun", *FAST]
        + ["engine=hf", "trainer.steps=2", "eval.num_problems=4", "seed=1,2"]
        + [f"model.path={random_model}", f"run.root={tmp_path}", "run.name=s${seed}"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if k != "RANK"},
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert done.returncode == 0, done.stderr
    assert all((tmp_path / name / "summary.json").is_file() for name in ("s1", "s2"))
    assert not (ROOT / "multirun.yaml").exists()
