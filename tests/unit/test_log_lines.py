"""Lines of the log: with dates where nobody watches, as JSON, bounded, and of other libraries only what is grave."""

import json
import logging
import re
import subprocess
import sys
from contextvars import copy_context

import pytest
from pydantic import SecretStr

from tinsmith.log_fields import about, begin_request, note
from tinsmith.processes.logs import JsonFormatter, LogLines, console
from tinsmith.server.refusal_log import RefusalLog
from tinsmith.settings.secrets import remember

_PROGRAM = """
import logging
from tinsmith.processes.logs import log_to_stderr

log_to_stderr("debug")
for name in ("tinsmith.engine", "tinsmith_jax.rounds", "alembic.runtime", "jax"):
    logging.getLogger(name).info("all is well")
    logging.getLogger(name).warning("look here")
"""


def test_lines_have_dates_and_other_libraries_only_warn() -> None:
    said = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True).stderr
    lines = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d{4} (.*)", each) for each in said.splitlines()]
    assert [each and each[1] for each in lines] == [
        "INFO tinsmith.engine: all is well",
        "WARNING tinsmith.engine: look here",
        "INFO tinsmith_jax.rounds: all is well",
        "WARNING tinsmith_jax.rounds: look here",
        "WARNING alembic.runtime: look here",
        "WARNING jax: look here",
    ]


def test_a_line_of_json_has_its_fields_and_no_secret() -> None:
    remember(SecretStr('se"cret'))
    log, error = logging.getLogger("tinsmith.engine"), ValueError('of se"cret')
    raised, values = (type(error), error, None), ("line", 'se"cret')
    record = log.makeRecord(
        log.name, logging.ERROR, "", 0, 'a "%s"\nof %s', values, raised, extra=about(run="s:train:0")
    )

    def formatted() -> str:
        begin_request("proxy-1")
        note(tenant="ann")
        return JsonFormatter().format(record)

    (line,) = copy_context().run(formatted).splitlines()
    found = json.loads(line)
    assert found.pop("time").endswith("+00:00")
    assert found.pop("exception").endswith("ValueError: of **********")
    assert found == {
        "level": "error",
        "logger": "tinsmith.engine",
        "message": 'a "line"\nof **********',
        "tenant": "ann",
        "run": "s:train:0",
        "x_request_id": "proxy-1",
    }


def test_what_a_console_prints_becomes_lines(caplog: pytest.LogCaptureFixture) -> None:
    printed = console()
    printed.file = LogLines(logging.getLogger("tinsmith.test"))  # type: ignore[assignment]  # IO[str] is no class
    with caplog.at_level(logging.INFO, "tinsmith.test"):
        printed.print("[bold]placement[/]", "toy: cpu", sep="\n")
        printed.print("\nready")
    assert caplog.messages == ["placement", "toy: cpu", "ready"]


def test_a_flood_of_refusals_becomes_twenty_lines_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    refusals = RefusalLog(clock=lambda: now_s)
    with caplog.at_level(logging.INFO):
        for _ in range(30):
            refusals.tell("POST /asample", "429 Too Many Requests", "ann")
        refusals.tell("POST /asample", "401 Unauthorized", None)
        assert caplog.messages[19:] == [
            "refused POST /asample of ann: 429 Too Many Requests",
            "refused POST /asample of nobody known: 401 Unauthorized",
        ]
        caplog.clear()
        now_s = 60.0
        refusals.tell("POST /asample", "429 Too Many Requests", "ann")
    assert caplog.messages == [
        "10 more refusals of ann are not listed",
        "refused POST /asample of ann: 429 Too Many Requests",
    ]
