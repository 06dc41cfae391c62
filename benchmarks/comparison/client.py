"""The client of one server: a process that is told which scenario to prepare or to measure, and answers in JSON.

    python -m comparison.client --url URL --base-model NAME --vocab-size N --rank N [--pid PID]

Each line of the input is `prepare NAME` or `measure NAME`, each line of the output its answer. A process of its own,
because every server gets the newest SDK that it can serve.
"""

import argparse
import json
import os
import queue
import sys
import threading
import time
import warnings
from importlib.metadata import version
from typing import TextIO

from comparison.proc import Usage, tree_peak_mib
from comparison.scenarios import SCENARIOS, Job, Scenario
from comparison.workbench import Workbench


class Client:
    def __init__(self, bench: Workbench, server_pid: int | None) -> None:
        self._bench = bench
        self._server_pid = server_pid
        self._jobs: dict[str, Job] = {}

    def answer(self, command: str, name: str) -> dict[str, object]:
        scenario = SCENARIOS[name]
        try:
            return self._prepare(name, scenario) if command == "prepare" else self._measure(name, scenario)
        except Exception as error:  # noqa: BLE001  # a server that cannot do this is a result
            return {"error": f"{type(error).__name__}: {error}"[:300]}

    def _prepare(self, name: str, scenario: Scenario) -> dict[str, object]:
        """Set it up, and do it until it is warm. Return what the first time took."""
        job = self._jobs[name] = scenario.prepare(self._bench)
        times_s = []
        for _ in range(scenario.warm_ups):
            started = time.perf_counter()
            job()
            times_s.append(time.perf_counter() - started)
        return {"warm_up_s": times_s, "sdk": version("tinker")}

    def _measure(self, name: str, scenario: Scenario) -> dict[str, object]:
        before = Usage.now(self._server_pid)
        started = time.perf_counter()
        work = self._jobs[name]()
        seconds = time.perf_counter() - started
        used = Usage.now(self._server_pid).since(before)
        return {
            "value": scenario.value(work, seconds),
            "seconds": seconds,
            "server_cpu_s": used.server_s,
            "client_cpu_s": used.client_s,
            "others_cpu_s": used.others_s,
            "peak_mib": tree_peak_mib(self._server_pid) if self._server_pid else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--base-model", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--pid", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of the SDK, about its dependencies
    answers = _take_stdout()
    bench = Workbench(url=options.url, base_model=options.base_model, vocab_size=options.vocab_size, rank=options.rank)
    client = Client(bench, options.pid)
    commands: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(commands,), daemon=True).start()
    while True:
        print(json.dumps(client.answer(*commands.get().split())), file=answers, flush=True)


def _read(commands: queue.Queue[str]) -> None:
    """Pass on what is asked. At the end of the input, end at once, even in a call that the SDK repeats for ever."""
    for line in sys.stdin:
        commands.put(line)
    os._exit(0)


def _take_stdout() -> TextIO:
    """Return the standard output for answers alone: whatever else is printed goes where errors go."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
