"""`tinsmith replay` rebuilds, bit for bit, what `save_state` saved at the same point."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
from rich.console import Console

from tinsmith import operations as ops
from tinsmith.backend import ModelState
from tinsmith.checkpoints.saved import read_checkpoint
from tinsmith.commands.replay import Replay, run_replay
from tinsmith.engine.models import Models
from tinsmith.errors import ConfigError, NotFoundError, ServerError, TinsmithError, UserError
from tinsmith.plugins.loading import Plugins
from tinsmith.processes.assembly import make_store
from tinsmith.settings import ModelSettings, PluginSection, Settings
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import OperationRecord
from tinsmith.store.codec import encode_result
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import RunningServer, running_server
from tinsmith.testing.saved_files import read_saved

MODEL = "s1:train:0"
PLUGINS = Plugins.load()


def a_pass(number: int) -> ops.ForwardBackward:
    tokens = np.arange(number % 40, number % 40 + 9, dtype=np.int64)
    inputs = {"target_tokens": tokens[1:], "weights": np.ones(8, np.float32)}
    datum = ops.Datum(tokens_T=tokens[:-1].astype(np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=MODEL, data=(datum,))


def a_step() -> ops.OptimStep:
    return ops.OptimStep(model_id=MODEL, adam=ops.AdamParams(learning_rate=0.01, grad_clip_norm=0.5))


async def train(client: EngineDriver, steps: int) -> list[int]:
    """Train, with a save after each step and one load. Return the seq_ids of the saves."""
    await client.result(await client.create_model())
    saves, seq_id = [], 0
    for number in range(steps):
        kinds: list[Any] = [a_pass(number), a_pass(number + 7), a_step(), a_pass(number)]
        if number == 2:
            kinds.append(ops.LoadState(model_id=MODEL, path=client.path(f"at-{saves[1]}"), load_optimizer=True))
        for operation in kinds:
            result = await client.run(operation)
            assert not isinstance(result, ops.Failed), result
            seq_id += 1
        seq_id += 1
        await client.run(ops.SaveState(model_id=MODEL, path=client.path(f"at-{seq_id}")))
        saves.append(seq_id)
        while number == 3 and not await past(client, saves[1]):  # recovery points are written during training
            await client.run(ops.Forward(model_id=MODEL, data=a_pass(0).data))
            seq_id += 1
    return saves


async def past(client: EngineDriver, seq_id: int) -> bool:
    """Tell whether both recovery points are newer than this."""
    points = await client.store.list_recovery_points(MODEL)
    return len(points) == 2 and points[-1].seq_id > seq_id


def bits(state: ModelState) -> dict[str, Any]:
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v, "gradients": state.gradients}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step, "lora": state.lora}


def saved(data_dir: Path, name: str) -> dict[str, Any]:
    return bits(read_saved(data_dir, f"tinker://{MODEL}/weights/{name}").state)


def replayed(settings: Settings, directory: Path, until: int) -> dict[str, Any]:
    run_replay(settings, PLUGINS, run=MODEL, until=until, to=str(directory))
    checkpoint = read_checkpoint(directory.parent, directory.name)
    assert (checkpoint.kind, checkpoint.base_model) == ("training", "toy")
    return bits(checkpoint.state)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on which every operation of five steps is within reach."""
    with running_server(tmp_path_factory.mktemp("travel") / "data", recovery={"point_every_operations": 7}) as server:
        yield server


@pytest.fixture(scope="module")
def saves(server: RunningServer) -> list[int]:
    client = EngineDriver(server.store, "toy")
    server.call(client.open_session())
    return server.call(train(client, 5))


