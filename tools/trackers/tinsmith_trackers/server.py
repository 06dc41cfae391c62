"""Reading runs and their curves from a server, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from http import HTTPStatus
from typing import Any, Final

import httpx

from tinsmith_trackers.tracker import Run, TrackerError

STEPS_AT_ONCE: Final = 10_000
"""Steps of one request: so many come whole, where a longer curve would be thinned out."""

_RUNS_AT_ONCE: Final = 1000


class UnreachableError(Exception):
    """The server does not answer now; it may later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    number: int
    time_s: float  # since the epoch
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    run: Run
    ended: bool
    last_request: str  # changes while the run goes on


class Server:
    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=url.rstrip("/"), headers={"x-api-key": key}, timeout=60)

    def close(self) -> None:
        self._client.close()

    def runs(self) -> Iterator[Listed]:
        """Yield the runs that the key may read, newest first. One that begins meanwhile may shift another one twice."""
        offset, total = 0, 1
        while offset < total:
            page = self._get("/api/v1/runs", {"limit": _RUNS_AT_ONCE, "offset": offset})
            yield from (_listed(run) for run in page["runs"])
            offset, total = offset + _RUNS_AT_ONCE, page["cursor"]["total_count"]

    def newest(self, number: int) -> list[Mapping[str, Any]]:
        """Return the newest runs of the key's tenant, as the server lists them."""
        found: list[Mapping[str, Any]] = self._get("/api/v1/runs", {"limit": number, "access_scope": "owned"})["runs"]
        return found

    def steps(self, run_id: str, from_step: int) -> list[Step]:
        """Return the first `STEPS_AT_ONCE` steps from one on, in order, each with its finite values."""
        bounds = {"from_step": from_step, "num_steps": STEPS_AT_ONCE, "max_points": STEPS_AT_ONCE}
        found: dict[int, tuple[float, dict[str, float]]] = {}
        for series in self._get(f"/api/v1/runs/{run_id}/metrics", bounds)["series"]:
            for number, time_s, value in zip(series["steps"], series["times"], series["values"], strict=True):
                _, values = found.setdefault(number, (time_s, {}))
                if value is not None:
                    values[series["name"]] = value
        return [Step(number=number, time_s=time_s, values=values) for number, (time_s, values) in sorted(found.items())]

    def _get(self, path: str, parameters: Mapping[str, int | str]) -> Any:
        """Raise UnreachableError if a later request may be answered, TrackerError if none will."""
        try:
            answer = self._client.get(path, params=dict(parameters))
        except httpx.InvalidURL as error:
            msg = f"{str(self._client.base_url)!r} is no URL of a server: {error}"
            raise TrackerError(msg) from error
        except httpx.UnsupportedProtocol as error:
            msg = f"{str(self._client.base_url)!r} is no URL of a server; it begins with http:// or https://"
            raise TrackerError(msg) from error
        except httpx.TransportError as error:
            msg = f"{self._client.base_url} does not answer: {error or type(error).__name__}"
            raise UnreachableError(msg) from error
        if answer.status_code >= HTTPStatus.INTERNAL_SERVER_ERROR or answer.status_code == HTTPStatus.TOO_MANY_REQUESTS:
            msg = f"{self._client.base_url} answers {answer.status_code} to {path}"
            raise UnreachableError(msg)
        if answer.status_code == HTTPStatus.UNAUTHORIZED:
            msg = f"{self._client.base_url} does not know this key; pass --key, or set TINKER_API_KEY"
            raise TrackerError(msg)
        if answer.is_success and "json" in answer.headers.get("content-type", ""):
            return answer.json()
        msg = (
            f"{self._client.base_url} answers {answer.status_code} to {path}, as no tinsmith of today does; pass --url"
        )
        raise TrackerError(msg)


def _listed(run: Mapping[str, Any]) -> Listed:
    about = {name: str(run[name]) for name in ("base_model", "tenant", "lora_rank", "project_id") if run.get(name)}
    return Listed(
        run=Run(
            run_id=run["run_id"],
            name=run.get("name") or run["run_id"],
            created_s=datetime.fromisoformat(run["created_at"]).timestamp(),
            tags=tuple(run["tags"]),
            about={**(run.get("user_metadata") or {}), **about},
        ),
        ended=run.get("ended") is not None,
        last_request=run["last_request_at"],
    )
