"""Routes that read JSON strictly: without NaN, which no answer can repeat, and lone surrogates, which are not text.

Large bodies are decoded and validated off the event loop.
"""

from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError

from tinsmith.errors import UserError
from tinsmith.protocol import bounds
from tinsmith.protocol.answers import JSON
from tinsmith.protocol.unknown_fields import UnknownFieldError, is_exact, validated
from tinsmith.server.auth import caller_of, identified
from tinsmith.server.context import context_of
from tinsmith.server.error_answers import MediaTypeError
from tinsmith.server.limits.body_budget import lease_of
from tinsmith_checkpoints.values import Json

Handler = Callable[[Request], Awaitable[Response]]
Model = TypeVar("Model", bound=BaseModel)


class _RefusedError(HTTPException):
    """Takes the error out of `Request.json`: FastAPI lets no other exception through."""

    def __init__(self, error: UserError | RequestValidationError) -> None:
        super().__init__(422)
        self.error = error


class _StrictRequest(Request):
    model: type[BaseModel] | None = None

    async def body(self) -> bytes:
        """As Starlette does, but without a copy of a body that comes in one piece, as `Bodies` passes it on."""
        if not hasattr(self, "_body"):
            self._body = b"".join([chunk async for chunk in self.stream() if chunk])
        return self._body

    async def json(self) -> Any:  # an instance of the model, or else what the client sent; the route refuses that
        body = await self.body()
        heavy = context_of(self).heavy
        return await heavy.run(lease_of(self).tenant, len(body), partial(_decoded, body, self.model))


def is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == JSON or (kind.startswith("application/") and kind.endswith("+json"))


async def _refuse_other_types(request: Request) -> None:
    """Raises MediaTypeError if there is a body that does not claim to be JSON: a route would get its bare bytes."""
    given = request.headers.get("content-type", "")
    if is_json(given):
        return
    if await request.body():
        identified(request.scope, context_of(request))  # a wrong key is the first thing to report
        found = f"the content-type {given[:100]!r} is not offered" if given else "the body has no content-type"
        msg = f"{found}; send {JSON!r}"
        raise MediaTypeError(msg, offered=JSON)


def _decoded(body: bytes, model: type[BaseModel] | None) -> Any:
    try:
        content = bounds.json_content(body)
        return content if model is None or not isinstance(content, dict) else _validated(model, body, content)
    except (UserError, RequestValidationError) as error:
        raise _RefusedError(error) from error


def strictly_read(body: bytes, model: type[Model]) -> Model:
    """Return the model's instance, for a route whose body may be of another type than JSON.

    Raises UserError, or RequestValidationError.
    """
    try:
        content = bounds.json_content(body)
    except orjson.JSONDecodeError as error:
        problem = {"type": "json_invalid", "loc": ("body", error.pos), "msg": "", "ctx": {"error": error.msg}}
        raise RequestValidationError([problem]) from error
    if not isinstance(content, dict):
        problem = {"type": "model_type", "loc": ("body",), "msg": "must be an object", "input": content}
        raise RequestValidationError([problem])
    return _validated(model, body, content)


def _validated(model: type[Model], body: bytes, content: dict[str, Json]) -> Model:
    if is_exact(model):
        bounds.refuse_repeated_names(body, content)
    try:
        return validated(model, content)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors(include_url=False)]
        raise RequestValidationError(problems) from error


def _count(request: Request, error: Exception) -> None:
    """Let `/metrics` name what clients send and this server does not know."""
    if isinstance(error, UnknownFieldError):
        context_of(request).metrics.unknown_fields.count(error.fields)


def _strict(request: Request, model: type[BaseModel] | None) -> _StrictRequest:
    if isinstance(request, _StrictRequest):
        return request
    strict = _StrictRequest(request.scope, request.receive)
    strict.model = model
    return strict


class JsonRoute(APIRoute):
    """For `APIRouter(route_class=...)`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()
        body = self.body_field.field_info.annotation if self.body_field is not None else None
        model = body if isinstance(body, type) and issubclass(body, BaseModel) else None

        async def typed(request: Request) -> Response:
            try:
                if model is not None:
                    await _refuse_other_types(request)
                return await handle(request)
            except _RefusedError as refused:
                identified(request.scope, context_of(request))  # a wrong key is the first thing to report
                _count(request, refused.error)
                raise refused.error from refused
            except UserError as error:
                _count(request, error)
                raise

        async def read_strictly(request: Request) -> Response:
            return await self.answer(_strict(request, model), typed)

        return read_strictly

    async def answer(self, request: Request, handle: Handler) -> Response:
        return await handle(request)


class DirectRoute(JsonRoute):
    """For the routes that are asked for most: calls an endpoint `(request, body, caller, context)` itself.

    FastAPI would find out for each request what an endpoint takes, which takes longer than a heartbeat. A request that
    is not as it should be goes that way.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        solve, endpoint = super().get_route_handler(), self.endpoint
        model: Any = self.body_field.field_info.annotation if self.body_field is not None else None
        assert isinstance(model, type)
        assert issubclass(model, BaseModel)

        async def call(request: Request) -> Response:
            strict, context = _strict(request, model), context_of(request)
            if not await strict.body():
                return await solve(strict)
            try:
                await _refuse_other_types(strict)
                body = await strict.json()
            except (_RefusedError, ValueError):
                return await solve(strict)
            if not isinstance(body, model):
                return await solve(strict)
            found = await endpoint(strict, body, await caller_of(request, context), context)
            if isinstance(found, Response):
                return found
            return Response(found.model_dump_json(), media_type="application/json")

        return call
