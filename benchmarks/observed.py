"""What it costs to watch a server: the page, traces, Prometheus and an experiment tracker together, in pairs of rounds.

    python benchmarks/observed.py [--scenario rl] [--model tiny] [--rounds 20] [--ratio 1.0] [--backend jax|toy]

Two servers of the same settings run a scenario of the comparison in turn, in alternating order. Nobody looks at the
one. The other sends traces (`tinsmith-otel`), and while it works, its run's event stream is read, its lists are
asked for as often as by an open page, `/metrics` every five seconds, and `tinsmith-trackers` copies its curves to
TensorBoard. Whoever looks runs in processes beside the server, as browsers do.

`CPU` is the processor time of all processes of the server for one iteration, `wall` its time. Differences are taken
within pairs; their median counts, and the quartiles are beside it. On a busy machine, trust the CPU time. `stored` is
what an iteration adds to the database, and what of it lasts as long as the run.
"""

import argparse
import json
import os
import shutil
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from comparison.proc import tree_cpu_s
from comparison.scenarios import SCENARIOS, Job
from comparison.shapes import SHAPES
from comparison.workbench import Workbench, done

from tinsmith.loopback import exempt_loopback
from tinsmith.testing.served_process import ServedProcess, served_process
from tinsmith_checkpoints.huggingface.tiny_model import write_tiny_model

KEY: Final = "tml-benchmark-0"  # of the scenario's first tenant
RANK: Final = 8
TOY_TOKENS: Final = 64
LEAST_S: Final = 2.0  # of a round: the clock of processes counts hundredths of a second

SETTLED_S: Final = 12.0  # engines report every five

COLLECTOR: Final = """
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        size = int(self.headers["content-length"])
        self.rfile.read(size)
        print(size, file=open(sys.argv[1], "a"))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""
LOOKING: Final = """
import sys, threading, time, urllib.request
url, key, run = sys.argv[1:]
def get(path):
    return urllib.request.urlopen(urllib.request.Request(url + path, headers={"x-api-key": key}), timeout=120)
def stream():
    while True:
        with get(f"/api/v1/run_events?run={run}") as events:
            for _ in events: pass
def often(paths, every):
    while True:
        for path in paths:
            with get(path) as answer: answer.read()
        time.sleep(every)
