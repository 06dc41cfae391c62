"""Metrics of a training script, added to the curves of its run: `track(training_client).log(step, reward=...)`."""

import json
import logging
import math
import struct
import time
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote

import httpx

from tinsmith_trackers.loopback import is_loopback

_log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 10.0
_PAUSES_S: Final = (0.5, 2.0)  # before each repetition
Point = tuple[int, Mapping[str, float]]


class ScriptLog:
    """Logs to one run. Logging a step again replaces the values of the same names, so it can be repeated."""

    def __init__(self, url: str, key: str, run_id: str) -> None:
        self.run_id = run_id
        self._url = f"{url.rstrip('/')}/api/v1/runs/{quote(run_id)}"
        self._headers = {"x-api-key": key, "content-type": "application/json"}

    def log(self, step: int, metrics: Mapping[str, float] | None = None, /, **values: float) -> None:
        """Log values of a step, given by mapping, by keyword, or both. One that is not finite leaves a gap.

        Raises ValueError if the server refuses them. If it cannot be reached, they are lost with a warning, and
        training goes on.
        """
        self.log_many([(step, {**(metrics or {}), **values})])

    def log_many(self, points: Sequence[Point]) -> None:
        """As `log`, for up to 1,000 steps at once."""
        body = {"points": [{"step": step, "values": _as_json(values)} for step, values in points]}
        self._send("metrics", body, f"metrics of {len(points)} steps")

    def _send(self, to: str, body: Mapping[str, Any], what: str) -> None:
        data = json.dumps(body, allow_nan=False).encode()
        for pause_s in (*_PAUSES_S, None):
            problem = self._post(f"{self._url}/{to}", data)
            if problem is None:
                return
            if pause_s is None:
                _log.warning("%s of %s are not logged: %s", what, self.run_id, problem)
            else:
                time.sleep(pause_s)

    def log_rewards(self, step: int, data: Sequence[Any], rewards: Sequence[float]) -> None:
        """Log the reward of each rollout of a step, given by the data that forward_backward trains on.

        `data`: Datum objects of the SDK, in the order of `rewards`. Errors are as of `log`.
        """
        body = {"step": step, "rewards": dict(zip(map(_digest, data), map(float, rewards), strict=True))}
        self._send("rewards", body, f"the rewards of step {step}")

    def _post(self, url: str, data: bytes) -> Exception | None:
        """Return why it may work later, if so."""
        try:
            passes_proxies = is_loopback(url)
            answer = httpx.post(
                url, content=data, headers=self._headers, timeout=_TIMEOUT_S, trust_env=not passes_proxies
            )
        except httpx.TransportError as error:
            return error
        code = answer.status_code
        if code >= HTTPStatus.INTERNAL_SERVER_ERROR or code == HTTPStatus.TOO_MANY_REQUESTS:
            return httpx.HTTPStatusError(f"it answers {code}", request=answer.request, response=answer)
        if not answer.is_success:
            msg = f"the server refuses what {self.run_id} logs: {answer.text}"
            raise ValueError(msg)
        return None


def track(training_client: Any) -> ScriptLog:  # Any: a TrainingClient of the SDK, which this package does not require
    """Return what logs to the run of a training client, with the URL and the key of that client."""
    from tinker.lib.client_connection_pool_type import ClientConnectionPoolType  # there is a client, so there is an SDK

    holder = training_client.holder

    async def credentials() -> tuple[str, str]:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            return str(client.base_url), await client.custom_auth.get_token() or ""

    url, key = holder.run_coroutine_threadsafe(credentials()).result()
    return ScriptLog(url, key, training_client.get_info().model_id)


def _as_json(values: Mapping[str, float]) -> dict[str, float | None]:
    numbers = {name: float(value) for name, value in values.items()}
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _digest(datum: Any) -> str:
    """Return how the server knows the sequence of a Datum: its tokens, and the last target."""
    tokens = [*datum.model_input.to_ints(), datum.loss_fn_inputs["target_tokens"].tolist()[-1]]
    return blake2b(struct.pack(f"<{len(tokens)}i", *tokens), digest_size=16).hexdigest()