def test_every_saved_state_is_rebuilt_while_the_server_runs(
    server: RunningServer, saves: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data_dir = server.settings.server.data_dir
    points = server.call(server.store.list_recovery_points(MODEL))
    assert [each for each in points if each.seq_id > saves[1]], "nothing would be replayed from a recovery point"
    for seq_id in saves:
        for until in (seq_id - 1, seq_id):
            assert replayed(server.settings, tmp_path / f"at-{until}", until) == saved(data_dir, f"at-{seq_id}")
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == str(tmp_path / f"at-{saves[0] - 1}")
    assert "from its creation" in err
    assert "from the recovery point of seq_id" in err
    assert "bit for bit" in err
    client = EngineDriver(server.store, "toy")
    result = server.call(client.submit(ops.Forward(model_id=MODEL, data=a_pass(1).data), seq_id=saves[-1] + 1))
    assert not isinstance(server.call(client.result(result)), ops.Failed), "the model serves on"
    assert server.call(server.store.get_run(MODEL)).state_reason is None


def test_the_sdk_loads_what_was_rebuilt(server: RunningServer, saves: list[int]) -> None:
    data_dir = server.settings.server.data_dir
    path = f"tinker://{MODEL}/weights/back"
    run_replay(server.settings, PLUGINS, run=MODEL, until=saves[0], to=path)
    record = server.call(server.store.get_checkpoint(path))
    assert (record.tenant, record.kind, record.step) == ("ann", "training", 1)
    assert record.user_metadata == {"replayed_run": MODEL, "replayed_until": str(saves[0])}
    assert saved(data_dir, "back") == saved(data_dir, f"at-{saves[0]}")
    server.call(server.store.update_checkpoint(path, lambda found: replace(found, public=True)))
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    training = service.create_training_client_from_state_with_optimizer(path).result(timeout=300)
    again = training.save_state("again").result(timeout=300).path
    loaded = bits(read_saved(data_dir, again).state)
    assert loaded == saved(data_dir, "back")
    service.close("success").result(timeout=300)


def refused(settings: Settings, expected: type[TinsmithError], **more: Any) -> str:
    arguments = {"run": MODEL, "until": 3, "to": "/nonexistent/x", **more}
    with pytest.raises(expected) as caught:
        run_replay(settings, PLUGINS, **arguments)
    return str(caught.value)


def test_what_cannot_be_done_is_refused_before_anything_is_loaded(
    server: RunningServer, saves: list[int], tmp_path: Path
) -> None:
    settings = server.settings
    last = server.call(server.store.get_run(MODEL)).applied_seq_id
    assert "no run 'nobody'" in refused(settings, NotFoundError, run="nobody")
    assert f"--until may be 0 to {last}" in refused(settings, UserError, until=9999)
    assert "out of reach" in refused(settings, UserError, until=-1)
    for to in ("tinker://other:train:0/weights/x", f"tinker://{MODEL}/sampler_weights/x"):
        assert f"tinker://{MODEL}/weights/<name>" in refused(settings, UserError, to=to)
    assert "not a checkpoint path" in refused(settings, UserError, to="tinker://x")
    (tmp_path / "taken").mkdir()
    (tmp_path / "link").symlink_to("nowhere")
    for to in (str(tmp_path / "taken"), str(tmp_path / "link"), f"tinker://{MODEL}/weights/at-{saves[0]}"):
        assert "exists already" in refused(settings, UserError, to=to)
    other = ModelSettings(name="other", backend=PluginSection(plugin="toy"))
    assert "no base model named 'toy'; available: 'other'" in refused(
        settings.model_copy(update={"models": (other,)}), ConfigError
    )
    elsewhere = settings.server.model_copy(update={"data_dir": tmp_path})
    assert "contains no tinsmith.db" in refused(settings.model_copy(update={"server": elsewhere}), ConfigError)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "taken"]


