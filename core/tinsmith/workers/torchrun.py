"""The launcher `torchrun`: torch.distributed's elastic agent, in a process of its own.

The agents of several machines find each other, so that all start and end together. Workers end when the engine does,
and their agent with them.
"""

import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Final

from tinsmith.workers.launching import WITH_PARENT, Launch

_STOP_S: Final = 5.0

# Busy machines send heartbeats late. Deaths are detected elsewhere: by the workers' connections to the engine.
_PATIENCE: Final = "join_timeout=900,keep_alive_interval=5,keep_alive_max_attempt=120,heartbeat_timeout=60"


class ElasticAgent:
    def __init__(self, launch: Launch) -> None:
        self.num_workers: int | None = launch.num_workers
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **launch.environment, WITH_PARENT: "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *_options(launch), "-m", "tinsmith.workers"]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)

    def ended(self) -> str | None:
        code = self._process.poll()
        return None if code is None else f"torchrun left with {code}"

    def close(self) -> None:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        self._process.kill()
        self._process.wait()


def _options(launch: Launch) -> Iterator[str]:
    config = launch.config
    yield f"--nnodes={config.nnodes}"
    yield f"--nproc-per-node={launch.per_node}"
    yield "--rdzv-backend=c10d"
    yield f"--rdzv-endpoint={config.rdzv_endpoint}"
    yield f"--rdzv-conf={_PATIENCE}"
    yield "--max-restarts=0"
    yield "--monitor-interval=0.1"
    yield f"--log-dir={launch.directory}"
    if config.nnodes == 1:
        yield "--local-addr=127.0.0.1"  # a host name may resolve to an interface that does not exist
        yield f"--rdzv-id={secrets.token_hex(8)}"
    else:
        yield "--rdzv-id=tinsmith"
