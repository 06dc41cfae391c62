"""A check's means of talking to a server: its own HTTP, and the SDK. Each check has its own sessions, ended after it.

Everything raises `CheckError` where an answer is not what the protocol says: a check states only what is special.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from collections.abc import Sequence as ListLike
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Final, Self

import httpx
import numpy as np
import numpy.typing as npt
import tinker
from tinker.proto import tinker_public_pb2 as pb

from tinsmith_conformance.data import TOKENS, Sequence, learned
from tinsmith_conformance.oracle import Floats
from tinsmith_conformance.verdicts import CheckError, RequestFailedError, expect, skip

PROTOBUF: Final = "application/x-protobuf"
POLL_S: Final = 45.0  # the SDK gives up a poll after this time
_CALL_S: Final = 60.0
_NOT_FOUND: Final = 404
_PAUSE_S: Final = 0.01
_RESULT_DTYPES: Final = {1: "<f4", 2: "<i8", 3: "<i4"}
_VALUES: Final = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0}
ADAM: Final[Mapping[str, float]] = {**_VALUES, "grad_clip_norm": 0.0}
_EPS: Final = 1e6
_MOVES: Final = 0.05  # what a step of `descend` at scale 1 moves some logprob by, at least
_RATES: Final = [4.0**power for power in range(-6, 8)]
_rates: dict[Target, float] = {}  # what `Tester.rate` has found


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Which server is tested, and with what."""

    url: str
    model: str
    key: str
    other_key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Of forward and forward_backward."""

    fields: ListLike[Mapping[str, npt.NDArray[Any]]]
    metrics: Mapping[str, float]

    @property
    def logprobs(self) -> list[Floats]:
        return [np.asarray(each["logprobs"], np.float64) for each in self.fields]

    @property
    def loss(self) -> float:
        expect("loss:sum" in self.metrics, f"the metrics lack loss:sum: {sorted(self.metrics)}")
        return self.metrics["loss:sum"]


class Future:
    """A submitted request."""

    def __init__(self, tester: Tester, submitted: Mapping[str, Any], parse: Any = None) -> None:
        expect(isinstance(submitted.get("request_id"), str), f"the submission has no request_id: {dict(submitted)}")
        self.id: str = submitted["request_id"]
        self.submitted = submitted
        self._tester = tester
        self._parse = parse

    def poll(self, *, allow_metadata_only: bool = True) -> httpx.Response:
        body = {"request_id": self.id, "allow_metadata_only": allow_metadata_only}
        accept = {"Accept": PROTOBUF if self._parse else f"{PROTOBUF}, application/json"}
        return self._tester.http.post("retrieve_future", json=body, headers=accept, timeout=POLL_S)

    def finished(self) -> httpx.Response:
        """Wait until the server has an answer, which may be a failure."""
        whole = False
        while True:
            response = self.poll(allow_metadata_only=not whole)
            if response.status_code == 408:
                time.sleep(_PAUSE_S)
                continue
            expect(response.status_code == 200, f"retrieve_future: {_shown(response)}")
            if PROTOBUF in response.headers.get("content-type", ""):
                return response
            body = _json(response)
            if body.get("type") == "try_again":
                time.sleep(_PAUSE_S)
            elif body.get("status") == "complete_metadata":
                expect(not whole, "retrieve_future announces a result without end, and never sends it")
                whole = True
            else:
                return response

    def result(self) -> Any:
        """Return the parsed result: JSON as a dictionary.

        Raises:
            RequestFailedError: the server failed the request.
        """
        response = self.finished()
        binary = PROTOBUF in response.headers.get("content-type", "")
        if not binary:
            body = _json(response)
            if "error" in body:
                raise RequestFailedError(str(body["error"]), str(body.get("category")))
            expect(self._parse is None, f"the result of a pass or a sample must be protobuf; it is {body}")
            return body
        expect(self._parse is not None, "this result must be JSON; it is protobuf")
        return self._parse(response.content)

    def failure(self) -> RequestFailedError:
        """Return how it fails, and raise if it does not."""
        try:
            result = self.result()
        except RequestFailedError as error:
            return error
        raise CheckError(f"the request must fail; it succeeded: {str(result)[:200]}")


class Model:
    """A model in training. Numbers its requests as the SDK does."""

    def __init__(self, tester: Tester, model_id: str) -> None:
        self.id = model_id
        self._tester = tester
        self._numbers = iter(range(1, 1 << 30))
        tester.model_ids.append(model_id)

    def number(self) -> int:
        return next(self._numbers)

    def forward_from(self, number: int) -> None:
        """Go on with this number: those below it were given by hand."""
        self._numbers = iter(range(number, 1 << 30))

    def pass_body(
        self,
        data: ListLike[Sequence],
        loss: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
        *,
        seq_id: int,
        forward_only: bool = False,
    ) -> bytes:
        request = pb.ForwardBackwardRequest(model_id=self.id, seq_id=seq_id, loss_fn=loss, forward_only=forward_only)
        request.data.extend([each.proto() for each in data])
        for name, value in (config or {}).items():
            request.loss_fn_config[name] = value
            request.loss_fn_config_v2[name].number = value
        return bytes(request.SerializeToString())

    def send_pass(self, body: bytes, headers: Mapping[str, str] | None = None) -> httpx.Response:
        headers = {"Content-Type": PROTOBUF, **(headers or {})}
        return self._tester.http.post("forward_backward", content=body, headers=headers)

    def forward_backward(
        self,
        data: ListLike[Sequence],
        loss: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
        *,
        seq_id: int | None = None,
        forward_only: bool = False,
    ) -> Future:
        seq_id = self.number() if seq_id is None else seq_id
        body = self.pass_body(data, loss, config, seq_id=seq_id, forward_only=forward_only)
        return Future(self._tester, _accepted(self.send_pass(body)), _output)

    def forward(self, data: ListLike[Sequence], loss: str = "cross_entropy", **config: float) -> Output:
        output: Output = self.forward_backward(data, loss, config, forward_only=True).result()
        return output

    def logprobs(self, tokens: ListLike[int] = TOKENS) -> Floats:
        """Return the logprobs of all tokens but the first."""
        return self.forward([learned(tokens)]).logprobs[0]

    def optim_step(self, *, seq_id: int | None = None, **adam: float) -> Future:
        seq_id = self.number() if seq_id is None else seq_id
        return self.submit("optim_step", seq_id=seq_id, adam_params={**ADAM, **adam})

    def step(
        self,
        data: ListLike[Sequence],
        loss: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
        **adam: float,
    ) -> Output:
        """Train on the data, and wait for both results."""
        passed = self.forward_backward(data, loss, config)
        self.optim_step(seq_id=None, **{"learning_rate": 0.01, **adam}).result()
        output: Output = passed.result()
        return output

    def descend(
        self,
        data: ListLike[Sequence],
        loss: str = "cross_entropy",
        config: Mapping[str, float] | None = None,
        *,
        scale: float = 1.0,
    ) -> Output:
        """Train on the data by plain gradient descent, and wait. Only so, the size of a gradient shows."""
        passed = self.forward_backward(data, loss, config)
        self.linear_step(scale).result()
        output: Output = passed.result()
        return output

    def linear_step(self, scale: float = 1.0, *, seq_id: int | None = None, rate: float | None = None) -> Future:
        """Submit a step of AdamW that is plain gradient descent, because of its large eps."""
        rate = self._tester.rate if rate is None else rate
        return self.optim_step(seq_id=seq_id, learning_rate=scale * rate * _EPS, beta1=0.0, beta2=0.0, eps=_EPS)

    def submit(self, call: str, *, seq_id: int | None = None, **body: Any) -> Future:
        seq_id = self.number() if seq_id is None else seq_id
        return Future(self._tester, self._tester.ok(call, {"model_id": self.id, "seq_id": seq_id, **body}))

    def save(self, name: str = "state", **fields: Any) -> str:
        """Save weights and optimizer. Return the path."""
        return _path(self.submit("save_weights", path=name, **{"overwrite": False, **fields}).result())

    def save_for_sampling(self, name: str = "snapshot", **fields: Any) -> str:
        return _path(self.submit("save_weights_for_sampler", path=name, kind="snapshot", **fields).result())

    def export(self, name: str = "export", **fields: Any) -> str:
        return _path(self.submit("save_weights_external", path=name, **fields).result())

    def load(self, path: str, *, optimizer: bool = True) -> None:
        self.submit("load_weights", path=path, optimizer=optimizer).result()

    def sampler(self) -> Sampler:
        """Return a sampler of the weights as they are after all requests so far."""
        number = self._tester.sampling_number()
        saved = self.submit("save_weights_for_sampler", sampling_session_seq_id=number, kind="snapshot").result()
        sampler_id = saved.get("sampling_session_id")
        expect(isinstance(sampler_id, str), f"the ephemeral save returns no sampling_session_id: {saved}")
        return Sampler(self._tester, sampler_id)

    def info(self) -> Mapping[str, Any]:
        return self._tester.ok("get_info", {"model_id": self.id})


class Sampler:
    """A sampling session. Numbers its requests as the SDK does."""

    def __init__(self, tester: Tester, sampler_id: str) -> None:
        self.id = sampler_id
        self._tester = tester
        self._numbers = iter(range(1 << 30))

    def number(self) -> int:
        return next(self._numbers)

    def body(self, prompt: ListLike[int] = TOKENS, n: int = 1, **fields: Any) -> dict[str, Any]:
        """Return a request. `fields`: sampling parameters; with an underscore before the name, the request's."""
        request = {name.removeprefix("_"): value for name, value in fields.items() if name.startswith("_")}
        params = {name: value for name, value in fields.items() if not name.startswith("_")}
        return {
            "sampling_session_id": self.id,
            "seq_id": self.number(),
            "num_samples": n,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": list(prompt)}]},
            "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0, "stop": []} | params,
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
            **request,
        }

    def send(self, body: Mapping[str, Any]) -> Future:
        return Future(self._tester, self._tester.ok("asample", body), _sampled)

    def sample(self, prompt: ListLike[int] = TOKENS, n: int = 1, **fields: Any) -> Any:
        """Draw, and wait. Without `stop` nothing stops before `max_tokens`. Return the `SampleResponse`."""
        return self.send(self.body(prompt, n, **fields)).result()

    def draw(self, prompt: ListLike[int] = TOKENS, n: int = 1, **fields: Any) -> list[list[int]]:
        """Return the tokens of each sample."""
        return [tokens_of(each) for each in self.sample(prompt, n, **fields).sequences]

    def scores(self, prompt: ListLike[int] = TOKENS) -> Floats:
        """Return the logprobs of all tokens of a prompt but the first."""
        answer = self.sample(prompt, max_tokens=1, _prompt_logprobs=True)
        expect(answer.prompt_logprobs, "prompt_logprobs were asked for, and are absent")
        return floats(answer.prompt_logprobs)[1:]


