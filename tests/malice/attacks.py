"""What one tenant did that others felt, at commit 0106fcc: each attack as requests."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
import wire_bodies
from attacker import Attacker, Request

from tinsmith.protocol.proto import tinker_public_pb2 as pb

MB = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    name: str
    prepare: Callable[[Attacker], Sequence[Request]]
    connections: int = 8
    models: bool = False  # takes places for models: a third tenant, which has none, asks for one
    persists: bool = False  # sends again what got a 429, as the SDK does
    await_first: bool = False  # goes on until the first accepted operation has ended
    most_stored: int = 500 * MB  # growth of the database
    later_s: float = 0.5  # p99 beside it: at most three times its value alone, plus this
    server: Mapping[str, Any] = field(default_factory=dict)
    backend: Mapping[str, Any] = field(default_factory=dict)


def wrong_tokens(attacker: Attacker, size: int) -> list[Request]:
    """A list of wrong-typed tokens: one validation error for each."""
    chunk = wire_bodies.with_list({"type": "encoded_text"}, "tokens", b'""', size)
    fields = b'{"sampling_session_id":"%s","seq_id":1,"prompt":{"chunks":[%s]}}'
    body = fields % (attacker.new_sampler().encode(), chunk)
    return [Request("asample", wire_bodies.packed(body), zstd=True)]


def long_heartbeat(attacker: Attacker) -> list[Request]:
    """With a field that nobody knows: a list of empty lists."""
    body = wire_bodies.with_list({"session_id": attacker.new_session()}, "x", b"[]", 40 * MB)
    return [Request("session_heartbeat", body)]


def zeros(_: Attacker) -> list[Request]:
    body = wire_bodies.packed(bytes(255 << 20))
    return [Request("asample", body, zstd=True)] * 12


def empty_data(attacker: Attacker) -> list[Request]:
    """Five million sequences without content: field 3, length 0, again and again."""
    head = wire_bodies.forward_backward(attacker.new_model(), 1, data=0, tokens=0)
    return [_pass(head + b"\x1a\x00" * (5 * MB))]


def large_passes(attacker: Attacker) -> list[Request]:
    """41 MB unpacked each."""
    return [
        _pass(wire_bodies.forward_backward(attacker.new_model(), 1, data=104, tokens=512, targets=64))
        for _ in range(20)
    ]


def large_dense_passes(attacker: Attacker) -> list[Request]:
    """As large, and packed no better than those of honest tenants."""
    body = wire_bodies.forward_backward("", 1, data=104, tokens=512, targets=64, vary=0)
    models = [attacker.new_model() for _ in range(20)]
    return [_pass(body + pb.ForwardBackwardRequest(model_id=model_id).SerializeToString()) for model_id in models]


def many_passes(attacker: Attacker) -> list[Request]:
    """Each fills a batch of its own."""
    model_id = attacker.new_model()
    return [
        _pass(wire_bodies.forward_backward(model_id, 1 + number, data=16, tokens=512, vary=number))
        for number in range(700)
    ]


def many_samples(attacker: Attacker) -> list[Request]:
    sampler = attacker.new_sampler()
    return [
        Request("asample", wire_bodies.sample(sampler, number, max_tokens=500, num_samples=8)) for number in range(1300)
    ]


def behind_a_missing_number(attacker: Attacker) -> list[Request]:
    """With heartbeats in between, since gaps are closed only for clients that are heard."""
    model_id = attacker.new_model()
    heartbeat = Request.json("session_heartbeat", session_id=model_id.split(":")[0])
    steps = [Request("optim_step", wire_bodies.optim_step(model_id, 2 + number)) for number in range(20_000)]
    return [each for number, step in enumerate(steps) for each in ([heartbeat, step] if number % 500 == 0 else [step])]


def many_models(attacker: Attacker) -> list[Request]:
    fields = {"session_id": attacker.new_session(), "base_model": attacker.base_model, "lora_config": {"rank": 4}}
    return [Request("create_model", orjson.dumps({**fields, "model_seq_id": number})) for number in range(64)]


def many_stop_strings(attacker: Attacker) -> list[Request]:
    sampler, stop = attacker.new_sampler(), [f"never {number}" for number in range(200_000)]
    return [
        Request("asample", wire_bodies.sample(sampler, number, max_tokens=500, stop=stop), zstd=False)
        for number in range(4)
    ]


def large_result(attacker: Attacker) -> list[Request]:
    """More than a gigabyte of alternatives, in one result."""
    sampler = attacker.new_sampler()
    fields = {"num_samples": 100, "topk_sample_logprobs": 4096}
    return [Request("asample", wire_bodies.sample(sampler, 1, max_tokens=500, **fields))]


def long_metadata(_: Attacker) -> list[Request]:
    text = b'{"user_metadata":{"note":"' + b"x" * (40 * MB) + b'"}}'
    return [Request("create_session", wire_bodies.packed(text), zstd=True)] * 9


def _pass(body: bytes) -> Request:
    return Request("forward_backward", wire_bodies.packed(body), wire_bodies.PROTOBUF, zstd=True)


ATTACKS = (
    Attack(name="4 MB of wrong tokens", prepare=lambda attacker: wrong_tokens(attacker, 4 * MB)),
    Attack(name="24 MB of wrong tokens", prepare=lambda attacker: wrong_tokens(attacker, 24 * MB)),
    Attack(name="a heartbeat of 40 MB", prepare=long_heartbeat),
    Attack(name="twelve bodies of zeros", prepare=zeros, connections=12),
    Attack(name="10 MB of empty data", prepare=empty_data),
    Attack(name="twenty passes of 41 MB", prepare=large_passes, connections=20),
    Attack(
        name="twenty dense passes of 41 MB",
        prepare=large_dense_passes,
        connections=20,
        persists=True,
        # A result has two arrays of 13 MB, log-probabilities and losses, which nothing packs. SQLite has one writer,
        # and a result takes it 0.3 s. Twenty of them with their requests, of 2 MB packed, are 564 MB.
        later_s=3.0,
        most_stored=600 * MB,
    ),
    Attack(name="700 passes", prepare=many_passes),
    Attack(name="1,300 samples", prepare=many_samples),
    Attack(
        name="20,000 operations behind a missing number",
        prepare=behind_a_missing_number,
        connections=16,
        await_first=True,
        server={"gap_timeout_s": 15.0},
    ),
    Attack(name="64 models", prepare=many_models, models=True),
    Attack(name="200,000 stop strings", prepare=many_stop_strings),
    Attack(
        name="a result of more than a gigabyte",
        prepare=large_result,
        await_first=True,
        backend={"vocab_size": 4096},
    ),
    Attack(name="user_metadata of 40 MB", prepare=long_metadata, most_stored=10 * MB),
)
