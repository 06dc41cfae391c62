"""One row: an entry point of the cookbook, run as users do, on a server of tiny models under the names it asks for.

What it did is in the server's own figures: a script that swallows its errors and exits with 0 has submitted nothing.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import stand_in_hub

from cookbook import stand_ins
from cookbook.entries import ENTRIES, Entry
from tinsmith.settings import ModelSettings
from tinsmith.testing.harness import running_server
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

CONTEXT: Final = 4096
_VOCAB: Final = 512
BACKENDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "toy": {"vocab_size": _VOCAB},
    "jax": {"max_context_tokens": CONTEXT, "max_lora_rank": 128, "max_models": 8, "warm_up": False},
}
_KEY: Final = "tml-cookbook"
STAND_IN_LOSS: Final = "ppo"
_LIMIT_S: Final = 900.0
_LOOK_S: Final = 0.2
_SUBMITTED: Final = re.compile(r'tinsmith_operations_submitted_total\{base_model="[^"]*",kind="(\w+)"\} (\S+)')
_ERROR: Final = re.compile(
    r"^(?:[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|NotFound|Timeout)\b.*|usage: .*)$", re.M
)
_SHOWN: Final = 300  # characters of what a script said


@dataclass(frozen=True)
class Place:
    """A server, a hub, and a directory, shared by the entry points of one run."""

    url: str
    hub_url: str
    directory: Path
    python: Path
    backend: str


@contextmanager
def served(work_dir: Path, python: Path, backend: str, entries: Sequence[Entry] = ENTRIES) -> Iterator[Place]:
    """Serve every base model that these entries ask for. `python` is the one of the cookbook's environment."""
    shutil.rmtree(work_dir, ignore_errors=True)
    model = work_dir / "model"
    write_tiny_model(model, TinyShape(vocab_size=_VOCAB, num_layers=2, max_context_tokens=CONTEXT))
    stand_ins.write_tokenizer(model / "tokenizer.json", _VOCAB)
    (model / "preprocessor_config.json").write_text(json.dumps(stand_ins.IMAGE_PROCESSOR))
    names = sorted({name for entry in entries for name in entry.models})
    models = [_settings(name, model, backend) for name in names]
    losses = {"stable_reinforce": STAND_IN_LOSS}
    with (
        running_server(work_dir / "data", models=models, losses=losses) as server,
        stand_in_hub.StandInHub.running() as hub,
    ):
        for name in names:
            hub.add(name, model)
        for name in sorted({name for entry in entries for name in entry.data}):
            directory = work_dir / "data_sets" / name
            stand_ins.write_data_set(directory, stand_ins.DATA_SETS[name])
            repository = hub.add(f"datasets/{name}", directory)
            if name in stand_ins.PINNED:
                repository.revisions[stand_ins.PINNED[name]] = repository.revisions["main"]
        stand_ins.write_markets(work_dir / "markets.csv")
        stand_ins.write_conversations(work_dir / "conversations.jsonl")
        pictures = work_dir / "data_sets" / "pictures"
        subprocess.run([python, "-c", stand_ins.PICTURES, pictures], check=True, capture_output=True)
        hub.add(f"datasets/{stand_ins.CALTECH}", pictures)
        (work_dir / "reverse_text.py").write_text(stand_ins.ENVIRONMENT)
        for papers in ("Repos/Self-Distillation/data", "Self-Distillation/data"):
            subprocess.run([python, "-c", stand_ins.PAPERS_DATA, work_dir / papers], check=True, capture_output=True)
        _copy_examples(python, work_dir)
        yield Place(url=server.url, hub_url=hub.url, directory=work_dir, python=python, backend=backend)


def run_entry(entry: Entry, place: Place) -> dict[str, Any]:
    """Return what was seen."""
    started, before = time.monotonic(), _submitted(place.url)
    code, text = _run(entry, place)
    after = _submitted(place.url)
    did = {kind: number - before.get(kind, 0) for kind, number in after.items() if number > before.get(kind, 0)}
    found: dict[str, Any] = {"module": entry.module, "backend": place.backend, "code": code, "submitted": did}
    if code == 0 and did.keys() >= set(entry.does):
        found["outcome"] = "runs with arguments" if entry.argument else "runs"
    elif entry.lacks is not None and re.search(entry.lacks.shown_by, error := _last_error(text)):
        found |= {"outcome": "cannot", "lacks": entry.lacks.what, "said": error}
    else:
        said = _last_error(text) if code else f"it submitted {_counted(did)}"
        found |= {"outcome": "fails", "said": said}
    return found | {"seconds": round(time.monotonic() - started)}


