"""A run that an earlier schema left goes on: what was waiting runs, and the SDK trains on, bit for bit."""

import importlib.util
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import tinker
from alembic import command
from sqlalchemy import JSON, Boolean, Column, MetaData, Table, create_engine, text
from tinker import types

from tinsmith import operations as ops
from tinsmith.sql_store.migrate import alembic_config
from tinsmith.store import OperationState, PendingCounts
from tinsmith.testing.engine_driver import EngineDriver
from tinsmith.testing.harness import running_server
from tinsmith.testing.saved_files import read_saved

SCHEMAS = Path(__file__).parent / "schemas"
FIXTURES = sorted(SCHEMAS.glob("*.sql"))
RUN = "s1:train:0"
MORE = 2  # steps that the SDK adds
KEYS = {"api_keys": [{"key": "tml-ann", "tenant": "ann"}]}


@pytest.fixture(scope="module")
def made() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_schema_fixture", SCHEMAS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bits(data_dir: Path, name: str) -> dict[str, Any]:
    state = read_saved(data_dir, f"tinker://{RUN}/weights/{name}").state
    parts = {"weights": state.weights, "m": state.adam_m, "v": state.adam_v}
    arrays = {f"{part} {name}": array.tobytes() for part, named in parts.items() for name, array in named.items()}
    return {**arrays, "step": state.step}


@pytest.fixture(scope="module")
def undisturbed(made: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What all the steps give, in one go."""
    data_dir = tmp_path_factory.mktemp("undisturbed")
    with running_server(data_dir) as server:
        client = EngineDriver(server.store, "toy")
        server.call(client.open_session())
        server.call(client.result(server.call(client.create_model())))
        for number in range(made.DONE + made.WAITING + MORE):
            server.call(client.submit(made.a_pass(number)))
            server.call(client.run(made.a_step()))
        server.call(client.run(ops.SaveState(model_id=RUN, path=client.path("end"))))
    return bits(data_dir, "end")


def as_the_sdk_says_it(operation: ops.ForwardBackward) -> types.Datum:
    (datum,) = operation.data
    inputs = {name: array.tolist() for name, array in datum.loss_inputs.items()}
    return types.Datum(model_input=types.ModelInput.from_ints(datum.tokens_T.tolist()), loss_fn_inputs=inputs)


def in_sqlite(fixture: Path, file: Path) -> None:
    with sqlite3.connect(file) as database:
        database.executescript(fixture.read_text())
    database.close()


def in_postgres(fixture: Path, file: Path, url: str) -> None:
    """Make that version's schema, and put the same rows into it."""
    in_sqlite(fixture, file)
    engine = create_engine(url.replace("postgresql:", "postgresql+psycopg:"))
    with sqlite3.connect(file) as rows, engine.begin() as connection:
        config = alembic_config()
        config.attributes["connection"] = connection
        command.upgrade(config, fixture.stem)
        schema = MetaData()
        schema.reflect(connection)
        rows.row_factory = sqlite3.Row
        for table in schema.sorted_tables:
            if table.name != "alembic_version" and (found := rows.execute(f"SELECT * FROM {table}").fetchall()):
                connection.execute(table.insert(), [_as_typed(table, row) for row in found])
        connection.execute(text("SELECT setval('operations_id_seq', (SELECT max(id) FROM operations))"))
    rows.close()
    engine.dispose()
    file.unlink()


def _as_typed(table: Table, row: sqlite3.Row) -> dict[str, Any]:
    """SQLite has no type for truth values, nor for JSON."""

    def typed(column: Column[Any]) -> Any:
        value = row[column.name]
        match column.type:
            case Boolean():
                return bool(value)
            case JSON() if value is not None:
                return json.loads(value)
        return value

    assert set(row.keys()) == {column.name for column in table.columns}
    return {column.name: typed(column) for column in table.columns}


@pytest.fixture
def given(request: pytest.FixtureRequest, kind: str, fixture: Path, tmp_path: Path) -> dict[str, object]:
    """Put the database that the earlier version left in place, and return the options of its store."""
    if kind == "sqlite":
        in_sqlite(fixture, tmp_path / "tinsmith.db")
        return {}
    url: str = request.getfixturevalue("postgres_url")
    in_postgres(fixture, tmp_path / "rows.db", url)
    return {"url": url}


def cases() -> Iterator[object]:
    """The oldest schema, which meets every migration, and the newest; on SQLite one between. Others are thorough."""
    ends = {FIXTURES[0], FIXTURES[-1]}
    for kind, chosen in (("sqlite", {*ends, FIXTURES[len(FIXTURES) // 2]}), ("postgresql", ends)):
        for fixture in FIXTURES:
            marks = [] if fixture in chosen else [pytest.mark.thorough]
            yield pytest.param(kind, fixture, id=f"{kind}-{fixture.stem}", marks=marks)


@pytest.mark.parametrize(("kind", "fixture"), list(cases()))
def test_a_run_of_an_earlier_schema_goes_on(
    fixture: Path, given: dict[str, object], made: ModuleType, undisturbed: dict[str, Any], tmp_path: Path
) -> None:
    logged = 1 + 2 * (made.DONE + made.WAITING)
    with running_server(tmp_path, server=KEYS, store_options=given) as server:
        waiting = server.call(server.store.list_log(RUN, from_seq_id=2 * made.DONE + 1, limit=100))
        assert len(waiting) == 2 * made.WAITING
        for each in waiting:
            record = server.call(server.store.wait_for(each.request_id, 60))
            assert record.state == OperationState.SUCCEEDED, record
        service = tinker.ServiceClient(base_url=server.url, api_key="tml-ann")
        other = service.create_lora_training_client(base_model="toy", rank=4).result(timeout=300)
        training = tinker.TrainingClient(other.holder, 0, RUN, info=other._info)
        # as a client that has sent all that is logged; the SDK adds one to its numbers
        training._request_id_counter = training._turn_counter = logged - 1
        for number in range(made.DONE + made.WAITING, made.DONE + made.WAITING + MORE):
            passed = training.forward_backward([as_the_sdk_says_it(made.a_pass(number))], "cross_entropy")
            stepped = training.optim_step(tinker.AdamParams(**_adam(made.a_step())))
            passed.result(timeout=300)
            stepped.result(timeout=300)
        training.save_state("end").result(timeout=300)
        run = server.call(server.store.get_run(RUN))
        if fixture.stem != "0001":  # whose version summed the norm of the gradient in another order
            assert run.state_reason is None
        assert server.call(server.store.pending(run.tenant)) == PendingCounts(by_kind={}, num_bytes=0)
        runs, _ = server.call(server.store.list_runs(None, limit=100, offset=0))
        logs = [server.call(server.store.list_log(each.model_id, from_seq_id=0, limit=1000)) for each in runs]
        sizes = sum(each.payload_bytes + each.result_bytes for log in logs for each in log)
        assert [each.log for each in server.call(server.store.kept_bytes(None))] == [sizes]
        service.close("success").result(timeout=300)
    assert bits(tmp_path, "end") == undisturbed


def _adam(operation: ops.OptimStep) -> dict[str, float]:
    names = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    return {name: getattr(operation.adam, name) for name in names}


def test_every_earlier_schema_is_tried() -> None:
    """`make.py` writes the newest one before a migration is added."""
    from alembic.script import ScriptDirectory

    revisions = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    head = max(revisions)
    assert revisions - {head} <= {fixture.stem for fixture in FIXTURES} <= revisions