threading.Thread(target=stream, daemon=True).start()
threading.Thread(target=often, args=(["/metrics"], 5.0), daemon=True).start()
print("looking", flush=True)
often(["/api/v1/runs?limit=100", "/api/v1/engines"], 2.0)
"""


@dataclass
class Round:
    cpu_s: float
    wall_s: float


@dataclass
class Bench:
    """A server, the client of it, and what was measured."""

    served: ServedProcess
    client: Workbench
    job: Job
    looking: list["subprocess.Popen[str]"] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    iterations: int = 0

    def compiled(self) -> float:
        """Return how many programs the engine has compiled, as it last reported."""
        with urllib.request.urlopen(f"{self.served.url}/metrics") as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("tinsmith_compilations_total"))

    def settle(self) -> None:
        """Run until nothing new is compiled, which an engine does beside its calls."""
        before = -1.0
        while (compiled := self.compiled()) != before:
            before, until = compiled, time.monotonic() + SETTLED_S
            while time.monotonic() < until:
                self.job()

    def round(self) -> None:
        for each in self.looking:
            each.send_signal(signal.SIGCONT)
        cpu_s, began, number = tree_cpu_s(self.served.process.pid), time.perf_counter(), 0
        while time.perf_counter() - began < LEAST_S:
            self.job()
            number += 1
        wall_s = time.perf_counter() - began
        self.rounds.append(Round((tree_cpu_s(self.served.process.pid) - cpu_s) / number, wall_s / number))
        self.iterations += number
        for each in self.looking:
            each.send_signal(signal.SIGSTOP)

    def stored(self) -> tuple[int, int]:
        """Return the size of the database, and what of it lasts, in bytes."""
        with closing(sqlite3.connect(f"file:{self.served.data_dir / 'tinsmith.db'}?mode=ro", uri=True)) as database:
            pages, size = (database.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "page_size"))
            lasting = database.execute("SELECT sum(metric_bytes + rollout_bytes) FROM runs").fetchone()[0]
        return pages * size, lasting or 0


@contextmanager
def program(text: str, *arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a program that says one line once it is ready."""
    command = [sys.executable, "-c", text, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def tracker(url: str, directory: Path) -> Iterator["subprocess.Popen[str]"]:
    """Copy the curves to TensorBoard, as shipped."""
    own = Path(sys.executable).parent / "tinsmith-trackers"
    command = [str(own), "tensorboard", "--dir", str(directory), "--url", url, "--key", KEY]
    command += ["--state", str(directory / "state")]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def bench(directory: Path, settings: dict[str, Any], scenario: str, tokens: int) -> Iterator[Bench]:
    directory.mkdir()
    with served_process(directory, settings) as served:
        client = Workbench(url=served.url, base_model="model", vocab_size=tokens, rank=RANK)
        job = SCENARIOS[scenario].prepare(client)
        for _ in range(SCENARIOS[scenario].warm_ups + 1):
            job()
        yield Bench(served, client, job)
        for service in client.services:
            done(service.close("success"))


def main() -> None:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenario", default="rl", choices=list(SCENARIOS))
    parser.add_argument("--model", default="tiny", choices=list(SHAPES))
    parser.add_argument("--backend", default="jax", choices=["jax", "toy"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--ratio", type=float, default=1.0, help="share of the operations that are traced")
    parser.add_argument("--only", choices=["traces", "looking"], help="watch in one way alone")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    with tempfile.TemporaryDirectory() as made, ExitStack() as stack:
        directory, tokens = Path(made), TOY_TOKENS
        model: dict[str, Any] = {"name": "model", "backend": {"plugin": asked.backend}}
        if asked.backend == "jax":
            write_tiny_model(directory / "model", SHAPES[asked.model])
            model["path"], tokens = str(directory / "model"), SHAPES[asked.model].vocab_size
        collector = stack.enter_context(program(COLLECTOR, str(directory / "sizes")))
        assert collector.stdout is not None
        endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
        traces = {"tracing": {"plugin": "otel", "endpoint": endpoint, "sample_ratio": asked.ratio}}
        watched_settings = {"models": [model], **({} if asked.only == "looking" else traces)}
        plain = stack.enter_context(bench(directory / "plain", {"models": [model]}, asked.scenario, tokens))
        watched = stack.enter_context(bench(directory / "watched", watched_settings, asked.scenario, tokens))
        if asked.only != "traces":
            run_id = done(watched.client.tenant().get_info()).model_id
            watched.looking = [
                stack.enter_context(program(LOOKING, watched.served.url, KEY, run_id)),
                stack.enter_context(tracker(watched.served.url, directory / "tensorboard")),
            ]
            assert watched.looking[0].stdout is not None
            watched.looking[0].stdout.readline()
        for each in (plain, watched):
            each.settle()
        before = plain.stored(), watched.stored()
        for number in range(asked.rounds):
            for each in (plain, watched) if number % 2 else (watched, plain):
                each.round()
        found = report(plain, watched, before)
        if (directory / "sizes").exists():
            sent = [int(line) for line in (directory / "sizes").read_text().split()]
            found["sent_bytes"] = sum(sent) / watched.iterations
            print(f"sent to the collector: {found['sent_bytes']:,.0f} bytes for each iteration")
        if asked.json:
            asked.json.write_text(json.dumps({**vars(asked), "json": None, **found}, indent=1) + "\n")
        shutil.rmtree(directory / "tensorboard", ignore_errors=True)


def report(plain: Bench, watched: Bench, before: Sequence[tuple[int, int]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("cpu_s", "wall_s"):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(plain.rounds, watched.rounds, strict=True)]
        alone_s = statistics.median(a for a, _ in pairs)
        low, middle, high = statistics.quantiles([(b - a) / a for a, b in pairs], n=4)
        found[name] = {"alone_s": alone_s, "more": middle, "quartiles": [low, high]}
        label = {"cpu_s": "CPU", "wall_s": "wall"}[name]
        print(f"{label:5} {1000 * alone_s:8.1f} ms, watched {middle:+.2%} ({low:+.2%} to {high:+.2%})")
    for name, each, (size, lasting) in zip(("plain", "watched"), (plain, watched), before, strict=True):
        now_size, now_lasting = each.stored()
        grown = (now_size - size) / each.iterations, (now_lasting - lasting) / each.iterations
        found[f"stored_{name}"] = grown
        print(f"stored {name}: {grown[0]:,.0f} bytes for each iteration, of which {grown[1]:,.0f} last")
    return found


if __name__ == "__main__":
    main()
