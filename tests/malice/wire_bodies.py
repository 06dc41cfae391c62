"""Valid request bodies of the Tinker API, small and at will very large, without the SDK."""

from typing import Any

import numpy as np
import orjson
import zstandard

from tinsmith.protocol.proto import tinker_public_pb2 as pb

PROTOBUF, JSON = "application/x-protobuf", "application/json"


def forward_backward(
    model_id: str, seq_id: int, *, data: int, tokens: int, targets: int | None = None, vary: int | None = None
) -> bytes:
    """Return `data` sequences of `tokens` tokens with `targets` targets each; `vary` seeds random ones."""
    shape = [tokens] if targets is None else [tokens, targets]
    message = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    rng = np.random.default_rng(vary)
    for _ in range(data):
        ids = np.ones(tokens, "<i4") if vary is None else rng.integers(1, 30, tokens).astype("<i4")
        datum = message.data.add()
        datum.model_input.add().encoded_text.tokens = ids.tobytes()
        target = datum.loss_fn_inputs["target_tokens"]
        targets_TK = np.ones(shape, "<i8") if vary is None else rng.integers(1, 30, shape).astype("<i8")
        target.dense, target.dtype = targets_TK.tobytes(), pb.DTYPE_INT64
        target.shape.extend(shape)
        weights = datum.loss_fn_inputs["weights"]
        weights.dense, weights.dtype = np.ones(shape, "<f4").tobytes(), pb.DTYPE_FLOAT32
        weights.shape.extend(shape)
    return message.SerializeToString(deterministic=True)


def optim_step(model_id: str, seq_id: int) -> bytes:
    return orjson.dumps({"model_id": model_id, "seq_id": seq_id, "adam_params": {"learning_rate": 0.01}})


def sample(sampler_id: str, seq_id: int, *, max_tokens: int = 1, stop: Any = None, **fields: Any) -> bytes:
    return orjson.dumps(
        {
            "sampling_session_id": sampler_id,
            "seq_id": seq_id,
            "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3, 4]}]},
            "sampling_params": {"max_tokens": max_tokens, "seed": seq_id, "stop": [] if stop is None else stop},
            **fields,
        }
    )


def with_list(fields: dict[str, Any], name: str, element: bytes, size: int) -> bytes:
    """Return a JSON object with a list of one element, repeated until the body has `size` bytes."""
    start = orjson.dumps(fields)[:-1] + b',"' + name.encode() + b'":['
    count = (size - len(start)) // (len(element) + 1)
    return start + (element + b",") * (count - 1) + element + b"]}"


def float32(values: list[float]) -> bytes:
    return np.asarray(values, "<f4").tobytes()


def packed(body: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=3).compress(body)
