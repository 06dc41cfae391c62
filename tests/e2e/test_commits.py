"""How many commits an operation costs, and what is read for it, on a running server: it depends on the code alone.

A submit is durable before it is acknowledged, and a result before anybody sees it. A claim is committed before
anything runs, so that no two engines run it; losing it costs nothing, so it need not be on the disk.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinker
from sqlalchemy import Connection

from tinsmith import operations as ops
from tinsmith.sql_store.databases.database import Database
from tinsmith.sql_store.group_commit import Call, Reader, Writer
from tinsmith.sql_store.subjects import log
from tinsmith.store import OperationRecord
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import RunningServer, running_server

OF_OPERATIONS = {"submit", "claim", "complete"}
DURABILITY = {1: "relaxed", 2: "durable"}  # what SQLite calls normal and full
OF_REQUESTS = {"runs", "sessions", "sampling_sessions", "checkpoints", "claiming", "log", "requests", "transaction"}
FEWEST = [["durable submit"], ["relaxed claim"], ["durable complete"]]


@pytest.fixture(scope="module")
def toy_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on which nothing wakes the engine but the test: no gap that another test left, and no poll."""
    with running_server(tmp_path_factory.mktemp("counted"), store_options={"safety_poll_s": 3600.0}) as server:
        yield server


@pytest.fixture
def commits(toy_server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Of each commit, what it did for operations, in order; not those for leases, reports and heartbeats."""
    seen: list[list[str]] = []
    run_group = Writer._run_group
    data_dir = str(toy_server.settings.server.data_dir)

    def noting(writer: Writer[Any], calls: list[Call], topics: list[str], connection: Connection) -> Any:
        if data_dir not in str(connection.engine.url):  # of another server in this process
            return run_group(writer, calls, topics, connection)
        level = DURABILITY[connection.exec_driver_sql("PRAGMA synchronous").scalar_one()]
        if names := [call.function.__name__ for call in calls if call.function.__name__ in OF_OPERATIONS]:
            seen.append([f"{level} {name}" for name in names])
        return run_group(writer, calls, topics, connection)

    monkeypatch.setattr(Writer, "_run_group", noting)
    return seen


@pytest.fixture
def driver(toy_server: RunningServer, request: pytest.FixtureRequest) -> EngineDriver:
    made = EngineDriver(toy_server.store, "toy", session_id=request.node.name)
    toy_server.call(made.open_session())
    toy_server.call(made.result(toy_server.call(made.create_model())))
    return made


def optim_step(model_id: str) -> ops.Operation:
    return ops.OptimStep(model_id=model_id, adam=ops.AdamParams())


def pass_with_gradients(model_id: str) -> ops.Operation:
    inputs = {"target_tokens": np.arange(4, 12), "weights": np.ones(8, np.float32)}
    datum = ops.Datum(tokens_T=np.arange(3, 11, dtype=np.int32), loss_inputs=inputs)
    return ops.ForwardBackward(model_id=model_id, data=(datum,))


def sample(model_id: str) -> ops.Operation:
    prompt_P = np.arange(3, 11, dtype=np.int32)
    params = ops.SamplingParams(max_tokens=2, seed=1)
    return ops.Sample(sampling_session_id=model_id, snapshot_id=None, prompt_P=prompt_P, params=params)


@pytest.mark.parametrize("make", [optim_step, pass_with_gradients, sample])
def test_an_operation_costs_three_commits(
    toy_server: RunningServer,
    driver: EngineDriver,
    commits: list[list[str]],
    make: Callable[[str], ops.Operation],
) -> None:
    for _ in range(3):
        result = toy_server.call(driver.run(make(driver.model_id())))
        assert not isinstance(result, ops.Failed)
    assert commits == FEWEST * 3


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each read for a request, its module and function; not those that are done now and then, for all requests."""
    seen: list[str] = []
    run = Reader._run

    async def noting(reader: Reader, database: Database, calls: list[Call]) -> Any:
        functions = [getattr(call.function, "func", call.function) for call in calls]  # of a partial
        names = [(each.__module__.rpartition(".")[2], each.__name__) for each in functions]
        seen.extend(f"{module}.{name}" for module, name in names if module in OF_REQUESTS)
        return await run(reader, database, calls)

    monkeypatch.setattr(Reader, "_run", noting)
    return seen


@pytest.fixture
def glances(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each operation that was looked up without a reader, its name."""
    seen: list[str] = []
    glance = log.glance

    def noting(connection: Connection, request_id: str) -> OperationRecord | None:
        seen.append(request_id)
        return glance(connection, request_id)

    monkeypatch.setattr(log, "glance", noting)
    return seen


def test_for_an_operation_only_its_result_is_looked_up(
    client: tinker.ServiceClient, reads: list[str], glances: list[str]
) -> None:
    """Neither whose model it is, which never changes, nor for whom there is work, which the claim finds by itself."""
    training = client.create_lora_training_client("toy", rank=8).result()
    training.optim_step(tinker.AdamParams()).result()
    reads.clear()
    glances.clear()
    for _ in range(3):
        training.optim_step(tinker.AdamParams()).result()
    assert reads == []
    assert len(set(glances)) == 3
    assert len(glances) <= 2 * 3  # when its client begins to wait, and when it is done


def test_for_a_sample_its_session_and_its_result_are_read(client: tinker.ServiceClient, reads: list[str]) -> None:
    """The session may have ended since the last one."""
    sampler = client.create_sampling_client(base_model="toy").result()
    prompt, params = tinker.ModelInput.from_ints([3, 4, 5]), tinker.SamplingParams(max_tokens=2, seed=1)
    sampler.sample(prompt, 1, params).result()
    reads.clear()
    for _ in range(3):
        sampler.sample(prompt, 1, params).result()
    assert set(reads) - {"transaction.finished_samples"} == {"sessions.get"}
    assert Counter(reads)["sessions.get"] == 3


def test_a_save_for_sampling_needs_no_reader(client: tinker.ServiceClient, reads: list[str]) -> None:
    """But for the tenant's tallies, which are read once a second."""
    training = client.create_lora_training_client("toy", rank=4).result()
    training.save_weights_and_get_sampling_client().result()
    reads.clear()
    for _ in range(3):
        training.save_weights_and_get_sampling_client().result()
    assert reads == []