class Tester:
    def __init__(self, target: Target, key: str | None = None) -> None:
        self.target = target
        self.key = key or target.key
        self.http = httpx.Client(
            base_url=f"{target.url.rstrip('/')}/api/v1/", headers={"X-API-Key": self.key}, timeout=_CALL_S
        )
        self.model_ids: list[str] = []
        self._sessions: list[str] = []
        self._clients: list[tinker.ServiceClient] = []
        self._others: list[Tester] = []
        self._samplers = iter(range(1 << 30))
        self._models = iter(range(1 << 30))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(httpx.HTTPError):  # it is not what the check is about
            self._end_sessions()
        for client in self._clients:
            client.close("success")
        for other in self._others:
            other.__exit__()
        self.http.close()

    def _end_sessions(self) -> None:
        """End them, and so their models. Where sessions do not end, unload the models: they would fill the server."""
        reason = {"reason": {"type": "success"}, "detail": None}
        ended = [self.http.post(f"sessions/{session}/finish", json=reason) for session in self._sessions]
        if any(each.status_code == _NOT_FOUND for each in ended):
            for model_id in self.model_ids:
                self.http.post("unload_model", json={"model_id": model_id})

    # HTTP -------------------------------------------------------------------------------------------------------------

    def ok(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """POST, and return the answer, which must be a success."""
        return _accepted(self.http.post(path, json=body))

    def ok_without_body(self, response: httpx.Response) -> None:
        expect(response.is_success, f"{response.request.url.path}: {_shown(response)}")

    def get(self, path: str, **params: Any) -> dict[str, Any]:
        return _accepted(self.http.get(path, params=params))

    def refusal(self, path: str, body: Mapping[str, Any], *allowed: int) -> str:
        """POST what the server must refuse, at once or as a failed request. Return its words."""
        return self.refused(self.http.post(path, json=body), *allowed)

    def refused(self, response: httpx.Response, *allowed: int) -> str:
        """Return why a request was refused: by the answer, or by the future that it submitted.

        Of HTTP errors, `allowed` or those that the SDK does not repeat.
        """
        if response.is_success:
            failure = Future(self, _json(response), _anything).failure()
            expect(failure.category == "user", f"the category of a user's error must be 'user'; {failure}")
            return failure.message
        expect(response.status_code in (allowed or _REFUSALS), f"it must be refused by {allowed}: {_shown(response)}")
        expect(response.content, f"status {response.status_code} has an empty body, which the SDK repeats")
        return response.text

    @property
    def rate(self) -> float:
        """The rate at which a step of plain gradient descent on TOKENS moves logprobs visibly. Searched for once."""
        if self.target not in _rates:
            for rate in _RATES:
                model = self.model()
                before = model.logprobs()
                model.forward_backward([learned()]).result()
                model.linear_step(rate=rate).result()
                if np.abs(model.logprobs() - before).max() >= _MOVES:
                    break
            _rates[self.target] = rate
        return _rates[self.target]

    def future(self, response: httpx.Response) -> Future:
        """Return the future of a submission, whatever its result is."""
        return Future(self, _accepted(response))

    # Objects ----------------------------------------------------------------------------------------------------------

    def new_session(self, **fields: Any) -> str:
        body = {"tags": [], "user_metadata": {}, "sdk_version": tinker.__version__, "type": "create_session", **fields}
        session = self.ok("create_session", body).get("session_id")
        expect(isinstance(session, str), "create_session returns no session_id")
        self._sessions.append(str(session))
        return str(session)

    @cached_property
    def session(self) -> str:
        return self.new_session()

    def sampling_number(self) -> int:
        return next(self._samplers)

    def new_model(self, rank: int = 8, seed: int | None = 1, **fields: Any) -> httpx.Response:
        """Send create_model. Fields that the request lacks belong to its LoRA configuration."""
        lora = {"rank": rank, "seed": seed, "train_attn": True, "train_mlp": True, "train_unembed": True}
        lora |= {name: fields.pop(name) for name in tuple(fields) if name.startswith("train_")}
        body = {
            "session_id": self.session,
            "model_seq_id": next(self._models),
            "base_model": self.target.model,
            "lora_config": {name: value for name, value in lora.items() if value is not None},
            "type": "create_model",
        }
        return self.http.post("create_model", json={**body, **fields})

    def model(self, rank: int = 8, seed: int | None = 1, **fields: Any) -> Model:
        made = Future(self, _accepted(self.new_model(rank, seed, **fields))).result()
        expect(isinstance(made.get("model_id"), str), f"create_model returns no model_id: {made}")
        return Model(self, made["model_id"])

    def model_from(self, path: str, *, optimizer: bool) -> Model:
        """Create a model from a checkpoint."""
        number = next(self._models)
        body = {"session_id": self.session, "model_seq_id": number, "path": path, "optimizer": optimizer}
        Future(self, self.ok("load_weights", body)).result()
        return Model(self, f"{self.session}:train:{number}")

    def sampler(self, path: str | None = None) -> Sampler:
        """Open a sampling session on a saved snapshot, or on the base model."""
        of = {"base_model": self.target.model} if path is None else {"model_path": path}
        body = {"session_id": self.session, "sampling_session_seq_id": self.sampling_number(), **of}
        return Sampler(self, str(self.ok("create_sampling_session", body)["sampling_session_id"]))

    def sdk(self, **fields: Any) -> tinker.ServiceClient:
        """Return a client of the official SDK."""
        self._clients.append(tinker.ServiceClient(base_url=self.target.url, api_key=self.key, **fields))
        return self._clients[-1]

    def other(self) -> Tester:
        """Return somebody else: a tester with the other key."""
        other = Tester(self.target, self.target.other_key)
        self._others.append(other)
        answer = other.http.post("create_session", json={"tags": [], "sdk_version": tinker.__version__})
        if answer.status_code in (401, 403):
            skip("the server does not know the other key; give one with --other-key")
        return other


_REFUSALS: Final = (400, 403, 404, 410, 413, 415, 422, 501)


def _anything(content: bytes) -> str:
    return f"{len(content)} bytes of protobuf"


def _path(saved: Mapping[str, Any]) -> str:
    path = saved.get("path")
    expect(isinstance(path, str) and path.startswith("tinker://"), f"the save returns no path: {dict(saved)}")
    return str(path)


def _accepted(response: httpx.Response) -> dict[str, Any]:
    expect(response.is_success, f"{response.request.method} {response.request.url.path}: {_shown(response)}")
    return _json(response)


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        raise CheckError(f"the answer is not JSON: {_shown(response)}") from None
    expect(isinstance(body, dict), f"the answer is not an object: {_shown(response)}")
    return dict(body)


def _shown(response: httpx.Response) -> str:
    return f"status {response.status_code}, {response.text[:300]!r}"


def floats(content: bytes) -> Floats:
    return np.frombuffer(content, "<f4").astype(np.float64)


def tokens_of(sequence: Any) -> list[int]:
    return [int(token) for token in np.frombuffer(sequence.tokens, "<i4")]


def _sampled(content: bytes) -> Any:
    return _parsed(pb.SampleResponse, content)


def _output(content: bytes) -> Output:
    message = _parsed(pb.ForwardBackwardOutput, content)
    fields: list[dict[str, npt.NDArray[Any]]] = []
    for record in message.loss_fn_outputs:
        expect(record.num_datums > 0, "an ArrayRecord has no num_datums: the SDK loses its data")
        parts = {name: _split(tensor, record.num_datums) for name, tensor in record.fields.items()}
        fields += [{name: values[i] for name, values in parts.items()} for i in range(record.num_datums)]
    return Output(fields=fields, metrics=dict(message.metrics))


def _split(tensor: Any, count: int) -> list[npt.NDArray[Any]]:
    expect(tensor.dtype in _RESULT_DTYPES, f"a result has dtype {tensor.dtype}, which the SDK does not read")
    dtype = np.dtype(_RESULT_DTYPES[tensor.dtype])
    values, offsets = np.frombuffer(tensor.data, dtype), np.frombuffer(tensor.offsets, "<i8") // dtype.itemsize
    expect(len(offsets) == count + 1, f"{count} data have {len(offsets)} offsets; it must be one more than data")
    expect(offsets[-1] == len(values), "the offsets do not end where the data end: they count bytes")
    pieces = [values[start:stop] for start, stop in pairwise(offsets)]
    return [each.reshape(-1, *tensor.trailing_shape) if tensor.trailing_shape else each for each in pieces]


def _parsed(kind: Any, content: bytes) -> Any:
    message = kind()
    try:
        message.ParseFromString(content)
    except Exception as error:  # noqa: BLE001 - of protobuf, whose class depends on its implementation
        raise CheckError(f"the result is not a {kind.__name__}: {error}") from None
    return message
