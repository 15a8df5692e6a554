"""What a run must not do: show secrets, steer a terminal, listen to strangers, run its data."""

from __future__ import annotations

import ast
import doctest
import io
import json
import logging
import os
import socket
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import psutil
import pytest
import torch.distributed as dist
from omegaconf import OmegaConf
from ranks import free_port, run_ranks

import comm
import config
import run_folder
from comm import Channel, Control, Ranks, init_world, interface_of, own_address
from config import UserError
from meeting import Meeting
from metrics import Metrics, setup_logging, write_rollouts
from rewards import LocalScorer
from tasks.task import Problem

ROOT = Path(__file__).resolve().parents[1]
ESCAPE = "\x1b]0;owned\x07\x1b[2J"  # a terminal's title, and all of its screen


# --------------------------------------------------------------------------- logs


class Steers:
    """A task whose exceptions hold what steers a terminal."""

    name = "steers"

    def score(self, problems, responses):
        raise RuntimeError(f"{ESCAPE} at {responses[0]}")


def log_of(capsys, say) -> str:
    logger = setup_logging("trainer 0")
    try:
        say(logger)
    finally:
        logger.handlers.clear()
        logger.propagate = True
    return capsys.readouterr().err


def test_nothing_that_is_logged_steers_the_terminal(capsys):
    problem = Problem(prompt_id=0, prompt=ESCAPE, answer="")

    def say(logger: logging.Logger) -> None:
        LocalScorer(Steers(), penalty=0.0).score([problem], [ESCAPE])
        logger.info("the prompt %s", problem.prompt)
        try:
            raise ValueError(ESCAPE)
        except ValueError:
            logger.exception("a traceback:\n\tits lines")

    shown = log_of(capsys, say)
    assert "\x1b" not in shown and "\x07" not in shown
    assert "RuntimeError" in shown and "the prompt \\x1b]0;owned\\x07" in shown
    assert "a traceback:\n\tits lines\nTraceback (most recent call last):\n  File" in shown


def test_nor_does_what_metrics_show_or_keep(tmp_path, capsys):
    stream = io.StringIO()
    metrics = Metrics(tmp_path, total_steps=2, stream=stream)
    metrics.note(f"held out: {ESCAPE}")
    with pytest.raises(AssertionError, match="not documented"):  # parts are names of a-z, 0-9, _
        metrics.log(1, {f"reward/{ESCAPE}": 1.0})
    metrics.log(1, {"reward/mean": 1.0})
    metrics.progress(1, {"reward/mean": 1.0, ESCAPE: 2.0})
    metrics.close()
    write_rollouts(tmp_path, 1, [{"prompt": ESCAPE, "response": ESCAPE, "reward": 1.0}])
    assert "\x1b" not in stream.getvalue() and "reward 1.000" in stream.getvalue()
    for path in (p for p in tmp_path.rglob("*") if p.is_file()):
        assert b"\x1b]0" not in path.read_bytes(), path


# --------------------------------------------------------------------------- secrets


def test_examples():
    for module in (config, comm):
        results = doctest.testmod(module)
        assert results.attempted > 0 and results.failed == 0


@pytest.mark.parametrize(
    "key",
    ["token", "hf_token", "HF_TOKEN", "api_key", "apikey", "openai_api_key", "password", "secret"]
    + ["client_secret", "credentials", "aws_secret_key", "access_key", "passphrase"],
)
def test_a_secret_is_known_by_its_key(key):
    assert config.hide_secrets({"a": [{key: "abc"}]}) == {"a": [{key: "<hidden>"}]}
    assert config.hide_in_command([f"+task.x.{key}=a b"]) == [f"+task.x.{key}=<hidden>"]
    inline = f"task.x={{n: 1, {key}: abc}}"
    assert config.hide_in_command([inline]) == [inline.replace("abc", "<hidden>")]


@pytest.mark.parametrize(
    "key",
    ["max_response_tokens", "tokens_per_micro_batch", "stop_token_id", "pad_token", "eos_token"]
    + ["tokenizer", "secretary", "key", "num_tokens", "chunk_tokens", "password_length"],
)
def test_other_keys_keep_their_values(key):
    assert config.hide_secrets({key: "abc", "a": {key: 5}}) == {key: "abc", "a": {key: 5}}
    assert config.hide_in_command([f"task.{key}=5"]) == [f"task.{key}=5"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("hf_AbCdEfGhIjKlMnOpQrStUvWxYz12345678", "<hidden>"),
        ("key sk-proj-abcdefghij1234567890 here", "key <hidden> here"),
        ("https://me:word@host.org/x?y=1", "https://<hidden>@host.org/x?y=1"),
        ("ghp_abcdefghijklmnopqrstuvwxyz0123456789", "<hidden>"),
        ("https://host.org/a@b", "https://host.org/a@b"),
        ("disk-abcdefghij-klmnopq", "disk-abcdefghij-klmnopq"),
        ("runs/hf_model", "runs/hf_model"),
        ("", ""),
    ],
)
def test_a_secret_is_known_by_its_form(text, shown):
    assert config.hide_secrets({"note": text}) == {"note": shown}
    assert config.hide_in_command([f"task.note={text}"]) == [f"task.note={shown}"]


