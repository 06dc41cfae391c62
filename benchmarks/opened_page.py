"""Measure how long the page takes to open in Chromium, and what it costs the server while it is open.

    python benchmarks/opened_page.py [--runs 1000] [--steps 10000] [--seconds 20] [--repeats 5]

A served toy model, as shipped. One run is trained by the SDK; copies of its rows make the others, of which one has
metrics of every step. `opens`: from the navigation to the list or the charts, the median of the repeats. `costs`: CPU
time of the server's process per second, with the page open less that without a page: on the list while nothing trains,
since steps do not change what the list asks for, and on a run that makes a step about every 100 ms. Run it on an idle
machine: beside a run that trains, the browser's own work moves the difference by a per cent.
"""

import argparse
import importlib
import os
import shutil
import sqlite3
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import tinker
from live_tenants import BASE_MODEL, START_S, Served, key_of, served

from tinsmith.loopback import exempt_loopback
from tinsmith.store.metrics import encode_values
from tinsmith.testing.sdk_data import datum, step

sys.path.append(str(Path(__file__).parents[1] / "tests" / "e2e"))
running_browser = importlib.import_module("browser").running_browser  # of the tests, which have no package

PAUSE_S = 0.1  # of the script that trains
LONG_RUN = "copy0:train:0"
NAMES = ("loss:sum", "grad_norm:mean", "engine_s:sum", "queued_s:max", "trained_tokens:sum", "sampler_kl:mean")
OF_CLIENT = ("reward", "env/length", "env/turns", "entropy", "kl", "lr")


def fill(database: Path, run_id: str, runs: int, steps: int) -> None:
    """Copy a run, and give the first copy metrics of many steps: of a pass and a step each, and of its client."""
    session_id = run_id.split(":")[0]
    with closing(sqlite3.connect(database, timeout=START_S)) as connection, connection:
        for table, key, of, name in (
            ("sessions", "session_id", session_id, "copy{}"),
            ("runs", "model_id", run_id, "copy{}:train:0"),
        ):
            columns = [row[1] for row in connection.execute(f"PRAGMA table_info({table})")]
            replaced = {
                key: "?",
                "session_id": "?",
                "idempotency_key": "NULL",
                "ended": "'success'",
                "state": "'unloaded'",
            }
            values = ", ".join(replaced.get(column, column) for column in columns)
            copied = f"INSERT INTO {table} SELECT {values} FROM {table} WHERE {key} = ?"
            for number in range(runs):
                made = [f"copy{number}"] if table == "sessions" else [name.format(number), f"copy{number}"]
                connection.execute(copied, [*made, of])
        connection.execute("UPDATE runs SET steps = ? WHERE model_id = ?", [steps, LONG_RUN])
        of_engine = {name: 0.25 * at for at, name in enumerate(NAMES)}
        of_step = {"grad_norm:mean": 1.5, "engine_s:sum": 0.5, "queued_s:max": 0.25}
        of_client = {name: 0.5 * at for at, name in enumerate(OF_CLIENT)}
        for number in range(steps):
            rows = ((-1, of_client), (2 * number + 1, of_engine), (2 * number + 2, of_step))
            connection.executemany(
                "INSERT INTO metrics (model_id, step, seq_id, time, numbers) VALUES (?, ?, ?, ?, ?)",
                [(LONG_RUN, number, seq_id, 10**6 * number, encode_values(values)) for seq_id, values in rows],
            )


@contextmanager
def training(client: tinker.TrainingClient) -> Iterator[None]:
    """Make steps until the block ends."""
    ended = threading.Event()

    def train() -> None:
        while not ended.wait(PAUSE_S):
            step(client, [datum()], learning_rate=0.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def opening(browser: Any, url: str, drawn: str) -> float:
    """Return the seconds until something is there. The address must be new, or nothing is loaded."""
    begun = time.monotonic()
    browser.open(url)
    browser.until(drawn)
    return time.monotonic() - begun


def cpu_s(server: Served) -> float:
    """Return the CPU time of the server's process so far."""
    times = server.server.cpu_times()
    return float(times.user + times.system)


def spent(server: Served, seconds: float) -> float:
    """Return the CPU seconds of the server's process for each second."""
    before, begun = cpu_s(server), time.monotonic()
    time.sleep(seconds)
    return (cpu_s(server) - before) / (time.monotonic() - begun)


def main() -> None:
    exempt_loopback(os.environ)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement of the server")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise SystemExit("this needs Chromium")
    with tempfile.TemporaryDirectory() as directory, served(Path(directory), 1, {}) as server:
        os.environ.setdefault("TINKER_TELEMETRY", "0")
        service = tinker.ServiceClient(base_url=server.url, api_key=key_of(0))
        client = service.create_lora_training_client(base_model=BASE_MODEL, rank=4).result(START_S)
        run_id = client.get_info().model_id
        step(client, [datum()], learning_rate=0.0)
        fill(server.database, run_id, asked.runs, asked.steps)
        views = {
            "list": ("", "document.querySelector('#rows tr')"),
            "run": (f"#run={LONG_RUN}", "document.querySelectorAll('figure').length > 10"),
            "live": (f"#run={run_id}", "document.querySelector('figure')"),
        }
        with running_browser(chromium, Path(directory) / "profile") as browser:
            browser.look(width=1280, height=800, dark=False)
            browser.open(f"{server.url}/#key={key_of(0)}")
            browser.until("document.querySelector('#rows tr')")
            number = iter(range(10**6))

            def open_view(view: str) -> float:
                fragment, drawn = views[view]
                return opening(browser, f"{server.url}/?{next(number)}{fragment}", drawn)

            for view in ("list", "run"):
                before = cpu_s(server)
                took = [1000 * open_view(view) for _ in range(asked.repeats)]
                cpu_ms = 1000 * (cpu_s(server) - before) / asked.repeats
                print(
                    f"opens {view}: {statistics.median(took):.0f} ms, at most {max(took):.0f} ms, of which the server "
                    f"computed {cpu_ms:.0f} ms"
                )
            for view, work in (("list", nullcontext()), ("live", training(client))):
                with work:
                    browser.open("about:blank")
                    alone = spent(server, asked.seconds)
                    open_view(view)
                    costs = spent(server, asked.seconds) - alone
                    print(f"costs {view}: {100 * costs:.2f} % of a core beside {100 * alone:.2f} % without a page")
        service.close("success").result(timeout=START_S)


if __name__ == "__main__":
    main()
