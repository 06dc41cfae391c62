"""Every field that the SDK can send has a status, and the table knows no field that does not exist."""

import ast
import functools
import importlib
import inspect
import pkgutil
import typing
from collections.abc import Iterator
from pathlib import Path

import field_status
import pydantic
import pytest
import syntax_trees
import tinker.types
from google.protobuf.descriptor import Descriptor
from tinker.proto import tinker_public_pb2 as sdk_pb

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


# Bodies that are no `*Request`, and query parameters: read from the calls ---------------------------------------------

HTTP_CLIENT = "_base_client.py"  # what carries the calls; it makes none


class Calls(ast.NodeVisitor):
    """Collects the literal fields that the SDK's calls send, by `<method> <path>`."""

    def __init__(self) -> None:
        self.fields: dict[str, set[str]] = {}
        self.count = 0
        self._functions: list[ast.AsyncFunctionDef | ast.FunctionDef] = []

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._visit_function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_function(node)

    def _visit_function(self, node: ast.AsyncFunctionDef | ast.FunctionDef) -> None:
        self._functions.append(node)
        self.generic_visit(node)
        self._functions.pop()

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        method = node.func.attr.lstrip("_") if isinstance(node.func, ast.Attribute) else ""
        path = _path(node.args[0]) if node.args else None
        if method not in {"get", "post", "put", "patch", "delete"} or path is None:
            return
        self.count += 1
        for keyword in node.keywords:
            sent = self._sent(keyword)
            if sent:
                self.fields.setdefault(f"{method.upper()} {path}", set()).update(sent)

    def _sent(self, keyword: ast.keyword) -> set[str]:
        match keyword.arg:
            case "body":
                return self._keys(keyword.value)
            case "options":
                return self._parameters(keyword.value)
            case _:
                return set()

    def _parameters(self, options: ast.expr) -> set[str]:
        if not isinstance(options, ast.Dict):  # put together before the call: of timeouts and retries alone
            assert not any("'params'" in ast.unparse(function) for function in self._functions)
            return set()
        items = zip(options.keys, options.values, strict=True)
        return set().union(*(self._keys(value) for key, value in items if key and ast.literal_eval(key) == "params"))

    def _keys(self, value: ast.expr, prefix: str = "") -> set[str]:
        match value:
            case ast.Dict():
                keys: set[str] = set()
                for key, inner in zip(value.keys, value.values, strict=True):
                    name = prefix + ast.literal_eval(key) if key is not None else "**"
                    keys |= self._keys(inner, f"{name}.") if isinstance(inner, ast.Dict) else {name}
                return keys
            case ast.Name(id="params"):
                return self._assigned("params")
            case ast.Name(id="body"):  # the protobuf bytes of forward_backward
                return set()
            case ast.Call() if ast.unparse(value).startswith(("model_dump(request", "request.model_dump(")):
                return set()  # a `*Request`, whose fields the walk above has found
            case _:
                pytest.fail(f"the SDK sends {ast.unparse(value)}: teach this test what that is")

    def _assigned(self, name: str) -> set[str]:
        """The keys that the functions around the call put into a dictionary."""
        keys: set[str] = set()
        for function in self._functions:
            for node in ast.walk(function):
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value is not None:
                    keys |= self._keys(node.value)
                elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript):
                    target = node.targets[0]
                    keys |= {ast.literal_eval(target.slice)} if ast.unparse(target.value) == name else set()
        assert keys
        return keys


def _path(node: ast.expr) -> str | None:
    """The path of a URL that stands in the call; None of any other call."""
    match node:
        case ast.Constant(value=str(text)):
            path = text
        case ast.JoinedStr():
            parts = [part.value if isinstance(part, ast.Constant) else f"{{{_name(part)}}}" for part in node.values]
            path = "".join(map(str, parts))
        case _:
            return None
    return path if path.startswith("/api/v1/") else None


def _name(node: ast.expr) -> str:
    assert isinstance(node, ast.FormattedValue)
    return ast.unparse(node.value)


@functools.cache
def sdk_calls() -> Calls:
    calls = Calls()
    root = Path(tinker.__file__).parent
    for file in sorted(root.rglob("*.py")):
        if not file.name.endswith("_test.py") and file.name != HTTP_CLIENT:
            calls.visit(syntax_trees.tree_of(file))
    return calls


def test_the_walk_finds_the_calls() -> None:
    """Some of each form: a body in the call, parameters beside it, and parameters that are put together before."""
    fields = sdk_calls().fields
    assert sdk_calls().count > 40
    assert fields["POST /api/v1/weights_info"] == {"tinker_path"}
    assert fields["POST /api/v1/sessions/{session_id}/finish"] == {"reason.type", "detail"}
    assert fields["GET /api/v1/training_runs/{training_run_id}"] == {"access_scope"}
    assert fields["GET /api/v1/training_runs"] == {"limit", "offset", "access_scope", "project_id"}


def sdk_fields() -> dict[str, set[str]]:
    return {**request_fields(), **proto_fields(), **sdk_calls().fields}


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
