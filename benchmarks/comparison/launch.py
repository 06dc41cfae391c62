"""How a script of this package runs a server: ready, one line of JSON; end of its input, the server stops.

The scripts `start_*.py` take the same options and tell in that line where their server is and how it was configured.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

_READY_S: Final = 600.0
_STOP_S: Final = 30.0
_POLL_S: Final = 0.1


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every script is told."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--model", type=Path, required=True, help="directory of the base model")
    made.add_argument("--work-dir", type=Path, required=True, help="for data, caches and the log; kept between runs")
    made.add_argument("--max-models", type=int, required=True, help="in training at a time")
    made.add_argument("--rank", type=int, required=True, help="of all adapters")
    return made


def run(
    command: Sequence[str],
    *,
    log: Path,
    environ: Mapping[str, str],
    url: Callable[[int], str | None],
    description: Mapping[str, object],
) -> None:
    """Run the server until the input ends. `url` returns where a server with this process id is, once it is ready."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environ, start_new_session=True)
        try:
            print(json.dumps({"url": _wait_for(process, url, log), "pid": process.pid, **description}), flush=True)
            sys.stdin.read()
        finally:
            _stop(process)


def _wait_for(process: subprocess.Popen[bytes], url: Callable[[int], str | None], log: Path) -> str:
    until = time.monotonic() + _READY_S
    while time.monotonic() < until and process.poll() is None:
        found = url(process.pid)
        if found is not None:
            return found
        time.sleep(_POLL_S)
    msg = f"the server did not get ready; its log is {log}"
    raise SystemExit(msg)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        _kill_group(process.pid)
        process.wait()


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:  # nothing is left
        return


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
