"""vLLM's own weight transfer: all but NCCL, which memory stands for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import needs
import pytest
import torch
import torch.distributed as dist
from test_config import complaint, composed

import config
import weights_vllm
from weights_vllm import TransferEnd, VLLMPublisher


@pytest.fixture(autouse=True)
def schema(monkeypatch: pytest.MonkeyPatch) -> None:
    config.register()


def test_it_is_refused_where_it_can_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ValueError, match=r"weights.backend=vllm_nccl needs GPUs .*: set it to auto or gloo"
    ):
        weights_vllm.check_device(torch.device("cpu"))
    weights_vllm.check_device(torch.device("cuda", 1))
    message = complaint(composed("weights.backend=vllm_nccl", "engine=hf"))
    assert message == "weights.backend=vllm_nccl needs engine=vllm: set it to auto"
    monkeypatch.setattr(config, "check_engine", lambda name: None)
    alone = complaint(composed("weights.backend=vllm_nccl", "engine=vllm", "mode=sync"), 1)
    assert alone == "weights.backend=vllm_nccl needs a searcher on another GPU: set it to auto"
    several = ("weights.backend=vllm_nccl", "engine=vllm", "cluster.trainers=2")
    assert "trainer.parallel.kind=replicate" in complaint(composed(*several), 4)


@needs.VLLM
def test_what_is_said_to_vllm_is_what_it_takes() -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    info = weights_vllm.trainer_init_info("10.0.0.1", 4000, 5, 1 << 20)
    assert isinstance(info, NCCLTrainerInitInfo) and info.is_sender
    assert (info.master_address, info.master_port, info.world_size) == ("10.0.0.1", 4000, 5)
    assert (info.packed, info.packed_buffer_size_bytes) == (True, 1 << 20)
    assert weights_vllm.engine_config() == WeightTransferConfig(backend="nccl")


class FakeLLM:
    """vLLM's `LLM` with what its workers would check; tensors come through `wire`."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.weights = wire, {}
        self.inits: list[Any] = []
        self.active, self.left = False, False

    def init_weight_transfer_engine(self, request: dict) -> None:
        from vllm.distributed.weight_transfer.nccl_common import NCCLWeightTransferInitInfo

        self.inits.append(NCCLWeightTransferInitInfo(**request["init_info"]))

    def start_weight_update(self) -> None:
        assert not self.active
        self.active = True

    def update_weights(self, request: dict) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        assert self.active
        info = NCCLWeightTransferUpdateInfo(**request["update_info"])
        self.weights = self.wire.receive()
        assert [list(w.shape) for w in self.weights.values()] == info.shapes
        assert list(self.weights) == info.names
        assert [f"torch.{name}" for name in info.dtype_names] == [
            str(w.dtype) for w in self.weights.values()
        ]

    def finish_weight_update(self) -> None:
        assert self.active
        self.active = False

    def shutdown_weight_transfer_engine(self) -> None:
        self.left = True


class Wire:
    """A broadcast: it ends, on either side, when all have come."""

    def __init__(self, num_engines: int) -> None:
        self.barrier = threading.Barrier(1 + num_engines, timeout=20)
        self.tensors: dict[str, torch.Tensor] = {}

    def send(self, pairs: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.tensors = {name: tensor.clone() for name, tensor in pairs}
        self.barrier.wait()
        self.barrier.wait()

    def receive(self) -> dict[str, torch.Tensor]:
        self.barrier.wait()
        tensors = self.tensors
        self.barrier.wait()
        return tensors


@needs.VLLM
def test_versions_reach_every_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's trainer-side engine drives our client; only its NCCL calls are replaced."""
    from vllm.distributed.weight_transfer import nccl_engine

    wire = Wire(2)
    trainer = nccl_engine.NCCLTrainerWeightTransferEngine
    endpoints: list[Any] = []
    monkeypatch.setattr(
        nccl_engine, "open_trainer_endpoint", lambda info: endpoints.append(info) and None
    )
    monkeypatch.setattr(
        trainer,
        "_broadcast",
        lambda self, source, meta: wire.send(self._checked_iter(source, meta)),
    )
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    address = {"host": "127.0.0.1", "port": store.port}
    policy = torch.nn.Linear(5, 3)
    publisher = VLLMPublisher(
        policy,
        num_engines=2,
        num_workers=4,
        dtype=torch.bfloat16,
        bucket_bytes=1 << 20,
        timeout_s=20,
        meeting_timeout_s=20,
        **address,
    )
    llms = [FakeLLM(wire), FakeLLM(wire)]
    loaded: list[list[dict]] = [[], []]
    failures: list[BaseException] = []

    def run(index: int) -> None:
        try:
            end = TransferEnd(
                llms[index], rank=1 + 2 * index, tp=2, timeout_s=20.0, bucket_bytes=1, **address
            )
            update = end.take(wait_for=0, timeout_s=20)
            while update is not None and not update["final"]:
                loaded[index].append({**update, "weights": llms[index].weights})
                while not end.offered():
                    time.sleep(0.001)
                time.sleep(0.02 * index)  # one of them is late
                update = end.take()
            loaded[index].append({**update, "weights": llms[index].weights})
            assert end.take() is None and not end.offered()
            end.leave()
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(2)]
    for thread in threads:
        thread.start()
    for version in range(12):
        with torch.no_grad():
            policy.weight.fill_(float(version))
        publisher.publish(
            policy, version, evaluate=version == 4, final=version == 11, meta={"v": 1}
        )
        time.sleep(0.005)
    publisher.close()
    for thread in threads:
        thread.join(timeout=20)
    assert not failures and all(llm.left for llm in llms)
    (endpoint,) = endpoints
    assert endpoint.world_size == 5
    for llm, offset in zip(llms, (1, 3), strict=True):
        (init,) = llm.inits
        assert asdict(init) == {
            "master_address": "127.0.0.1",
            "master_port": endpoint.master_port,
            "rank_offset": offset,
            "world_size": 5,
            "nccl_unique_id_b64": None,
            "packed": True,
            "packed_buffer_size_bytes": 1 << 20,
            "packed_num_buffers": endpoint.packed_num_buffers,
        }
    versions = [[update["version"] for update in updates] for updates in loaded]
    assert versions[0] == versions[1] == sorted(set(versions[0]))
    assert {4, 11} <= set(versions[0]) and len(versions[0]) < 12, "newer ones replace others"
    for update in loaded[0] + loaded[1]:
        weight = update["weights"]["weight"]
        assert weight.dtype == torch.bfloat16 and (weight == float(update["version"])).all()
        assert update["evaluate"] == (update["version"] == 4) and update["meta"]["v"] == 1
    assert publisher.last_broadcast_s > 0
    keys = [f"{k}/{v}" for k in ("offer", "update") for v in range(12)]
    assert not any(dist.PrefixStore("weights", store).check([key]) for key in keys)


@needs.VLLM
def test_a_version_that_is_not_offered_in_time_is_an_error() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    dist.PrefixStore("weights", store).set(
        "init", '{"master_address": "h", "master_port": 1, "rank_offset": 1, "world_size": 2}'
    )
    end = TransferEnd(
        FakeLLM(Wire(1)), host="127.0.0.1", port=store.port, rank=1, tp=1, timeout_s=5.0
    )
    assert end.take() is None
    with pytest.raises(RuntimeError, match="version 3 has not come within 0 s"):
        end.take(wait_for=3, timeout_s=0.1)
