"""Every field that the SDK can send has a status, and the table knows no field that does not exist."""

import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path

import pydantic
import pytest
import tinker.types
from google.protobuf.descriptor import Descriptor
from tinker.proto import tinker_public_pb2 as sdk_pb

from tinsmith.protocol import field_status

PAGE = Path(__file__).parents[2] / "docs/reference/protocol.md"
# Only built by the SDK for calls that go out as protobuf, which have entries of their own.
SENT_AS_PROTOBUF = {"ForwardBackwardRequest", "ForwardRequest", "ForwardBackwardInput", "Datum"}


def sdk_models() -> dict[str, type[pydantic.BaseModel]]:
    found: dict[str, type[pydantic.BaseModel]] = {}
    for info in pkgutil.walk_packages(tinker.types.__path__, "tinker.types."):
        for value in vars(importlib.import_module(info.name)).values():
            if (
                inspect.isclass(value)
                and issubclass(value, pydantic.BaseModel)
                and value.__module__.startswith("tinker")
            ):
                found[value.__name__] = value
    return found


def nested(annotation: object) -> Iterator[type[pydantic.BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from nested(argument)


def request_fields() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}

    def walk(model: type[pydantic.BaseModel]) -> None:
        if model.__name__ in found or model.__name__ in SENT_AS_PROTOBUF:
            return
        found[model.__name__] = set(model.model_fields)
        for field in model.model_fields.values():
            for inner in nested(field.annotation):
                walk(inner)

    models = sdk_models()
    for name, model in models.items():
        # families that hide behind an open base class, and requests
        if name.endswith("Request") or name.startswith("Dimuon"):
            walk(model)
    return found


def proto_fields() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}

    def walk(message: Descriptor) -> None:
        if message.full_name in found:
            return
        if not message.GetOptions().map_entry:
            found[f"proto {message.name}"] = {field.name for field in message.fields}
        found.setdefault(message.full_name, set())
        for field in message.fields:
            if field.message_type is not None:
                walk(field.message_type)

    walk(sdk_pb.ForwardBackwardRequest.DESCRIPTOR)
    return {name: fields for name, fields in found.items() if name.startswith("proto ")}


def sdk_fields() -> dict[str, set[str]]:
    return {**request_fields(), **proto_fields()}


@pytest.mark.parametrize(("message", "fields"), sorted(sdk_fields().items()))
def test_every_field_of_the_sdk_has_a_status(message: str, fields: set[str]) -> None:
    missing = fields - field_status.FIELDS.get(message, {}).keys()
    assert not missing, f"{message}: {sorted(missing)} without a status"


def test_the_walk_finds_what_matters() -> None:
    assert {"SampleRequest", "OptimStepRequest", "SamplingParams", "AdamParams", "proto Tensor"} <= sdk_fields().keys()


def test_no_status_is_of_a_field_that_does_not_exist() -> None:
    known = sdk_fields()
    events = {"SessionStartEvent", "SessionEndEvent", "UnhandledExceptionEvent", "GenericEvent"}
    for message, fields in field_status.FIELDS.items():
        assert message in known
        if message not in events:
            assert fields.keys() <= known[message], message


def test_the_page_shows_the_table() -> None:
    assert field_status.markdown() in PAGE.read_text()