def test_ctrl_c_leaves_nothing(
    server: RunningServer, saves: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C cancels the task; here while the model is created."""
    replay = Replay(server.settings, PLUGINS, Console(stderr=True))

    async def interrupted() -> None:
        working = asyncio.create_task(
            replay.run(MODEL, saves[-1], str(tmp_path / "new" / "x"), accept_differences=False)
        )
        real = Models.create

        async def cancelling(*arguments: Any) -> Any:
            working.cancel()
            await asyncio.sleep(0)
            return await real(*arguments)

        monkeypatch.setattr(Models, "create", cancelling)
        await working

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(interrupted())
    assert replay.written is None
    assert list(tmp_path.iterdir()) == []


def on_disk(tmp_path: Path, steps: int, **recovery: Any) -> tuple[Settings, list[int]]:
    """Train on a server, stop it, and return what it leaves."""
    with running_server(tmp_path / "data", recovery={"point_every_operations": 5, **recovery}) as server:
        client = EngineDriver(server.store, "toy")
        server.call(client.open_session())
        saves = server.call(train(client, steps))
        return server.settings, saves


def prune(settings: Settings, **more: Any) -> None:
    async def run() -> None:
        store = make_store(settings, PLUGINS)
        await store.open()
        await store.prune(datetime.now(UTC) + timedelta(hours=1), **more)
        await store.close()

    asyncio.run(run())


def test_a_log_that_was_pruned_says_how_far_it_reaches(tmp_path: Path) -> None:
    settings, saves = on_disk(tmp_path, 5)
    prune(settings, idle_since=datetime.now(UTC) - timedelta(hours=1))  # as with recovery.keep_log_s
    assert replayed(settings, tmp_path / "first", saves[0]) == saved(settings.server.data_dir, f"at-{saves[0]}")
    prune(settings)
    said = refused(settings, UserError, until=saves[0])
    assert "are past their retention, and its recovery points are at seq_id" in said
    oldest = int(said.split("--until may be ")[1].split(" ")[0])
    assert saves[0] < oldest < saves[-1]
    replayed(settings, tmp_path / "oldest", oldest)
    assert replayed(settings, tmp_path / "last", saves[-1]) == saved(settings.server.data_dir, f"at-{saves[-1]}")
    for point in (settings.server.data_dir / "recovery" / "toy" / MODEL).iterdir():
        (point / "adapter_model.safetensors").write_bytes(b"damaged")
    assert "can be read" in refused(settings, ServerError, until=saves[-1], to=str(tmp_path / "x"))


def test_a_log_that_is_pruned_meanwhile_is_not_half_replayed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, _ = on_disk(tmp_path, 5)
    real: Callable[..., Any] = SqlStore.replayable
    later = datetime.now(UTC) + timedelta(hours=1)

    async def pruned_first(self: SqlStore, model_id: str, **more: Any) -> list[OperationRecord]:
        await self.prune(later)
        return await real(self, model_id, **more)

    monkeypatch.setattr(SqlStore, "replayable", pruned_first)
    assert "pruned" in refused(settings, ServerError, until=2, to=str(tmp_path / "x"))


def test_results_that_differ_are_not_hidden(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings, saves = on_disk(tmp_path, 2, point_every_operations=1000)
    _, changed = encode_result(ops.OptimStepOutput(metrics={"grad_norm": 0.25}))
    with sqlite3.connect(settings.server.data_dir / "tinsmith.db") as database:
        database.execute(
            "UPDATE results SET result = ? WHERE operation_id = (SELECT id FROM operations WHERE seq_id = 3)",
            (changed,),
        )
    database.close()
    said = refused(settings, ServerError, until=4, to=str(tmp_path / "x"))
    assert "1 of 5 operations gave results that differ" in said
    assert "optim_step with seq_id 3, by " in said
    assert "--accept-differences" in said
    assert not (tmp_path / "x").exists()
    arguments = {"run": MODEL, "until": saves[0], "to": str(tmp_path / "x")}
    run_replay(settings, PLUGINS, accept_differences=True, **arguments)
    assert "warning" in capsys.readouterr().err
    state = bits(read_checkpoint(tmp_path, "x").state)
    assert state == saved(settings.server.data_dir, f"at-{saves[0]}")
