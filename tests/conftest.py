"""What tests of every kind share: a real PostgreSQL with fresh databases, and a process that forks commands."""

import os
from collections.abc import Iterator

import pytest
from processes import Launcher, launching

from tinsmith.settings import secrets
from tinsmith.testing.postgres import Postgres, PostgresMissingError, running_postgres


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process masks every secret that it has read, and those of tests may be plain words."""
    monkeypatch.setattr(secrets, "known", {})


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
    del postgres  # skips if there is none
    with running_postgres() as server:
        yield server


@pytest.fixture(scope="session")
def launcher() -> Iterator[Launcher]:
    with launching() as launcher:
        yield launcher
