"""Round trips of one client: how much of them is the SDK's, and what others cost who do nothing.

    python benchmarks/round_trips.py [--sdk DIRECTORY] [--model tiny] [--rounds 15]

Each figure of tinsmith stands beside another one, in alternating rounds:

- *answered at once*: by a server that returns copies of tinsmith's first answers (`comparison/start_at_once.py`). No
  server in Python can go much below that on this machine.
- *in company*: by a tinsmith with 32 models that nobody trains, and 950 more sessions, which send no heartbeats.
- *with heartbeats*: by that tinsmith while these sessions send theirs, 95 a second; beside the same one without. They
  come from the same two cores, so sending them takes its share too.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Final

import httpx
import tinker
from comparison.heartbeats import Heartbeats, ServerWithHeartbeats
from comparison.rounds import Effort, measure
from comparison.servers import Server, Setup
from comparison.shapes import SHAPES
from comparison.workbench import done

from tinsmith.loopback import exempt_loopback
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

_TRIPS: Final = ("optim-step", "weight-sync")
_WORK: Final = ("optim-step", "sft")
_IDLE_MODELS: Final = 32
_SESSIONS: Final = 950
_SETTLE_S: Final = 600.0
_RANK: Final = 8
_KEY_OF_MANY: Final = "tml-many"


def main() -> int:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sdk", type=Path, help="directory with the Tinker SDK of the clients")
    parser.add_argument("--model", default="tiny", choices=list(SHAPES))
    parser.add_argument("--backend", default="jax")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--allow-load", action="store_true", help="keep rounds that other processes disturbed")
    parser.add_argument("--work-dir", type=Path, help="model, data and caches; kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        setup = _setup(options, (options.work_dir or Path(made)).resolve() / options.model)
        with Server.started(["tinsmith", "--backend", options.backend], setup) as ours:
            for scenario in dict.fromkeys((*_TRIPS, *_WORK)):
                ours.ask("prepare", scenario)
            _settle(ours)
            _beside_the_least(ours, setup, options)
            _beside_a_crowd(ours, setup, options)
    return 0


def _setup(options: argparse.Namespace, work_dir: Path) -> Setup:
    shape = SHAPES[options.model]
    write_tiny_model(work_dir / "model", shape, overwrite=True)
    return Setup(
        model=work_dir / "model",
        vocab_size=shape.vocab_size,
        work_dir=work_dir,
        max_models=1 + _IDLE_MODELS,
        rank=_RANK,
        sdk=options.sdk.resolve() if options.sdk else None,
    )


def _beside_the_least(ours: Server, setup: Setup, options: argparse.Namespace) -> None:
    for scenario in _TRIPS:  # each with a model of its own
        script = ["at_once", "--url", ours.url, "--base-model", ours.base_model]
        with Server.started(script, setup) as least:
            least.name = "answered at once"
            _tell(scenario, [ours, least], options)


def _beside_a_crowd(ours: Server, setup: Setup, options: argparse.Namespace) -> None:
    with Server.started(["tinsmith", "--backend", options.backend], setup.beside("crowded")) as crowded:
        crowded.name = "in company"
        models = _idle_models(crowded)
        for scenario in _WORK:
            crowded.ask("prepare", scenario)
        _settle(crowded)
        session_ids = _open_sessions(crowded)
        for scenario in _WORK:
            _tell(scenario, [ours, crowded], options)
        _beside_silence(crowded, session_ids, options)
        del models


def _beside_silence(crowded: Server, session_ids: Sequence[str], options: argparse.Namespace) -> None:
    """Compare a server with itself. Its processes are counted by its client alone, as one of it is always idle."""
    silent = replace(crowded, pid=None)
    heartbeats = Heartbeats(crowded.url, _KEY_OF_MANY, session_ids)
    beating = ServerWithHeartbeats.of(silent, heartbeats, name="with heartbeats")
    for scenario in _WORK:
        _tell(scenario, [silent, beating], options)
    print(f"heartbeats: {heartbeats.sent / heartbeats.seconds:.0f} per second", flush=True)


def _settle(server: Server) -> None:
    if server.settle(_SETTLE_S) >= _SETTLE_S:
        raise SystemExit(f"{server.name} still compiled after {_SETTLE_S:.0f} s")


def _idle_models(server: Server) -> Sequence[object]:
    """Return what keeps them."""
    service = tinker.ServiceClient(base_url=server.url, api_key="tml-idle")
    create = service.create_lora_training_client
    models = [done(create(base_model=server.base_model, rank=_RANK, seed=seed)) for seed in range(_IDLE_MODELS)]
    return [service, *models]


def _open_sessions(server: Server) -> list[str]:
    """Open sessions that live for a quarter of an hour without a heartbeat. Return their ids."""
    session_ids = []
    with httpx.Client(base_url=server.url, headers={"X-API-Key": _KEY_OF_MANY}) as client:
        for _ in range(_SESSIONS):
            body: dict[str, object] = {"tags": [], "user_metadata": None, "sdk_version": tinker.__version__}
            answer = client.post("/api/v1/create_session", json=body).raise_for_status()
            session_ids.append(answer.json()["session_id"])
    return session_ids


def _tell(scenario: str, servers: Sequence[Server], options: argparse.Namespace) -> None:
    effort = Effort(rounds=options.rounds, fewest=options.rounds, limit_s=0.0)
    result = measure(scenario, servers, effort, allow_load=options.allow_load)
    if result.errors or not result.values:
        raise SystemExit(f"{result.figure}: {result.errors or 'other processes disturbed every round'}")
    ours, other = servers
    first, second = result.values[ours.name], result.values[other.name]
    ratio = median(theirs / mine for mine, theirs in zip(first, second, strict=True))
    print(
        f"{result.figure}, SDK {ours.sdk}: {ours.name} {median(first):.3g} {result.unit}; {other.name} "
        f"{median(second):.3g}, x{ratio:.2f} of it ({len(first)} rounds, {result.thrown_away} thrown away)",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