def _settings(name: str, model: Path, backend: str) -> ModelSettings:
    found = {"name": name, "path": model, "backend": {"plugin": backend, **BACKENDS[backend]}}
    return ModelSettings.model_validate(found)


def _copy_examples(python: Path, work_dir: Path) -> None:
    """Copy the cookbook's examples to where its recipes look for them: they expect to start in a checkout of it."""
    program = "import tinker_cookbook; print(tinker_cookbook.__path__[0])"
    asked = subprocess.run([python, "-c", program], check=True, capture_output=True, text=True)
    examples = work_dir / "tinker_cookbook" / "example_data"
    shutil.copytree(Path(asked.stdout.strip()) / "example_data", examples)
    for file in examples.glob("*.txt"):  # a recipe samples for each line
        file.write_text("".join(f"{line}\n" for line in file.read_text(encoding="utf-8").splitlines()[:4]))


def _run(entry: Entry, place: Place) -> tuple[int | None, str]:
    """Return its exit code, None where it did not end in time, and all that it wrote."""
    log = place.directory / f"{entry.module}.log"
    filled = {"dir": str(place.directory), **_last_checkpoint(place.directory / "runs" / entry.after)}
    if "{adapter}" in entry.size:
        filled["adapter"] = str(_downloaded(filled["state"], place))
    arguments = [part.format_map(filled) for part in (*entry.argument, *entry.size)]
    command = [str(place.python), "-m", f"tinker_cookbook.{entry.module}", *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env={**_environment(place), "TINKER_COOKBOOK_RUNS_DIR": str(place.directory / "runs" / entry.module)},
            cwd=place.directory,
            start_new_session=True,
        )
        try:
            assert process.stdin is not None
            process.stdin.write(entry.types.encode())
            process.stdin.close()
            code = _wait(process, log, entry)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return code, log.read_text(encoding="utf-8", errors="replace").replace(str(place.directory), "~")  # its HOME


def _last_checkpoint(runs: Path) -> dict[str, str]:
    """Return the paths of the last checkpoint that these runs saved, if any did."""
    lines = [line for file in runs.rglob("checkpoints.jsonl") for line in file.read_text().splitlines()]
    saved = json.loads(lines[-1]) if lines else {}
    return {"sampler": saved.get("sampler_path", "none"), "state": saved.get("state_path", "none")}


def _downloaded(checkpoint: str, place: Place) -> Path:
    """Download an adapter as a user does, and return where it is."""
    output = place.directory / "adapters"
    command = [str(place.python), "-m", "tinker.cli", "checkpoint", "download", checkpoint, "--output", str(output)]
    subprocess.run(command, check=True, capture_output=True, env=_environment(place), timeout=_LIMIT_S)
    (file,) = output.rglob("adapter_model.safetensors")
    return file.parent


def _wait(process: subprocess.Popen[bytes], log: Path, entry: Entry) -> int | None:
    """Wait until it ends. One that serves is up when it says so, and then asked to end."""
    until = time.monotonic() + _LIMIT_S
    while (code := process.poll()) is None:
        if time.monotonic() > until:
            return None
        if entry.up and re.search(entry.up, log.read_text(encoding="utf-8", errors="replace")):
            process.send_signal(signal.SIGINT)
            process.wait(_LIMIT_S)
            return 0
        time.sleep(_LOOK_S)
    return code


def _environment(place: Place) -> dict[str, str]:
    return {
        "PATH": f"{place.python.parent}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(place.directory),
        "TINKER_API_KEY": _KEY,
        "TINKER_BASE_URL": place.url,
        "HF_ENDPOINT": place.hub_url,
        "HF_HOME": str(place.directory / "hub"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "CUDA_VISIBLE_DEVICES": "",
    }


def _submitted(url: str) -> dict[str, int]:
    """Return how many operations of each kind the server has accepted so far."""
    request = urllib.request.Request(f"{url}/metrics", headers={"X-API-Key": _KEY})  # without a key, it may be old
    with urllib.request.urlopen(request, timeout=60) as answer:
        text = answer.read().decode()
    found: dict[str, int] = {}
    for kind, number in _SUBMITTED.findall(text):
        found[kind] = found.get(kind, 0) + int(float(number))
    return found


def _last_error(text: str) -> str:
    errors = _ERROR.findall(text)
    return errors[-1][:_SHOWN] if errors else text.strip().rpartition("\n")[2][-_SHOWN:]


def _counted(submitted: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {kind}" for kind, number in submitted.items()) or "nothing"
