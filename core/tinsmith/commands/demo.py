"""`tinsmith demo`: trains a tiny model with an ordinary Tinker script on a server of its own, then stops everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Annotated, Final
from urllib.error import HTTPError
from urllib.request import Request

import typer
from rich.console import Console
from rich.text import Text

from tinsmith.commands.options import Backend, base_model_name_of
from tinsmith.errors import ServerError, UserError
from tinsmith.lifeline import Tethered
from tinsmith.loopback import open_url
from tinsmith.processes.data_dir_lock import read_server_url
from tinsmith.processes.logs import console as new_console
from tinsmith.processes.logs import printable
from tinsmith.settings import DataDir
from tinsmith.settings.sources import ENV_PREFIX
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model

_POLL_S: Final = 0.2
_START_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 30.0
_SCRIPT: Final = "pig_latin.py"
_MODEL: Final = "tiny-qwen3"
_IMPORTED: Final = ("tinker", "transformers")  # by the script; the extra `examples` has them
_NEXT: Final = """
Next: read the script, {script},
and run your own against a server that stays: tinsmith serve {model}
(or any Qwen3 or Llama 3 model). tinsmith doctor MODEL says what a larger one needs."""
_EXIT_INTERRUPTED: Final = 130
_INTERRUPTS: Final = (signal.SIGINT, signal.SIGTERM)


def demo(
    directory: Annotated[Path, typer.Option(help="directory for the model, the data and the log")] = Path(".demo"),
    backend: Backend = None,
) -> None:
    """Make a tiny model, serve it, train it with an ordinary Tinker script, sample from it, and stop everything."""
    raise typer.Exit(run_demo(directory, backend=backend))


def run_demo(directory: Path, *, backend: str | None = None) -> int:
    """Return the script's exit code, 130 if interrupted. Raise ServerError if the server does not start."""
    console = new_console()
    script = find_example(_SCRIPT)
    _check_imports()
    for number in _INTERRUPTS:
        signal.signal(number, _interrupt)
    try:
        with served_tiny_model(console, directory, backend=backend) as (url, base_model):
            code = _run_script(script, url, base_model)
    except KeyboardInterrupt:
        console.print("\ninterrupted; everything is stopped")
        return _EXIT_INTERRUPTED
    if code == 0:
        next_steps = _NEXT.format(script=script, model=directory / _MODEL)
        console.print(next_steps, highlight=False, soft_wrap=True)
    return code


@contextmanager
def served_tiny_model(console: Console, directory: Path, *, backend: str | None = None) -> Iterator[tuple[str, str]]:
    """Make a tiny model if there is none, serve it, yield URL and base model once it is ready, stop the server."""
    directory.mkdir(parents=True, exist_ok=True)
    model = directory / _MODEL
    if not (model / "config.json").is_file():
        num_parameters = write_tiny_model(model, TinyShape(), overwrite=True)
        console.print(f"wrote a random Qwen3 with {num_parameters:,} parameters to {model}")
    with _server(model, directory, backend) as (server, log):
        url = _wait_until_ready(console, server, DataDir.at(directory / "data"), log)
        console.print(f"server ready at {url}, log: {log}\n")
        yield url, base_model_name_of(str(model))


