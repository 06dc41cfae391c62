"""What an SDK can send and offers: fields of its requests, its calls, the methods of its clients, its losses.

    python docs/sdk_walk.py                           # print it as JSON, of the SDK on the path
    PYTHONPATH=.venv/sdk-0.40.0 python docs/sdk_walk.py --new   # print its differences from the documentation

`make new-sdk SDK=0.40.0` fetches that release and does the latter. No module of the product is imported.
"""

import ast
import importlib
import inspect
import json
import pkgutil
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import field_status
import pydantic
import syntax_trees
import tinker
import tinker.types

# Only built by the SDK for calls that go out as protobuf, which have entries of their own.
SENT_AS_PROTOBUF = {"ForwardBackwardRequest", "ForwardRequest", "ForwardBackwardInput", "Datum"}
HTTP_CLIENT = "_base_client.py"  # what carries the calls; it makes none
RECORD = Path(__file__).parent / "reference" / "sdk-versions.json"
CLIENTS = ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient")

Fields = dict[str, set[str]]


def fields() -> Fields:
    """Return the fields of every request, by its name; of bodies without one, and of parameters, by the call."""
    return {**request_fields(), **proto_fields(), **calls().fields}


def request_fields() -> Fields:
    found: Fields = {}

    def walk(model: type[pydantic.BaseModel]) -> None:
        if model.__name__ in found or model.__name__ in SENT_AS_PROTOBUF:
            return
        found[model.__name__] = set(model.model_fields)
        for field in model.model_fields.values():
            for inner in _nested(field.annotation):
                walk(inner)

    for name, model in _models().items():
        # families that hide behind an open base class, and requests
        if name.endswith("Request") or name.startswith("Dimuon"):
            walk(model)
    return found


def _models() -> dict[str, type[pydantic.BaseModel]]:
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


def _nested(annotation: object) -> Iterator[type[pydantic.BaseModel]]:
    if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _nested(argument)


def proto_fields() -> Fields:
    """Releases before 0.26 have no request in protobuf."""
    messages: Any = importlib.import_module("tinker.proto.tinker_public_pb2")
    found: Fields = {}

    def walk(message: Any) -> None:
        name = f"proto {message.name}"
        if name in found:
            return
        if not message.GetOptions().map_entry:
            found[name] = {field.name for field in message.fields}
        for field in message.fields:
            if field.message_type is not None:
                walk(field.message_type)

    if hasattr(messages, "ForwardBackwardRequest"):
        walk(messages.ForwardBackwardRequest.DESCRIPTOR)
    return found


def methods() -> set[str]:
    """Return the public methods of the clients, with the names of their parameters."""
    found = set()
    for name in CLIENTS:
        for method, function in inspect.getmembers(getattr(tinker, name, None) or _rest_client(), callable):
            if not method.startswith("_"):
                found |= {f"{name}.{method}({each})" for each in ("", *inspect.signature(function).parameters)}
    return {each.replace("()", "") for each in found if not each.endswith("(self)")}


def _rest_client() -> Any:
    return importlib.import_module("tinker.lib.public_interfaces.rest_client").RestClient


def losses() -> set[str]:
    return set(typing.get_args(importlib.import_module("tinker.types.loss_fn_type").LossFnType))


# Bodies that are no `*Request`, and query parameters: read from the calls ---------------------------------------------


class Calls(ast.NodeVisitor):
    """Collects the literal fields that the SDK's calls send, by `<method> <path>`; what it cannot read, in `unread`."""

    def __init__(self) -> None:
        self.fields: Fields = {}
        self.unread: list[str] = []
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
        call = f"{method.upper()} {path}"
        for keyword in node.keywords:
            sent = self._sent(keyword)
            if sent:
                self.fields.setdefault(call, set()).update(sent)

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
            if any("'params'" in ast.unparse(function) for function in self._functions):
                self.unread.append(ast.unparse(options))
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
                self.unread.append(ast.unparse(value))
                return set()

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
        if not keys:
            self.unread.append(name)
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


def calls() -> Calls:
    found = Calls()
    for file in sorted(Path(tinker.__file__).parent.rglob("*.py")):
        if not file.name.endswith("_test.py") and file.name != HTTP_CLIENT:
            found.visit(syntax_trees.tree_of(file))
    return found


def walked() -> dict[str, Any]:
    """Return all of it, ready for JSON."""
    return {
        "sdk": tinker.__version__,
        "fields": {name: sorted(own) for name, own in sorted(fields().items())},
        "methods": sorted(methods()),
        "losses": sorted(losses()),
    }


def news() -> Iterator[str]:
    """Yield a line for each difference between the SDK on the path and the documented and recorded one."""
    known, found = field_status.FIELDS, fields()
    for message, own in sorted(found.items()):
        yield from (f"new: {message}: {name}" for name in sorted(own - known.get(message, {}).keys()))
    for message in sorted(known):
        yield from (f"gone: {message}: {name}" for name in sorted(known[message].keys() - found.get(message, set())))
    yield from (f"the walk cannot read what is sent as: {each}" for each in calls().unread)
    newest = json.loads(RECORD.read_text())["newest"]
    for what, own in (("methods", methods()), ("losses", losses())):
        yield from (f"new in {what}: {each}" for each in sorted(own - set(newest[what])))
        yield from (f"gone from {what}: {each}" for each in sorted(set(newest[what]) - own))


if __name__ == "__main__":
    text = (
        "\n".join([f"SDK {tinker.__version__}", *(list(news()) or ["nothing is new"])]) if "--new" in sys.argv else None
    )
    sys.stdout.write(f"{text or json.dumps(walked())}\n")
