"""Network namespaces as nodes, and a job across three of them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from test_end_to_end import FAST, ROOT, environment, random_model  # noqa: F401  (a fixture)

from launch.namespaces import Cluster, _share, refusal, wait_for_job

LAUNCHER = [sys.executable, "launch/namespaces.py"]


@pytest.fixture
def may_make_namespaces() -> None:
    if reason := refusal():
        pytest.skip(reason)


def namespaces() -> set[str]:
    done = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True)
    return {line.split()[0] for line in done.stdout.splitlines()}


def says(cluster: Cluster, index: int, *command: str) -> str:
    process = cluster.start(
        cluster.nodes[index], command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return process.communicate(timeout=60)[0].strip()


def test_cores_are_shared_as_among_the_ranks_of_one_node():
    assert [_share([4, 5], i, 3) for i in range(3)] == [[4], [5], [4]]
    assert [_share([0, 1, 2, 3, 4], i, 2) for i in range(2)] == [[0, 1], [2, 3]]


def test_nodes_reach_each_other_by_name_until_a_cable_is_pulled(may_make_namespaces):
    ask = "import socket; socket.create_connection(('node1', 4000), 2).recv(9)"
    serve = (
        "import socket; s = socket.create_server(('', 4000)); print(1, flush=True)\n"
        "while True: s.accept()[0].close()"
    )
    with Cluster(2) as cluster:
        assert [says(cluster, i, "cat", "/proc/sys/kernel/hostname") for i in (0, 1)] == [
            *("node0", "node1")
        ]
        server = cluster.start(
            cluster.nodes[1], [sys.executable, "-c", serve], stdout=subprocess.PIPE
        )
        assert server.stdout is not None and server.stdout.readline() == b"1\n"
        assert cluster.pids() == [server.pid]
        assert says(cluster, 0, sys.executable, "-c", ask) == ""
        cluster.set_link(cluster.nodes[1], up=False)
        assert "Error" in says(cluster, 0, sys.executable, "-c", ask)
        cluster.set_link(cluster.nodes[1], up=True)
        assert says(cluster, 0, sys.executable, "-c", ask) == ""
        names = {node.namespace for node in cluster.nodes}
        assert names <= namespaces()
    assert server.poll() == -signal.SIGTERM
    server.stdout.close()
    assert not names & namespaces()


def test_what_a_killed_script_left_is_removed_by_the_next(may_make_namespaces):
    code = (
        "import time; from launch.namespaces import Cluster; c = Cluster(1)\n"
        "p = c.start(c.nodes[0], ['sleep', '1000']); print(p.pid, flush=True); time.sleep(99)"
    )
    script = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert script.stdout is not None
    left = psutil.Process(int(script.stdout.readline()))
    script.kill()
    script.wait()
    script.stdout.close()
    mine = {name for name in namespaces() if name.startswith(f"tba-{script.pid}-")}
    assert len(mine) == 2
    with Cluster(1):
        assert not mine & namespaces()
        deadline = time.monotonic() + 10
        while left.is_running() and left.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.05)


@pytest.mark.parametrize(
    ("last", "codes"), [("echo b", [0, 0]), ("exit 3", [0, 3]), ("exit 4", [-15, 4])]
)
def test_a_node_that_fails_takes_the_others_along(may_make_namespaces, last, codes):
    lines: list[str] = []
    first = "echo a; exec sleep 1000" if codes[0] else "echo a"
    with Cluster(2) as cluster:
        processes = [
            cluster.start(node, ["sh", "-c", command], stdout=subprocess.PIPE, text=True)
            for node, command in zip(cluster.nodes, (first, last), strict=True)
        ]
        assert wait_for_job(cluster, processes, lines.append, grace_s=0.5) == codes
        for process in processes:
            process.stdout.close()
    assert "[node0] a" in lines
    assert ("[node1] b" in lines) == (codes == [0, 0])
    assert any("another node failed" in line for line in lines) == (codes[0] != 0)


def run(tmp_path: Path, model: str, options: list[str], *overrides: str, timeout_s: float):
    before = namespaces()
    done = subprocess.run(
        [*LAUNCHER, "--name", "run", "--logs", str(tmp_path / "logs"), *options, "--"]
        + ["--config-dir", "tests/conf", *FAST, f"model.path={model}", f"run.root={tmp_path}"]
        + list(overrides),
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert namespaces() <= before
    return done


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("engine", ["hf", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_three_nodes_learn(may_make_namespaces, tmp_path, random_model, engine):  # noqa: F811
    if engine == "vllm":
        pytest.importorskip("vllm")
    done = run(tmp_path, random_model, [], f"engine={engine}", "trainer.steps=60", timeout_s=580)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.4
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3
    assert summary["engine_logprob_gap"] < 1e-3
    assert json.loads((tmp_path / "run" / "origin.json").read_text())["world_size"] == 3
    assert {p.name for p in (tmp_path / "logs" / "run").iterdir()} == {"node0", "node1", "node2"}
    [trainer] = (tmp_path / "logs" / "run" / "node0").glob("*/attempt_0/0/stderr.log")
    assert "[trainer 0]" in trainer.read_text()  # node 0 holds rank 0
    assert "exit codes [0, 0, 0]" in done.stdout


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_node_that_is_cut_off_ends_the_job(may_make_namespaces, tmp_path, random_model):  # noqa: F811
    done = run(
        tmp_path,
        random_model,
        ["--partition-after", "1"],
        *("engine=hf", "trainer.steps=100000", "eval.every=0"),
        timeout_s=580,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    [line] = [x for x in done.stdout.splitlines() if "the job ends" in x and "[node0]" in x]
    assert "searcher 1 (rank 2) has been silent" in line
    codes = json.loads(done.stdout.rpartition("exit codes ")[2].split(" after")[0])
    assert len(codes) == 3 and 0 not in codes


@pytest.mark.slow
def test_a_terminated_script_removes_everything(may_make_namespaces, tmp_path, random_model):  # noqa: F811
    before = namespaces()
    script = subprocess.Popen(
        [*LAUNCHER, "--logs", str(tmp_path / "logs"), "--", "--config-dir", "tests/conf", *FAST]
        + ["engine=hf", "trainer.steps=100000", f"model.path={random_model}"]
        + [f"run.root={tmp_path}"],
        cwd=ROOT,
        env={**os.environ, **environment()},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    while len(namespaces() - before) < 4 or not psutil.Process(script.pid).children(recursive=True):
        assert time.monotonic() < deadline and script.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    everyone = psutil.Process(script.pid).children(recursive=True)
    script.terminate()
    assert script.wait(timeout=90) == 1
    assert namespaces() <= before
    assert not psutil.wait_procs(everyone, timeout=5)[1]