def find_example(name: str) -> Path:
    """Return the path of an example script, next to the sources or in the installed package."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package.parents[1] / "examples", package / "examples"):
        if (folder / name).is_file():
            return folder / name
    msg = f"the example {name!r} is neither in the package nor beside its sources; reinstall tinsmith"
    raise UserError(msg)


def _check_imports() -> None:
    missing = [name for name in _IMPORTED if find_spec(name) is None]
    if missing:
        msg = f"the demo's script imports {', '.join(missing)}, not installed here; pip install 'tinsmith[examples]'"
        raise UserError(msg)


@contextmanager
def _server(model: Path, directory: Path, backend: str | None) -> Iterator[tuple[Tethered, Path]]:
    log = directory / "server.log"
    command = [sys.executable, "-m", "tinsmith", "serve", "--base-model", str(model), "--port", "0"]
    command += ["--data-dir", str(directory / "data"), *(["--backend", backend] if backend else [])]
    with log.open("wb") as output:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
        environ = {
            **kept,
            "PYTHONSAFEPATH": "1",  # nothing is imported from the current directory
            "CUDA_VISIBLE_DEVICES": "",  # a GPU would be refused if the framework is built for CPUs; no demo needs one
        }
        server: Tethered | None = None
        try:
            with _interrupted_afterwards():
                server = _start(command, output, environ)
            yield server, log
        finally:
            if server is not None:
                _stop(server)


def _start(command: list[str], output: IO[bytes], environ: Mapping[str, str]) -> Tethered:
    """Start a session of its own, so that Ctrl-C reaches only the demo, which then stops the server in order."""
    return Tethered(command, stdout=output, stderr=output, env=environ)


def _stop(server: Tethered) -> None:
    if server.poll() is not None:
        return
    server.terminate()
    try:
        server.wait(_STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        server.terminate()  # the second signal: the server kills its engines and exits at once
        try:
            server.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            server.end()


def _wait_until_ready(console: Console, server: Tethered, data_dir: DataDir, log: Path) -> str:
    """Return the server's URL once every engine is ready. Show the progress meanwhile."""
    deadline = time.monotonic() + _START_TIMEOUT_S
    with console.status("starting the server") as status:
        while time.monotonic() < deadline:
            if server.poll() is not None:
                msg = f"the server ended with exit code {server.returncode}; the end of its log {log}:\n{_tail(log)}"
                raise ServerError(msg)
            url = read_server_url(data_dir, pid=server.pid)
            if url is not None:
                ready, told = _readiness(url)
                if ready:
                    return url
                status.update(Text(printable(told)))
            time.sleep(_POLL_S)
    msg = f"the server was not ready after {_START_TIMEOUT_S:.0f} s; the end of its log {log}:\n{_tail(log)}"
    raise ServerError(msg)


def _readiness(url: str) -> tuple[bool, str]:
    try:
        open_url(Request(f"{url}/readyz"), timeout_s=5).close()
    except HTTPError as error:
        engines = json.load(error).get("engines", {}).values()
        told = "; ".join(f"{engine['state']} {engine.get('detail') or ''}".strip() for engine in engines)
        if any(engine["state"] == "failed" for engine in engines):
            msg = f"the model could not be loaded: {told}"
            raise ServerError(msg) from error
        return False, told
    except OSError:
        return False, "starting the server"
    return True, "ready"


def _run_script(script: Path, url: str, base_model: str) -> int:
    command = [sys.executable, str(script), "--base-url", url, "--base-model", base_model]
    environ = {
        **os.environ,
        "TINKER_API_KEY": "tml-demo",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",  # the SDK's tokenizer needs no PyTorch
    }
    process: Tethered | None = None
    try:
        with _interrupted_afterwards():
            process = Tethered(command, env=environ)
        return process.wait()
    except KeyboardInterrupt:
        if process is not None:
            process.terminate()
            process.wait(_STOP_TIMEOUT_S)
        raise


def _tail(log: Path, *, num_lines: int = 15) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-num_lines:])


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Defer SIGINT and SIGTERM to the end of the block, because an interrupted Popen loses the process it has forked.

    The handlers are replaced; the signals are not blocked, because a child would inherit the mask and never get them.
    """
    came: list[int] = []
    handlers = {number: signal.signal(number, lambda number, _: came.append(number)) for number in _INTERRUPTS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if came:
        raise KeyboardInterrupt


def _interrupt(number: int, frame: object) -> None:
    """Make SIGTERM stop the demo like Ctrl-C, and Ctrl-C work even if a shell started the demo in the background."""
    del number, frame
    raise KeyboardInterrupt
