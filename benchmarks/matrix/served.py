"""One row: a tiny model of a class, served by a pair of trainer and sampler, used through the SDK with its defaults.

Whatever a server refuses is a result: where it was refused, and its words.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import tinker
import yaml

from tinsmith.lifeline import Tethered
from tinsmith.processes.data_dir_lock import read_server_url
from tinsmith.settings import DataDir
from tinsmith.settings.sources import ENV_PREFIX
from tinsmith.testing.sdk_data import datum, logprobs, step
from tinsmith_checkpoints.huggingface import TINY_CLASSES, tiny_config
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

CONTEXT: Final = 512
PACKED_TOKENS: Final = 1024  # of one pass
SAMPLES: Final = 64
_DRAWN: Final = 16  # tokens of each
_STEPS: Final = 5
_VOCAB: Final = 512
_PACKED: Final = (CONTEXT, 200, 150, 100, 61, 1)  # lengths of the sequences of one pass
_WAIT_S: Final = 600.0
_READY_S: Final = 900.0
_TARGETS: Final = ("attn", "mlp", "unembed")
_MODEL: Final = "tiny"

_COMMON: Final = {"max_context_tokens": CONTEXT}
TRAINERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "toy": {},
    "jax": {**_COMMON, "max_batch_tokens": PACKED_TOKENS, "warm_up": False},
    "fsdp": {**_COMMON, "max_batch_tokens": PACKED_TOKENS, "nproc_per_node": 1},
    "megatron": {**_COMMON, "max_batch_tokens": PACKED_TOKENS, "nproc_per_node": 1, "device": "cpu"},
}
SAMPLERS: Final[Mapping[str, Mapping[str, Any]]] = {
    "jax": {**_COMMON, "warm_up": False},
    "vllm": {"max_model_len": CONTEXT, "max_num_seqs": SAMPLES, "kv_cache_bytes": 32 << 20},
}


class RefusedError(Exception):
    """A server, or what it starts, refuses."""


def run_row(class_name: str, settings: Mapping[str, Any], pair: str, work_dir: Path) -> dict[str, Any]:
    """Serve the model with the pair `TRAINER+SAMPLER`, and return what was seen."""
    started = time.monotonic()
    found: dict[str, Any] = {"class": class_name, "settings": dict(settings), "pair": pair}
    stage = ["start"]
    try:
        found["experts"] = _write_model(work_dir / "model", class_name, settings)
        data_dir = _fresh(DataDir.at(work_dir / "data"))
        with _server(work_dir, data_dir, pair) as url:
            _use(url, data_dir, found, stage)
        found["outcome"] = "passes"
    except RefusedError as error:
        found |= {"outcome": "refused" if stage[0] in {"start", "create"} else "fails", "text": str(error)}
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this row's result
        found |= {"outcome": "fails", "text": f"{type(error).__name__}: {error}"}
    found |= {"stage": stage[0], "seconds": round(time.monotonic() - started)}
    return found


def _write_model(directory: Path, class_name: str, settings: Mapping[str, Any]) -> int:
    """Write it anew. Return the number of its experts. Of a class that nobody knows, write its name alone."""
    shutil.rmtree(directory, ignore_errors=True)
    if class_name == "toy":
        return 0
    own = dict(settings)
    if class_name in TINY_CLASSES:
        tied = bool(own.pop("tie_word_embeddings", False))
        shape = TinyShape(
            family=class_name, vocab_size=_VOCAB, num_layers=2, tied=tied, max_context_tokens=CONTEXT, settings=own
        )
        write_tiny_model(directory, shape)
        return shape.num_experts if TINY_CLASSES[class_name].experts else 0
    directory.mkdir(parents=True)
    config: dict[str, Any] = {}
    with suppress(Exception):  # transformers has no such class, or cannot make a tiny one
        config = tiny_config(class_name).to_dict()
    (directory / "config.json").write_text(json.dumps({**config, "architectures": [class_name]}, default=str))
    return 0


@contextmanager
def _server(work_dir: Path, data_dir: DataDir, pair: str) -> Iterator[str]:
    """Run `tinsmith serve` until the block ends; yield its URL when every engine is ready."""
    log = work_dir / "server.log"
    (work_dir / "tinsmith.yaml").write_text(yaml.safe_dump(_settings(work_dir, data_dir, pair)))
    command = [sys.executable, "-m", "tinsmith", "serve", "--config", str(work_dir / "tinsmith.yaml")]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    with log.open("wb") as output, Tethered(command, stdout=output, stderr=output, env=environ) as process:
        yield _wait_until_ready(process, data_dir, log)
        process.terminate()
        process.wait(_WAIT_S)


def _settings(work_dir: Path, data_dir: DataDir, pair: str) -> dict[str, Any]:
    trainer, sampler = pair.split("+")
    model: dict[str, Any] = {"name": _MODEL, "backend": {"plugin": trainer, **TRAINERS[trainer]}}
    if trainer != "toy":
        model["path"] = str(work_dir / "model")
    if sampler != trainer:
        model["sampler"] = {"plugin": sampler, **SAMPLERS[sampler]}
    return {"server": {"port": 0, "data_dir": str(data_dir.root)}, "models": [model]}


def _fresh(data_dir: DataDir) -> DataDir:
    """Remove what an earlier run left, but for compiled programs: models of it would be rebuilt first."""
    for path in set(data_dir.root.glob("*")) - {data_dir.root / "cache"}:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    return data_dir


def _wait_until_ready(process: Tethered, data_dir: DataDir, log: Path) -> str:
    until = time.monotonic() + _READY_S
    while process.poll() is None:
        url = read_server_url(data_dir, pid=process.pid)
        engine = _engine(url) if url else {}
        if engine.get("state") == "ready" and "sampler" not in engine:
            assert url is not None
            return url
        if engine.get("state") == "failed":
            raise RefusedError(_cause(engine["detail"]))
        if engine.get("state") == "restarting":
            raise RuntimeError(engine["detail"])
        if time.monotonic() > until:
            msg = f"the server was not ready after {_READY_S:.0f} s: {engine}"
            raise RuntimeError(msg)
        time.sleep(0.2)
    raise RefusedError(log.read_text(errors="replace").strip().splitlines()[-1])


def _cause(detail: str) -> str:
    """Return what a failed engine said, without what the server adds for its operator."""
    found = re.search(r"\((?:backend \w+ of '\w+': )?(.*); reference \w+ in the operator's log\)", detail)
    return found.group(1) if found else detail


def _engine(url: str) -> dict[str, Any]:
    """Return what the server says of its one engine; nothing while it does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=30) as answer:
            text = answer.read()
    except urllib.error.HTTPError as error:
        text = error.read()
    except OSError:
        return {}
    engine: dict[str, Any] = json.loads(text)["engines"][_MODEL]
    return engine


