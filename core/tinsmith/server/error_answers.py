"""Answers every failure with `{"detail": ...}`, never with an empty body or a bare 500."""

import errno
import logging
import math
import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from tinsmith.errors import CapacityError, DiskError, InvalidTokenError, StoreError, TinsmithError, UnsupportedError
from tinsmith.hook_values import ErrorAnswer
from tinsmith.references import Told, log_privately, told
from tinsmith.server.auth import known_caller
from tinsmith.server.context import context_of
from tinsmith.settings.secrets import cleaned

_log = logging.getLogger(__name__)

_SHOWN_CHARS: Final = 100
_OUTAGE_S: Final = 5  # `Retry-After` while the store or the disk cannot be used
_CLOSING: Final = {"connection": "close"}
"""After an unexpected error, uvicorn closes the connection. A client that does not know would lose its next request."""
_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})


class MediaTypeError(UnsupportedError):
    """A body comes in a form, or packed in a way, that is not read here."""

    http_status: ClassVar[int] = 415

    def __init__(self, message: str, *, offered: str, header: str = "accept") -> None:
        """`header` of the answer names what is offered."""
        super().__init__(message)
        self.offered = offered
        self.header = header


def install(app: FastAPI) -> None:
    app.add_exception_handler(TinsmithError, tinsmith_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _unexpected)


async def tinsmith_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, TinsmithError)
    call = f"{request.method} {request.url.path!r}"  # quoted: a path may hold line breaks
    if error.http_status >= 500 and error.public:
        _log.error("%s: %s", call, error)
    text = _text(request, told(error, _log, during=call))
    more = {}
    if isinstance(error, CapacityError):
        more = {"queue_state": error.queue_state, "queue_state_reason": text}
    answer = ErrorAnswer(status=error.http_status, detail=text, field=error.field, code=error.code)
    return _answer(request, answer, more=more, headers=_headers_of(error))


def _answer(
    request: Request,
    answer: ErrorAnswer,
    *,
    more: Mapping[str, str] = MappingProxyType({}),
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """Answer in the form that the path's plugin asks for, or else with the detail and `more`."""
    app = request.scope.get("app")  # absent where limits stand before another program
    forms = {} if app is None else app.state.context.error_forms
    form = next((form for prefix, form in forms.items() if request.url.path.startswith(prefix)), None)
    status, content = (answer.status, {"detail": answer.detail, **more}) if form is None else form(answer)
    return JSONResponse(content, status, headers)


def _text(request: Request, what: Told) -> str:
    if not what.cause:
        return what.public
    operator = context_of(request).is_operator(known_caller(request.scope))
    return cleaned(what.to(operator=operator))


def _headers_of(error: Exception) -> dict[str, str]:
    """Return the headers of the answer to this error."""
    match error:
        case CapacityError():
            return {"retry-after": str(math.ceil(error.retry_after_s))}
        case MediaTypeError():
            return {error.header: error.offered}
        case StoreError() | DiskError():
            return {"retry-after": str(_OUTAGE_S)}
        case InvalidTokenError():  # makes the SDK exchange its key again and repeat the request
            return {"www-authenticate": 'Bearer error="invalid_token"'}
        case _:
            return {}


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    named = [each for each in problems if each["type"] != "json_invalid"]  # whose location is an offset
    field = ".".join(str(part)[:_SHOWN_CHARS] for part in named[0]["loc"][1:]) if named else None
    return _answer(request, ErrorAnswer(status=422, detail=validation_detail(error), field=field or None))


def validation_detail(error: Exception) -> str:
    """Name the fields in one line; the SDK shows it to its user."""
    problems = error.errors() if isinstance(error, RequestValidationError) else []
    return "; ".join(_line(problem) for problem in problems[:5]) or "the request is not valid"


def _line(problem: Mapping[str, Any]) -> str:
    where = ".".join(str(part)[:100] for part in problem["loc"])
    if problem["type"] == "json_invalid":  # the location is an offset; the reason is in the context
        return f"body is not JSON at byte {problem['loc'][-1]}: {problem['ctx']['error']}"
    reason = problem["msg"].removeprefix("Value error, ")
    return f"{where}: {reason}" if problem["type"] == "missing" else f"{where}: {reason}; it is {_shown(problem)}"


def _shown(problem: Mapping[str, Any]) -> str:
    match problem.get("input"):
        case str(text):
            return repr(text) if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]!r}... of {len(text)} characters"
        case bytes(data):
            return f"{len(data)} bytes"
        case list(items):
            return f"a list of {len(items)}"
        case dict(fields):
            return f"an object of {len(fields)} fields"
        case value:
            return repr(value)[:_SHOWN_CHARS]


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    status = error.status_code if isinstance(error, HTTPException) else 500
    path = f"{request.method} {request.url.path[:300]}"
    match status:
        case 404:
            detail = f"{path} is not an endpoint of this server"
        case 405:
            detail = f"{path} is not allowed; the endpoint exists for another method"
        case _:
            detail = str(getattr(error, "detail", error))
    return _answer(request, ErrorAnswer(status=status, detail=detail))


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    """Answer with a reference to the log entry, which holds the traceback."""
    call = f"{request.method} {request.url.path!r}"
    if isinstance(error, OSError) and error.errno in _DISK:
        reference = log_privately(_log, f"{call}: {error}", error=error)
        what = Told(f"the server's disk cannot be used now ({reference})", str(error))
        answer = await tinsmith_error(request, DiskError(_text(request, what)))
        answer.headers.update(_CLOSING)
        return answer
    reference = secrets.token_hex(4)
    _log.error("%s failed, reference %s", call, reference, exc_info=error)
    what = Told(f"internal error, reference {reference} in the server's log", f"{type(error).__name__}: {error}")
    return _answer(request, ErrorAnswer(status=500, detail=_text(request, what)), headers=_CLOSING)
