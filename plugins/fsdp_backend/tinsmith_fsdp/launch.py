r"""Start this machine's ranks with torch.distributed's elastic agent, and end with the process that asked for them.

The backend runs this module on its own machine. Run it by hand on every other machine of a job:

    TINSMITH_FSDP_KEY=... python -m tinsmith_fsdp.launch --nnodes 2 --nproc-per-node 8 \
        --rdzv-endpoint head:29400 --rdzv-id fsdp --control head:29401 --again

If one rank dies, all end. The engine then starts them again, and `--again` lets this machine rejoin each time.
"""

import argparse
import logging
import os
import sys
import tempfile
import threading
import time
from contextlib import ExitStack

import torch
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from tinsmith_fsdp.environment import CONTROL, DEVICE

_PAUSE_S = 2.0  # between two attempts to join
# Busy machines send heartbeats late. Deaths are detected elsewhere: by the ranks' connections to the engine.
_PATIENCE = {"join_timeout": 900, "keep_alive_interval": 5, "keep_alive_max_attempt": 120, "heartbeat_timeout": 60}


def main() -> int:
    options = _options()
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)  # the engine reports what happened
    if options.control:
        os.environ[CONTROL] = f"tcp:{options.control}"
    if options.with_parent:
        threading.Thread(target=_end_with_parent, name="parent-watch", daemon=True).start()
    while True:
        code = _run(options)
        if not options.again:
            return code
        time.sleep(_PAUSE_S)


def _run(options: argparse.Namespace) -> int:
    local = options.nnodes == 1
    if local and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host name may resolve to an interface that does not exist
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with ExitStack() as stack:
        logs = options.logs or stack.enter_context(tempfile.TemporaryDirectory(prefix="tinsmith-fsdp-"))
        config = LaunchConfig(
            min_nodes=options.nnodes,
            max_nodes=options.nnodes,
            nproc_per_node=options.nproc_per_node or _default_ranks(),
            run_id=options.rdzv_id,
            rdzv_backend="c10d",
            rdzv_endpoint=options.rdzv_endpoint,
            rdzv_configs=_PATIENCE,
            max_restarts=0,
            monitor_interval=0.1,
            local_addr="127.0.0.1" if local else None,
            logs_specs=DefaultLogsSpecs(log_dir=logs),
        )
        try:
            elastic_launch(config, sys.executable)("-m", "tinsmith_fsdp.rank")
        except ChildFailedError as error:
            print(f"tinsmith-fsdp: {len(error.failures)} ranks failed", file=sys.stderr)  # noqa: T201  (a program)
            return 1
    return 0


def _default_ranks() -> int:
    return 1 if os.environ.get(DEVICE) == "cpu" else max(1, torch.cuda.device_count())


def _end_with_parent() -> None:
    while os.read(0, 1024):
        pass
    os._exit(1)  # the ranks end the same way: see rank.py


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tinsmith_fsdp.launch", description="Start this machine's FSDP ranks.")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--nproc-per-node", type=int, default=0, help="0: one per GPU")
    parser.add_argument("--rdzv-endpoint", default="localhost:0")
    parser.add_argument("--rdzv-id", default="fsdp")
    parser.add_argument("--control", help="host:port of the engine; unset: from the environment")
    parser.add_argument("--logs", help="directory for the agent's files; unset: a temporary one")
    parser.add_argument("--with-parent", action="store_true", help="exit when standard input closes")
    parser.add_argument("--again", action="store_true", help="rejoin whenever the ranks end, until killed")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