def _use(url: str, data_dir: DataDir, found: dict[str, Any], stage: list[str]) -> None:
    service = tinker.ServiceClient(base_url=url, api_key="tml-matrix")
    try:
        stage[0] = "create"
        client = _told(lambda: service.create_lora_training_client(base_model=_MODEL).result(timeout=_WAIT_S))
        stage[0] = "train"
        data = [datum(_tokens(length, seed=length)) for length in (90, 41, 7)]
        losses = [_told(lambda: step(client, data, learning_rate=5e-3)).metrics["loss:sum"] for _ in range(_STEPS)]
        found["losses"] = [losses[0], losses[-1]]
        stage[0] = "save"
        path = _told(lambda: client.save_weights_for_sampler("kept").result(timeout=_WAIT_S)).path
        _told(lambda: client.save_state("state").result(timeout=_WAIT_S))
        stage[0] = "sample"
        found["gap"] = _sampled(service, client, path)
        stage[0] = "compare"
        _told(lambda: client.save_weights_for_sampler("again").result(timeout=_WAIT_S))
        found["gate"] = _verdict(data_dir, client)
        stage[0] = "pack"
        found |= {"longest": max(_PACKED), "packed_tokens": sum(_PACKED), "isolation": _leak(client)}
        stage[0] = "targets"
        found["targets"] = {target: _tried(service, target) for target in _TARGETS}
        stage[0] = "full"
        found["full"] = _tried(service, None)
        stage[0] = "end"
    finally:
        service.close("success").result(timeout=_WAIT_S)


