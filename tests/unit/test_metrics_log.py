import logging
from dataclasses import replace

import pytest

from tinsmith.builtin.metrics_log import tinsmith_operation_finished
from tinsmith.hook_values import OperationFinished
from tinsmith.operations import Failed

EVENT = OperationFinished(
    request_id="req-1",
    base_model="b",
    kind="forward_backward",
    tenant="ann",
    model_id="s:train:0",
    num_tokens=12,
    queued_s=0.0015,
    run_s=0.02,
    batch_size=3,
)


def test_one_line_says_what_ran_and_how_long(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "tinsmith.operations"):
        tinsmith_operation_finished(EVENT)
    assert caplog.messages == [
        "forward_backward request=req-1 tenant=ann model=s:train:0 tokens=12 queued=1.5ms run=20.0ms batch=3"
    ]


@pytest.mark.parametrize(
    ("category", "level", "told"), [("user", logging.INFO, "user"), ("server", logging.WARNING, "server: why")]
)
def test_failures_are_louder(caplog: pytest.LogCaptureFixture, category: str, level: int, told: str) -> None:
    """The text of a refusal may quote a tenant's tokens, so it is left out."""
    failed = Failed(message="why", category=category)  # type: ignore[arg-type]  # one of the literals
    event = OperationFinished(**{field: getattr(EVENT, field) for field in EVENT.__slots__} | {"failed": failed})
    with caplog.at_level(logging.DEBUG, "tinsmith.operations"):
        tinsmith_operation_finished(event)
    (record,) = caplog.records
    assert record.levelno == level
    assert record.getMessage().endswith(f"failed={told}")


@pytest.mark.parametrize("kind", ["create_model", "save_state", "save_for_sampler", "export_adapter"])
def test_runs_and_saves_are_told(caplog: pytest.LogCaptureFixture, kind: str) -> None:
    with caplog.at_level(logging.INFO, "tinsmith.operations"):
        tinsmith_operation_finished(EVENT)
        tinsmith_operation_finished(replace(EVENT, kind=kind))
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{kind} request=req-1")
