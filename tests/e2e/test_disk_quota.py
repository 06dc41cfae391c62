"""One tenant fills the disk, within its share; the others go on. Only the reserve is left: what must be written is."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.settings import ModelSettings, PluginSection
from tinsmith.store.disk_room import space_at
from tinsmith.testing.harness import RunningServer, running_server

KEYS = [{"key": f"tml-{name}", "tenant": name, "admin": name == "admin"} for name in ("hoarder", "neighbour", "admin")]
SERVER = {"api_keys": KEYS, "long_poll_s": 0.05}
PROTOBUF = {"Content-Type": "application/x-protobuf"}
LARGE = 128, 512  # sequences and tokens of each in a large request: 1 MiB
TOY = ModelSettings(name="toy", backend=PluginSection.model_validate({"plugin": "toy", "max_batch_tokens": 1 << 16}))


class Tenant:
    """A client of one session and one model, which shows every answer but a pending one."""

    def __init__(self, server: RunningServer, name: str) -> None:
        self.http = httpx.Client(base_url=f"{server.url}/api/v1/", headers={"X-API-Key": f"tml-{name}"}, timeout=300)
        self.session = ""
        self.model = ""
        self.seq_id = 0

    def start(self) -> None:
        self.session = self.ok("create_session")["session_id"]
        body = {"session_id": self.session, "model_seq_id": 0, "base_model": "toy", "lora_config": {"rank": 4}}
        created = self.ok("create_model", **body)
        self.model = created["model_id"]
        assert "error" not in self.result(created)

    def post(self, path: str, /, **body: Any) -> httpx.Response:
        return self.http.post(path, json=body)

    def ok(self, path: str, /, **body: Any) -> Any:
        answer = self.post(path, **body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def result(self, submitted: dict[str, Any]) -> Any:
        body = {"request_id": submitted["request_id"]}
        while (answer := self.post("retrieve_future", **body)).status_code == 408:
            pass
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.headers["content-type"] == "application/json" else answer.content

    def numbered(self, path: str, /, **body: Any) -> httpx.Response:
        """Send the next request of the model; a 429 leaves its number free."""
        answer = self.post(path, model_id=self.model, seq_id=self.seq_id + 1, **body)
        self.seq_id += answer.status_code == 200
        return answer

    def save(self, name: str) -> Any:
        answer = self.numbered("save_weights", path=name)
        if answer.status_code == 429:  # what is kept was read anew after the save was checked: as the SDK, send again
            answer = self.numbered("save_weights", path=name)
        return self.result(answer.json())

    def much(self, seq_id: int) -> httpx.Response:
        """Send a large pass. Its number is ahead of the model's, so it is kept and does not run."""
        message = pb.ForwardBackwardRequest(model_id=self.model, seq_id=seq_id, loss_fn="cross_entropy")
        numbers, (sequences, tokens) = np.random.default_rng(seq_id), LARGE
        for _ in range(sequences):
            datum = message.data.add()
            datum.model_input.add().encoded_text.tokens = numbers.integers(0, 32, tokens, dtype="<i4").tobytes()
            datum.loss_fn_inputs["target_tokens"].dense = numbers.integers(0, 32, tokens, dtype="<i8").tobytes()
            datum.loss_fn_inputs["target_tokens"].dtype = pb.DTYPE_INT64
            datum.loss_fn_inputs["weights"].dense = numbers.random(tokens).astype("<f4").tobytes()
            datum.loss_fn_inputs["weights"].dtype = pb.DTYPE_FLOAT32
        return self.http.post("forward_backward", content=message.SerializeToString(), headers=PROTOBUF)

    def used(self) -> dict[str, int]:
        (own,) = self.http.get("usage/disk").json()["data"]
        return dict(own)

    def train_sample_save_and_live(self) -> None:
        assert "metrics" in self.result(self.numbered("optim_step", adam_params={}).json())
        wanted = {"session_id": self.session, "sampling_session_seq_id": 0, "base_model": "toy"}
        sampler = self.ok("create_sampling_session", **wanted)
        sample = {
            "sampling_session_id": sampler["sampling_session_id"],
            "seq_id": 1,
            "num_samples": 1,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]},
            "sampling_params": {"max_tokens": 3},
        }
        assert isinstance(self.result(self.ok("asample", **sample)), bytes)
        assert "path" in self.save("own")
        self.ok("session_heartbeat", session_id=self.session)


def refused(answer: httpx.Response, setting: str) -> None:
    assert answer.status_code == 429, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    assert f"quotas.{setting}" in answer.json()["detail"]
    assert answer.json()["detail"] == answer.json()["queue_state_reason"]