def test_a_run_folder_shows_no_secret(tmp_path, monkeypatch):
    secret = "hf_AbCdEfGhIjKlMnOpQrStUvWxYz12345678"
    monkeypatch.setattr(
        "sys.argv", ["train.py", f"+task.hf_token={secret}", f"model.path={secret}"]
    )
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    cfg = OmegaConf.create(
        {
            "task": {"_target_": "tasks.x.X", "hf_token": "plain", "max_response_tokens": 5},
            "model": {"path": secret, "name": "m"},
            "loss": {"_target_": "losses.tb"},
            "run": {"root": str(tmp_path), "name": "run"},
            "resume": "none",
            "mode": "sync",
            "seed": 0,
        }
    )
    folder = run_folder.claim_run_dir(cfg)
    run_folder.record_start(cfg, folder, None)
    for path in folder.iterdir():
        assert secret not in path.read_text() and "plain" not in path.read_text(), path
    saved = OmegaConf.load(folder / "config.yaml")
    assert saved.task == {"_target_": "tasks.x.X", "hf_token": "<hidden>", "max_response_tokens": 5}
    assert json.loads((folder / "origin.json").read_text())["command"] == [
        *("train.py", "+task.hf_token=<hidden>", "model.path=<hidden>")
    ]


# --------------------------------------------------------------------------- what is removed


def heed(path: Path, run_dir: Path, *, started: float, restart: str = "0") -> list[str]:
    """What a job that began at `started` does about a stop file; why it stops."""
    stops: list[str] = []
    setup = SimpleNamespace(
        cfg=OmegaConf.create({"run": {"stop_file": str(path)}}), run_dir=run_dir, started=started
    )
    with mock.patch.dict(os.environ, TORCHELASTIC_RESTART_COUNT=restart):
        run_folder.heed_stop_file(setup, SimpleNamespace(stop=stops.append))
    return stops


def test_only_an_old_and_empty_stop_file_is_removed(tmp_path: Path) -> None:
    now, path = time.monotonic(), tmp_path / "stop"
    assert heed(path, tmp_path, started=now) == []  # there is none
    path.touch()
    assert heed(path, tmp_path, started=now - 60) == [] and path.exists()  # it is for this job
    assert heed(path, tmp_path, started=now + 60, restart="1") == [f"{path} is there"]
    path.touch()
    assert heed(path, tmp_path, started=now + 60) == [] and not path.exists()
    path.write_text("a file of the user's")
    with pytest.raises(UserError, match=r"run\.stop_file=.* is not an empty file"):
        heed(path, tmp_path, started=now + 60)
    path.unlink()
    path.mkdir()
    with pytest.raises(UserError, match=r"run\.stop_file=.* is not an empty file"):
        heed(path, tmp_path, started=now + 60)


# --------------------------------------------------------------------------- ports


def make_ranks(rank: int, world_size: int, local_world_size: int | None = None) -> Ranks:
    local = world_size if local_world_size is None else local_world_size
    return Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank % local,
        local_world_size=local,
        num_trainers=1,
    )


def listening(rank: int, world_size: int) -> dict:
    """A whole job's control plane, channel and weights; where this rank listens, and its key."""
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    ranks = make_ranks(rank, world_size)
    init_world(ranks, timeout_s=30)
    control = Control.start(ranks, timeout_s=60, heartbeat_timeout_s=30, period_s=0.1)
    channel = Channel(ranks, key=control.key)
    if rank == 1:
        channel.send(0, comm.Kind.REPORT, {"round": 1})
    options = {"backend": "gloo", "timeout_s": 30}
    weights_key = comm.derived_key(control.key, "weights")
    Meeting(control.host, control.port, rank, 2, key=weights_key, **options).join()
    received = channel.receive(timeout_s=20) if rank == 0 else []
    dist.barrier()
    sockets = [c.laddr.ip for c in psutil.Process().net_connections("tcp") if c.status == "LISTEN"]
    stranger = comm.join_store(control.host, control.port, timedelta(seconds=20))
    values = (
        stranger.check(["error"]),
        stranger.check(["heartbeat/0"]),
        control._store.check(["heartbeat/0"]),
    )
    dist.barrier()
    stranger.set("error", "by a stranger")  # which nobody reads
    names = stranger.list_keys()
    dist.barrier()
    result = {
        "addresses": set(sockets),
        "key": control.key,
        "received": len(received),
        "values": values,
        "names": any(control.key in name for name in names),
        "interface": os.environ["GLOO_SOCKET_IFNAME"],
    }
    channel.close()
    control.close()
    return result


def test_a_job_of_one_node_listens_on_loopback_alone_and_strangers_guess_in_vain():
    first, second = run_ranks(listening, 2, join=False)
    for result in (first, second):
        assert result["addresses"] <= {"127.0.0.1", "::1"} and result["addresses"]
        assert result["values"] == (False, False, True)
        assert interface_of("127.0.0.1") == result["interface"]
    assert first["key"] == second["key"] and len(first["key"]) == 32
    assert first["received"] == 1 and not first["names"]  # the key itself is nowhere to be read


