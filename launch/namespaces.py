"""Several nodes on one Linux machine: a torchrun job across network namespaces.

    python launch/namespaces.py                                      # 3 nodes, 1 rank each
    python launch/namespaces.py --nodes 1 --ranks-per-node 3         # the same job on one node
    python launch/namespaces.py --nodes 3 -- engine=hf trainer.steps=100
    python launch/namespaces.py --partition-after 60 -- cluster.timeout_s=60

Every node has an address, a hostname, a loopback device and an /etc/hosts of its own, and shares of
the cores; nothing but one bridge joins them, and none sees the machine's own network. Each runs
`launch/node.sh`, as under Slurm. Needs root (or CAP_SYS_ADMIN and CAP_NET_ADMIN), `ip` (iproute2),
`unshare` and `taskset` (util-linux). What it made is removed at the end, whatever happens; what a
killed script left behind, by the next one.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PORT = 29400  # of the rendezvous; the namespaces are empty, so it is free
_SUBNET = "10.77.0"  # seen inside of the namespaces alone
_counter = itertools.count()
# What a node's process does before its command: $1 hostname, $2 folder of files for /etc.
_ENTER = """
echo "$1" >/proc/sys/kernel/hostname
for file in hosts resolv.conf; do
  if [ -e "/etc/$file" ]; then mount --bind "$2/$file" "/etc/$file"; fi
done
shift 2
exec "$@"
"""


def refusal() -> str | None:
    """Why namespaces can't be made here; None if they can."""
    for program in ("ip", "unshare", "taskset"):
        if shutil.which(program) is None:
            return f"`{program}` is not installed (iproute2 and util-linux have them)"
    try:
        with Cluster(1) as cluster:
            cluster.start(cluster.nodes[0], ["true"]).wait(timeout=10)
    except (OSError, RuntimeError) as error:
        return f"no right to make network namespaces: {error}"
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One namespace of a cluster."""

    index: int
    name: str  # its hostname, which all nodes resolve
    address: str
    namespace: str
    cores: list[int]


class Cluster:
    """Network namespaces joined by a bridge that lies in one more; a context manager.

    Args:
        num_nodes: 1 to 100, named node0, node1, ... in this order.

    Raises:
        RuntimeError: what `ip` said, where a namespace or a device can't be made.
    """

    def __init__(self, num_nodes: int) -> None:
        remove_stale()
        prefix = f"tba-{os.getpid()}-{next(_counter)}"
        available = sorted(os.sched_getaffinity(0))
        self.nodes = [
            Node(
                index=i,
                name=f"node{i}",
                address=f"{_SUBNET}.{i + 1}",
                namespace=f"{prefix}-{i}",
                # as Ranks.cores deals them to the ranks of one node
                cores=_share(available, i, num_nodes),
            )
            for i in range(num_nodes)
        ]
        self._switch = f"{prefix}-switch"
        self._folder = tempfile.TemporaryDirectory(prefix="tba-namespaces-")
        lines = ["127.0.0.1 localhost", *(f"{n.address} {n.name}" for n in self.nodes)]
        etc = Path(self._folder.name)
        (etc / "hosts").write_text("\n".join(lines) + "\n")
        # Nobody listens there: a question that the hosts file does not answer fails at once,
        # where the machine's own name server, out of reach, would be waited for.
        (etc / "resolv.conf").write_text("nameserver 127.0.0.1\n")
        try:
            self._make()
        except BaseException:
            self.close()
            raise

    def _make(self) -> None:
        _ip("netns", "add", self._switch)
        _ip("-n", self._switch, "link", "add", "bridge0", "type", "bridge")
        _ip("-n", self._switch, "link", "set", "bridge0", "up")
        for node in self.nodes:
            inside = ("-n", node.namespace)
            _ip("netns", "add", node.namespace)
            port = f"port{node.index}"
            _ip(
                *("-n", self._switch, "link", "add", port, "type", "veth"),
                *("peer", "name", "eth0", "netns", node.namespace),
            )
            _ip("-n", self._switch, "link", "set", port, "master", "bridge0", "up")
            _ip(*inside, "link", "set", "lo", "up")  # engines talk to their workers over it
            _ip(*inside, "addr", "add", f"{node.address}/24", "dev", "eth0")
            _ip(*inside, "link", "set", "eth0", "up")
            _ip(*inside, "route", "add", "default", "dev", "eth0")  # vLLM finds its address by it

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, node: Node, command: Sequence[str], **options: Any) -> subprocess.Popen:
        """Starts a command on a node, on its cores. `options` are those of `subprocess.Popen`.

        The process's id is that of the command itself, and leads a session of its own: a terminal's
        Ctrl-C does not reach it.
        """
        enter = ["ip", "netns", "exec", node.namespace, "unshare", "--uts", "--mount"]
        enter += ["sh", "-ec", _ENTER, "sh", node.name, self._folder.name]
        enter += ["taskset", "-c", ",".join(map(str, node.cores))]
        return subprocess.Popen([*enter, *command], start_new_session=True, **options)

    def set_link(self, node: Node, *, up: bool) -> None:
        """Pulls a node's cable, or puts it back: down, packets vanish and nobody is told."""
        _ip("-n", self._switch, "link", "set", f"port{node.index}", "up" if up else "down")

    def pids(self) -> list[int]:
        """Processes in the nodes' namespaces."""
        found = []
        for node in self.nodes:
            with suppress(RuntimeError):  # it has gone already
                found += [int(pid) for pid in _ip("netns", "pids", node.namespace).split()]
        return found

    def close(self, *, grace_s: float = 20.0) -> None:
        """Ends every process of the nodes, after `grace_s` by force, and removes all devices."""
        _end_processes(self.pids, grace_s)
        for namespace in [*(node.namespace for node in self.nodes), self._switch]:
            with suppress(RuntimeError):
                _ip("netns", "del", namespace)
        self._folder.cleanup()