def test_a_tenant_over_its_share_is_refused_until_it_deletes(tmp_path: Path) -> None:
    quotas = {"tenants": {"hoarder": {"disk_bytes": 200_000}}}
    with running_server(tmp_path, models=[TOY], server=SERVER, quotas=quotas) as server:
        hoarder, neighbour, admin = (Tenant(server, name) for name in ("hoarder", "neighbour", "admin"))
        for each in (hoarder, neighbour):
            each.start()
        saved = []
        while "error" not in (answer := hoarder.save(f"s{len(saved)}")):
            saved.append(answer["path"])
        assert len(saved) > 2
        assert answer["category"] == "user"
        assert "quotas.disk_bytes" in answer["error"]
        assert not [path for path in (tmp_path / "checkpoints").rglob("*") if f"s{len(saved)}" in path.name]
        used = hoarder.used()
        assert used["allowed_bytes"] == 200_000
        assert used["checkpoint_bytes"] + used["log_bytes"] + used["recovery_point_bytes"] == used["total_bytes"]
        refused(hoarder.much(hoarder.seq_id + 2), "disk_bytes")
        neighbour.train_sample_save_and_live()
        everybody = admin.http.get("usage/disk").json()
        assert {each["tenant"] for each in everybody["data"]} == {"hoarder", "neighbour"}
        assert 0 < everybody["reserve_bytes"] < everybody["free_bytes"]
        metrics = admin.http.get("usage/metrics").text
        assert 'tinsmith_kept_bytes{of="checkpoints",tenant="hoarder"}' in metrics
        assert "tinsmith_disk_free_bytes" in httpx.get(f"{server.url}/metrics", timeout=300).text
        for path in saved:
            model, _, name = path.removeprefix("tinker://").split("/")
            deleted = hoarder.http.delete(f"training_runs/{model}/checkpoints/weights/{name}")
            assert deleted.status_code == 200, deleted.text
        assert "path" in hoarder.save("again")


def test_only_what_must_be_written_uses_the_reserve(tmp_path: Path) -> None:
    with running_server(tmp_path, server=SERVER) as server:
        tenant = Tenant(server, "neighbour")
        tenant.start()
        assert "path" in tenant.save("first")
        waiting = tenant.numbered("optim_step", adam_params={}).json()
        tenant.result(waiting)
    with running_server(tmp_path, server=SERVER, quotas={"disk_reserve_bytes": 1 << 60}) as server:
        again = Tenant(server, "neighbour")
        again.session, again.model, again.seq_id = tenant.session, tenant.model, tenant.seq_id
        refused(again.post("create_session"), "disk_reserve_bytes")
        refused(again.numbered("optim_step", adam_params={}), "disk_reserve_bytes")
        sampler = {"session_id": again.session, "sampling_session_seq_id": 0, "base_model": "toy"}
        refused(again.post("create_sampling_session", **sampler), "disk_reserve_bytes")
        failed = again.save("second")
        assert failed["category"] == "user"
        assert "quotas.disk_reserve_bytes" in failed["error"]
        again.ok("session_heartbeat", session_id=again.session)
        ready = httpx.get(f"{server.url}/readyz", timeout=300)
        assert ready.status_code == 503
        assert "quotas.disk_reserve_bytes" in ready.json()["storage"]
        assert "metrics" in again.result(waiting)
        assert again.http.delete(f"training_runs/{again.model}/checkpoints/weights/first").status_code == 200
        again.ok(f"sessions/{again.session}/finish", reason={"type": "success"}, detail=None)


@contextmanager
def small_disk(directory: Path, size: str) -> Iterator[Path]:
    directory.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", directory], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a small file system: {mounted.stderr.strip()}")
    try:
        yield directory
    finally:
        subprocess.run(["umount", directory], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_tenant_that_fills_a_real_disk_stops_nobody(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "48m") as disk, running_server(disk, models=[TOY], server=SERVER) as server:
        hoarder, neighbour = (Tenant(server, name) for name in ("hoarder", "neighbour"))
        for each in (hoarder, neighbour):
            each.start()
        seq_id = hoarder.seq_id + 2
        while (answer := hoarder.much(seq_id)).status_code == 200:
            seq_id += 1
        refused(answer, "disk_share")
        assert seq_id > 20
        neighbour.train_sample_save_and_live()
        assert space_at(disk).free_bytes > 1 << 20


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as filler, suppress(OSError):
        while True:
            filler.write(bytes(4096))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small file system")
def test_a_server_is_not_ready_while_its_disk_is_full(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Somebody else fills it, to the last byte."""

    def readiness() -> httpx.Response:
        return httpx.get(f"{server.url}/readyz", timeout=300)

    with small_disk(tmp_path / "disk", "6m") as disk, running_server(disk, server=SERVER) as server:
        tenant = Tenant(server, "neighbour")
        tenant.start()
        assert readiness().status_code == 200
        fill(disk / "filler")
        while readiness().status_code == 200:
            pass
        told = [tenant.numbered("save_weights", path="a"), tenant.numbered("optim_step", adam_params={})]
        told += [tenant.post("create_session"), readiness()]
        assert {answer.status_code for answer in told} <= {429, 503}
        assert all("disk" in answer.text for answer in told), [answer.text for answer in told]
        for _ in range(3):
            tenant.ok("session_heartbeat", session_id=tenant.session)
        (disk / "filler").unlink()
        while readiness().status_code != 200:
            pass
        tenant.train_sample_save_and_live()
    logged = [each.getMessage() for each in caplog.records if each.name == "tinsmith.server.storage_health"]
    assert [text.partition(":")[0] for text in logged] == ["not ready", "ready again"]