def test_addresses_of_this_node():
    assert own_address("127.0.0.1") == "127.0.0.1" and own_address("no.such.host.invalid") is None
    assert interface_of("203.0.113.7") is None
    ours = [a.address for e in psutil.net_if_addrs().values() for a in e if a.family == 2]
    for address in ours:
        assert own_address(address) == address  # each of this node's own


def test_a_name_that_is_loopback_only_here_is_not_relied_on(monkeypatch):
    found = socket.getaddrinfo("127.0.0.1", 1, type=socket.SOCK_DGRAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert own_address("node0") is None and own_address("localhost") == "127.0.0.1"


def test_the_users_own_interface_counts(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "theirs")
    for name in ("MASTER_ADDR", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: None)
    init_world(make_ranks(0, 1), timeout_s=5)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "theirs"


def send_with_another_key(rank: int, world_size: int) -> list[str]:
    errors: list[str] = []
    channel = Channel(make_ranks(rank, world_size), key=f"0{rank}" * 16, on_error=errors.append)
    if rank == 1:
        channel.send(0, comm.Kind.REPORT, {"round": 1})
    else:
        channel._thread.join(timeout=20)
    dist.barrier()  # the sender keeps its message until then
    return errors


def test_a_message_of_another_job_ends_the_job_and_names_the_rank():
    (reason,), _ = run_ranks(send_with_another_key, 2)
    assert "rank 1 sent a message without this job's key" in reason


def meet(rank: int, world_size: int, keys: list[str], port: int) -> str:
    timeout = timedelta(seconds=30)
    server = comm.host_store("127.0.0.1", port, timeout) if rank == 0 else None
    dist.barrier()
    try:
        Meeting("127.0.0.1", port, rank, 2, backend="gloo", timeout_s=3, key=keys[rank]).join()
    except (RuntimeError, TimeoutError) as error:
        return type(error).__name__
    finally:
        dist.barrier()
        del server
    return "met"


@pytest.mark.parametrize(("keys", "met"), [(["ab", "ab"], True), (["ab", "cd"], False)])
def test_weights_of_another_job_do_not_meet(keys, met):
    results = run_ranks(meet, 2, keys, free_port())
    assert [result == "met" for result in results] == [met, met]


@pytest.mark.parametrize("port", ["", "no", "0", "65536", "-1"])
def test_a_port_that_is_none_is_named(monkeypatch, port):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(ValueError, match=f"MASTER_PORT='{port}' must be a port"):
        init_world(make_ranks(0, 2), timeout_s=5)


def test_a_port_in_use_is_named(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    for host in ("127.0.0.1", ""):
        with closing(socket.create_server((host, 0))) as taken:
            port = taken.getsockname()[1]
            monkeypatch.setenv("MASTER_PORT", str(port))
            with pytest.raises(ValueError, match=f"^MASTER_PORT={port} is in use at 127.0.0.1: "):
                init_world(make_ranks(0, 2), timeout_s=5)


# --------------------------------------------------------------------------- what is read


# Module and call -> why it may stand there.
ALLOWED: dict[tuple[str, str], str] = {}


def forbidden(call: ast.Call) -> str | None:
    """The name of a call that may run, or unpickle, what it is given."""
    name = ast.unparse(call.func)
    options = {k.arg: getattr(k.value, "value", k.value) for k in call.keywords}
    first = name.partition(".")[0]
    if name in ("eval", "exec", "compile", "__import__", "yaml.load", "os.system", "marshal.loads"):
        return name
    if first in ("pickle", "dill", "cloudpickle", "joblib", "shelve"):
        return name
    if name == "torch.load" and options.get("weights_only") is not True:
        return name
    if name == "np.load" and options.get("allow_pickle", False) is not False:
        return name
    if options.get("shell", False) is not False:
        return f"{name}(shell)"
    if name.endswith(("all_gather_object", "broadcast_object_list", "gather_object")):
        return name  # these pickle
    return None


def found_in(source: str) -> list[str]:
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [name for call in calls if (name := forbidden(call)) is not None]


@pytest.mark.parametrize(
    "bad",
    ["eval('1')", "import pickle; pickle.loads(b'')", "torch.load(f)", "yaml.load(f)", "exec(x)"]
    + ["torch.load(f, weights_only=False)", "np.load(f, allow_pickle=True)"]
    + ["subprocess.run(x, shell=True)", "dist.all_gather_object(a, b)"],
)
def test_what_runs_or_unpickles_is_found(bad):
    assert found_in(bad)


def test_nothing_that_is_read_is_run_or_unpickled():
    files = [*ROOT.glob("*.py"), *(ROOT / "tasks").glob("*.py")]
    assert len(files) > 35
    for path in files:
        source = path.read_text()
        where = str(path.relative_to(ROOT))
        found = [name for name in found_in(source) if (where, name) not in ALLOWED]
        assert not found, f"{where}: {found}"
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [getattr(node, "module", None) or "", *(alias.name for alias in node.names)]
                assert not {"pickle", "dill", "cloudpickle", "marshal"} & set(names), where