def _share(available: Sequence[int], index: int, count: int) -> list[int]:
    """One node's cores: disjoint while there are enough, else one in turn."""
    share = len(available) // count
    if share == 0:
        return [available[index % len(available)]]
    return list(available[index * share : (index + 1) * share])


def _end_processes(pids: Callable[[], list[int]], grace_s: float) -> None:
    """SIGTERM, then SIGKILL, until `pids()` is empty."""
    for number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 10.0)):
        for pid in pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + wait_s
        while pids() and time.monotonic() < deadline:
            time.sleep(0.1)


def remove_stale() -> None:
    """Ends and removes what scripts that were killed have left behind."""
    with suppress(RuntimeError, FileNotFoundError):
        for line in _ip("netns", "list").splitlines():
            namespace = line.split()[0]
            owner = re.fullmatch(r"tba-(\d+)-\d+-\w+", namespace)
            if owner and not Path(f"/proc/{owner[1]}").exists():
                for pid in _ip("netns", "pids", namespace).split():
                    with suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                _ip("netns", "del", namespace)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


# --------------------------------------------------------------------------- a job


def start_job(
    cluster: Cluster,
    arguments: Sequence[str],
    *,
    name: str,
    logs: Path,
    ranks_per_node: int = 1,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.Popen]:
    """Starts torchrun on every node, which meet at node 0; node i holds the i-th ranks.

    Args:
        arguments: of train.py.
        name: of the run folder.
        logs: folder for every rank's output.
        environment: variables to set for the job.

    Returns:
        One process a node; its output, and that of the node's first rank, is in its `stdout`.
    """
    processes = []
    for node in cluster.nodes:
        variables = {
            **os.environ,
            "NUM_NODES": str(len(cluster.nodes)),
            "RDZV_ENDPOINT": f"{cluster.nodes[0].name}:{PORT}",
            "RUN_NAME": name,
            "LOG_DIR": str(logs),
            "RANKS_PER_NODE": str(ranks_per_node),
            "PYTHON": sys.executable,
            "OMP_NUM_THREADS": "1",
            "SLURM_NODEID": str(node.index),
            "SLURMD_NODENAME": node.name,
            **(environment or {}),
        }
        variables.pop("DRY_RUN", None)
        process = cluster.start(
            node,
            ["bash", "launch/node.sh", *arguments],
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        processes.append(process)
    return processes


def wait_for_job(
    cluster: Cluster,
    processes: Sequence[subprocess.Popen],
    show: Callable[[str], None] = print,
    *,
    grace_s: float = 45.0,
) -> list[int]:
    """Shows every line of every node, with the node's name before it; returns the exit codes.

    Once a node has failed the others are ended after `grace_s`, as srun does it: the torchrun of a
    node that was cut off may wait for the others for minutes.
    """

    def copy(node: Node, process: subprocess.Popen) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            show(f"[{node.name}] {line.rstrip()}")

    threads = [
        threading.Thread(target=copy, args=pair, daemon=True)
        for pair in zip(cluster.nodes, processes, strict=True)
    ]
    for thread in threads:
        thread.start()
    deadline = None
    while any(process.poll() is None for process in processes):
        if deadline is None and any(process.poll() for process in processes):
            deadline = time.monotonic() + grace_s
        if deadline is not None and time.monotonic() > deadline:
            for node, process in zip(cluster.nodes, processes, strict=True):
                if process.poll() is None:
                    show(f"[{node.name}] ended: another node failed {grace_s:.0f} s ago")
            _end_processes(cluster.pids, grace_s=5.0)
        time.sleep(0.2)
    for thread in threads:
        thread.join(timeout=5)
    return [process.returncode for process in processes]


def main() -> int:
    """The script; returns its exit code: the first of a node that is not zero."""
    words = sys.argv[1:]
    split = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(
        description="A torchrun job across network namespaces.",
        usage="%(prog)s [options] [-- key=value ...]",
    )
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--name", default=datetime.now().strftime("namespaces-%Y%m%d-%H%M%S"))
    parser.add_argument("--logs", type=Path, default=Path("logs"), help="folder, with --name in it")
    parser.add_argument(
        "--partition-after",
        type=float,
        metavar="SECONDS",
        help="after the first step: cut the last node off, without a word to anybody",
    )
    options = parser.parse_args(words[:split])
    if not 1 <= options.nodes <= 100 or options.ranks_per_node < 1:
        parser.error("--nodes must be 1 to 100, --ranks-per-node at least 1")
    if reason := refusal():
        print(f"error: {reason}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))  # through the clean-up

    started = time.monotonic()
    with Cluster(options.nodes) as cluster:
        timer = threading.Timer(
            options.partition_after or 0.0, cluster.set_link, [cluster.nodes[-1]]
        )
        timer.daemon, timer.kwargs = True, {"up": False}

        def show(line: str) -> None:
            print(line, flush=True)
            if options.partition_after is not None and timer.ident is None and "step " in line:
                timer.start()

        processes = start_job(
            cluster,
            words[split + 1 :],
            name=options.name,
            logs=options.logs / options.name,
            ranks_per_node=options.ranks_per_node,
        )
        codes = wait_for_job(cluster, processes, show)
        timer.cancel()
    print(f"exit codes {codes} after {time.monotonic() - started:.0f} s")
    return next((code for code in codes if code), 0)


if __name__ == "__main__":
    sys.exit(main())
