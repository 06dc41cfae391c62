"""Ask a backend or sampler about its devices and a model, in a process of its own, since the framework may crash.

python -m tinsmith.commands.doctor.probe KIND NAME DESCRIPTOR    in the descriptor: {"options": ..., "model_path": ...}
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, Literal

from tinsmith.backend import Device
from tinsmith.errors import ServerError, TinsmithError
from tinsmith.lifeline import run_tethered
from tinsmith.plugins.loading import Plugins
from tinsmith.settings import child_environment
from tinsmith.settings.environment import HUB_TOKENS
from tinsmith_checkpoints.huggingface.fields import announced

Kind = Literal["backends", "samplers"]

_LIMIT_S: Final = 120.0
_MARK: Final = "tinsmith-probe: "  # frameworks print, too


@dataclass(frozen=True, slots=True)
class Answer:
    devices: list[Device]  # that the backend or sampler would use
    announced: list[str]  # of the model's files


def probe(kind: Kind, name: str, options: Mapping[str, Any], model_path: Path | None) -> Answer:
    """Return the answer of a backend or sampler. Raise ServerError with its message if it fails."""
    asked = json.dumps({"options": dict(options), "model_path": None if model_path is None else str(model_path)})
    command = [sys.executable, "-m", "tinsmith.commands.doctor.probe", kind, name]
    try:
        with TemporaryFile() as question:  # arguments are shown to other users, and options may hold a secret
            question.write(asked.encode())
            question.seek(0)
            fd = question.fileno()
            done = run_tethered(
                [*command, str(fd)], env=child_environment(keep=HUB_TOKENS), timeout_s=_LIMIT_S, pass_fds=[fd]
            )
    except subprocess.TimeoutExpired as error:
        msg = f"the {kind[:-1]} {name!r} does not answer within {_LIMIT_S:.0f} s"
        raise ServerError(msg) from error
    answers = [
        line.removeprefix(_MARK) for line in done.stdout.decode(errors="replace").splitlines() if line.startswith(_MARK)
    ]
    if not answers:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        msg = f"the {kind[:-1]} {name!r} ended with exit code {done.returncode}: {last}"
        raise ServerError(msg)
    answer = json.loads(answers[-1])
    if "error" in answer:
        raise ServerError(answer["error"])
    return Answer([Device(**device) for device in answer["devices"]], answer["announced"])


def main() -> None:
    with open(int(sys.argv[3])) as question:  # noqa: PTH123 - a descriptor
        asked = json.load(question)
    plugins = Plugins.load()
    offers = plugins.backends if sys.argv[1] == "backends" else plugins.samplers
    spec = offers.get(sys.argv[2])
    assert spec.diagnose is not None
    path = asked["model_path"]
    try:
        with announced() as said:
            devices = spec.diagnose(spec.config.model_validate(asked["options"]), None if path is None else Path(path))
        answer: dict[str, Any] = {
            "devices": [{"name": device.name, "memory_bytes": device.memory_bytes} for device in devices],
            "announced": said,
        }
    except TinsmithError as error:
        answer = {"error": str(error)}
    print(f"{_MARK}{json.dumps(answer)}")  # noqa: T201 - to the process that asks


if __name__ == "__main__":
    main()
