"""Every field that the SDK can send has a status, and the table knows no field that does not exist."""

import functools
from pathlib import Path

import field_status
import pytest
import sdk_walk
from fastapi.routing import APIRoute

from tinsmith.server.routes import service

PAGE = Path(__file__).parents[2] / "docs/reference/protocol.md"
sdk_calls, sdk_fields = functools.cache(sdk_walk.calls), functools.cache(sdk_walk.fields)


def test_the_walk_finds_the_calls() -> None:
    """Some of each form: a body in the call, parameters beside it, and parameters that are put together before."""
    fields = sdk_calls().fields
    assert sdk_calls().count > 40
    assert not sdk_calls().unread, "the SDK sends what the walk cannot read: teach it what that is"
    assert fields["POST /api/v1/weights_info"] == {"tinker_path"}
    assert fields["POST /api/v1/sessions/{session_id}/finish"] == {"reason.type", "detail"}
    assert fields["GET /api/v1/training_runs/{training_run_id}"] == {"access_scope"}
    assert fields["GET /api/v1/training_runs"] == {"limit", "offset", "access_scope", "project_id"}


@pytest.mark.parametrize(("message", "fields"), sorted(sdk_fields().items()))
def test_every_field_of_the_sdk_has_a_status(message: str, fields: set[str]) -> None:
    missing = fields - field_status.FIELDS.get(message, {}).keys()
    assert not missing, f"{message}: {sorted(missing)} without a status"


def test_the_walk_finds_what_matters() -> None:
    assert {"SampleRequest", "OptimStepRequest", "SamplingParams", "AdamParams", "proto Tensor"} <= sdk_fields().keys()


def test_no_status_is_of_a_field_that_does_not_exist() -> None:
    known = sdk_fields()
    for message, fields in field_status.FIELDS.items():
        assert message in known
        assert fields.keys() <= known[message], message


def test_the_page_shows_the_table() -> None:
    assert field_status.markdown() in PAGE.read_text()


def test_at_most_ten_things_stay_refused_and_each_says_why() -> None:
    refusals = field_status.refusals()
    assert 0 < len(refusals) <= 10
    assert all(": " in why for why in refusals), "each names a reason, or what to do instead"
    assert field_status.refused_lines() in PAGE.read_text()


def test_the_endpoints_that_are_not_offered_are_those_of_the_page() -> None:
    routes = [each for each in service.router.routes if isinstance(each, APIRoute) and "not offered" in each.tags]
    assert {f"{method} {each.path}" for each in routes for method in each.methods} == set(field_status.NOT_OFFERED)


def test_nothing_in_the_newest_sdk_is_news() -> None:
    assert list(sdk_walk.news()) == []


def test_what_is_new_in_an_sdk_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {name: dict(fields) for name, fields in field_status.FIELDS.items()}
    del known["SampleRequest"]["num_samples"]
    known["AdamParams"]["momentum"] = known["AdamParams"]["beta1"]
    monkeypatch.setattr(field_status, "FIELDS", known)
    monkeypatch.setattr(sdk_walk, "losses", lambda: {"ppo"})
    lines = list(sdk_walk.news())
    assert lines[:2] == ["new: SampleRequest: num_samples", "gone: AdamParams: momentum"]
    assert "gone from losses: gspo" in lines