def _told(ask: Callable[[], Any]) -> Any:
    """Return an answer. A refusal of the SDK's request is its text, without what the SDK puts around it."""
    try:
        return ask()
    except tinker.APIStatusError as error:
        body = error.body
        raise RefusedError(str(body["detail"] if isinstance(body, dict) and "detail" in body else error)) from error
    except (tinker.TinkerError, ValueError) as error:
        raise RefusedError(str(error)) from error


def _tokens(length: int, *, seed: int) -> list[int]:
    numbers: list[int] = np.random.default_rng(seed).integers(5, 60, length + 1).tolist()
    return numbers


def _sampled(service: tinker.ServiceClient, client: tinker.TrainingClient, path: str) -> float:
    """Return how far apart sampler and trainer are, in nats, of any token of the samples."""
    sampler = _told(lambda: service.create_sampling_client(model_path=path).result(timeout=_WAIT_S))
    prompt, params = _tokens(20, seed=1), tinker.SamplingParams(max_tokens=_DRAWN, seed=3, stop=[])
    asked = tinker.ModelInput.from_ints(prompt)
    drawn = _told(lambda: sampler.sample(asked, SAMPLES, params).result(timeout=_WAIT_S)).sequences
    assert len(drawn) == SAMPLES
    whole = [datum([*prompt, *each.tokens]) for each in drawn]
    trained = logprobs(_told(lambda: client.forward(whole, "cross_entropy").result(timeout=_WAIT_S)))
    pairs = zip(drawn, trained, strict=True)
    return float(max(np.abs(np.subtract(one.logprobs, other[-len(one.tokens) :])).max() for one, other in pairs))


def _leak(client: tinker.TrainingClient) -> float:
    """Return how much the logprobs of a sequence change, at most, if others are packed beside it."""
    data = [datum(_tokens(length, seed=length)) for length in _PACKED]
    together = _scored(client, data)
    alone = [_scored(client, [each])[0] for each in data]
    return float(max(np.abs(np.subtract(a, b)).max() for a, b in zip(together, alone, strict=True)))


def _scored(client: tinker.TrainingClient, data: Sequence[tinker.Datum]) -> list[list[float]]:
    passed = _told(lambda: client.forward(list(data), "cross_entropy").result(timeout=_WAIT_S))
    return logprobs(passed)


def _tried(service: tinker.ServiceClient, target: str | None) -> str:
    """Create a model that trains this part alone, None: all weights. Return "yes", or why it is refused."""
    flags: dict[str, Any] = {f"train_{each}": each == target for each in _TARGETS} if target else {"rank": 0}
    try:
        client = _told(lambda: service.create_lora_training_client(_MODEL, **flags).result(timeout=_WAIT_S))
    except RefusedError as error:
        return str(error)
    _told(lambda: step(client, [datum(_tokens(20, seed=2))], learning_rate=5e-3))
    sampler = _told(lambda: client.save_weights_and_get_sampling_client().result(timeout=_WAIT_S))
    asked, params = tinker.ModelInput.from_ints(_tokens(5, seed=3)), tinker.SamplingParams(max_tokens=2)
    _told(lambda: sampler.sample(asked, 1, params).result(timeout=_WAIT_S))
    return "yes"


def _verdict(data_dir: DataDir, client: tinker.TrainingClient) -> dict[str, Any]:
    """Return what the consistency gate found of the last save: at the first, the sampler may still have compiled."""
    command = [sys.executable, "-m", "tinsmith", "runs", "show", client.get_info().model_id, "--json"]
    command += ["--data-dir", str(data_dir.root)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    save = [each for each in json.loads(done.stdout)["operations"] if each["kind"] == "save_for_sampler"][-1]
    if "max_difference" not in save["metrics"]:
        raise RuntimeError(save["notes"][-1])
    return {"verdict": save["notes"][-1], "max_difference": save["metrics"]["max_difference"]}
