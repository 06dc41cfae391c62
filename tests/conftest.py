"""What tests of every kind share: a real PostgreSQL, started once, with a fresh database for each test."""

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinsmith.testing.postgres import Postgres, PostgresMissingError, running_postgres

_WITH_THE_SDK = [Path(__file__).parent / name for name in ("crash", "e2e")]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Collect what the SDK left where its warning is expected, and not in the next file's tests.

    After the fixtures have been torn down, the clients of a whole file among them.
    """
    try:
        yield
    finally:
        if any(item.path.is_relative_to(directory) for directory in _WITH_THE_SDK):
            gc.collect()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    try:
        with running_postgres() as server:
            yield server
    except PostgresMissingError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(str(error))


@pytest.fixture
def postgres_url(postgres: Postgres) -> str:
    return postgres.new_database()


@pytest.fixture
def own_postgres(postgres: Postgres) -> Iterator[Postgres]:
    """One that a test may stop and kill."""
    del postgres  # skips where there is none
    with running_postgres() as server:
        yield server
