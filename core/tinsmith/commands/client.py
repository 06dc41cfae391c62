"""HTTP requests of commands to a running server, and the options that name it."""

import json
from typing import Annotated, Any, Final
from urllib.error import HTTPError, URLError
from urllib.request import Request

import typer

from tinsmith.errors import UserError
from tinsmith.loopback import open_url

_TIMEOUT_S: Final = 30.0

URL_VARIABLE: Final = "TINKER_BASE_URL"
"""The environment variable that names the server, as the SDK reads it."""

ServerUrl = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="URL of the server")]
ApiKey = Annotated[str, typer.Option(envvar="TINKER_API_KEY", help="API key")]
DEFAULT_URL: Final = "http://127.0.0.1:8000"
DEFAULT_KEY: Final = "tml-local"


def get(url: str, path: str, key: str) -> bytes:
    """Return the body of an answer. Raise UserError if the server cannot be reached, or refuses the request."""
    remedy = "pass --url and --key, or set TINKER_BASE_URL and TINKER_API_KEY"
    try:
        request = Request(f"{url.rstrip('/')}{path}", headers={"x-api-key": key} if key else {})
        with open_url(request, timeout_s=_TIMEOUT_S) as answer:
            return bytes(answer.read())
    except HTTPError as error:
        with error:
            msg = f"{url} answers {error.code} to {path}: {_detail(error.read())}; {remedy}"
        raise UserError(msg) from error
    except (URLError, OSError, ValueError) as error:
        msg = f"cannot ask {url}: {getattr(error, 'reason', error)}; {remedy}"
        raise UserError(msg) from error


def download(link: str) -> bytes:
    """Return what is behind a link that needs no key. Raise UserError as `get` does."""
    return get(link, "", "")


def get_json(url: str, path: str, key: str) -> Any:
    """As `get`. Raise UserError also for an answer that is no JSON."""
    body = get(url, path, key)
    try:
        return json.loads(body)
    except ValueError as error:
        msg = f"{url} is no tinsmith server: its answer to {path} is no JSON"
        raise UserError(msg) from error


def _detail(body: bytes) -> str:
    try:
        return str(json.loads(body)["detail"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
