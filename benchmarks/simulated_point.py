"""One real point of the simulator: tenants on a served toy model, against what `tinsmith simulate` says of them.

    python benchmarks/simulated_point.py [--times FILE] [--tenants 64] [--seconds 60] [--json FILE]

Without --times, measures service times first (benchmarks/service_times.py), in the same minutes. The tenants run in
this process, with the lengths and pauses that the simulated ones draw from the same seed. What a request costs this
process is added to the server's time for it: on a machine of two cores, engines have one, and server and clients
share the other. Prints both sides and their ratio. The exit status is 1 if operations or tokens per second are off by
more than 20 %.
"""

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from live_tenants import LiveTenant, Seen, let_live, served
from service_times import measured

from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
from tinsmith_workbench.simulation.figures import Report
from tinsmith_workbench.simulation.service_times import ServiceTimes
from tinsmith_workbench.simulation.simulation import Scenario, Simulation
from tinsmith_workbench.simulation.workload import TenantClass, Workload

WORKLOAD = Workload(
    classes=(
        TenantClass(name="sft", weight=2.0, passes=1, pass_tokens=2048, think_s=1.0),
        TenantClass(name="rl", samples=4, prompt_tokens=64, sampled_tokens=64, passes=2, pass_tokens=1024, think_s=2.0),
        TenantClass(name="sampling", samples=1, prompt_tokens=64, sampled_tokens=64, think_s=2.0),
    )
)
WARM_UP = 0.1
MOST_OFF = 0.2


async def lived(url: str, options: argparse.Namespace, times: ServiceTimes) -> tuple[dict[str, Seen], float, float]:
    """Let the tenants live. Return what they saw, when they began, and this process's CPU time for an operation."""
    classes = WORKLOAD.tenants(options.tenants)
    seen = {each.name: Seen() for each in classes}
    tenants = [
        LiveTenant(
            url, number, each, seed=options.seed, max_tokens=times.backend.max_batch_tokens, seen=seen[each.name]
        )
        for number, each in enumerate(classes)
    ]
    for tenant in tenants:
        await tenant.open()
    began, spent_s = time.monotonic(), time.process_time()
    await let_live(tenants, options.seconds)
    spent_s = time.process_time() - spent_s
    return seen, began, spent_s / sum(len(each.answers) for each in seen.values())


def simulated(options: argparse.Namespace, times: ServiceTimes) -> Report:
    scenario = Scenario(
        name="64 on one machine",
        workload=WORKLOAD,
        times=times,
        scheduler=lambda: FairScheduler(FairConfig()),
        tenants=options.tenants,
        seconds=options.seconds,
        seed=options.seed,
    )
    return Simulation(scenario).run()


def beside_clients(times: ServiceTimes, client_s: float) -> ServiceTimes:
    server = times.server
    shared = {"submit_s": server.submit_s + client_s / 2, "answer_s": server.answer_s + client_s / 2}
    return times.model_copy(update={"server": server.model_copy(update=shared)})


def figures_of(seen: Seen, began: float, seconds: float) -> dict[str, float]:
    answers = [each for each in seen.answers if began + WARM_UP * seconds <= each[3] <= began + seconds]
    latencies = [each[2] for each in answers]
    window_s = (1 - WARM_UP) * seconds
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return {
        "operations/s": len(answers) / window_s,
        "trained tok/s": sum(tokens for kind, tokens, *_ in answers if kind == "forward_backward") / window_s,
        "sampled tok/s": sum(tokens for kind, tokens, *_ in answers if kind == "sample") / window_s,
        "p50 s": cuts[49],
        "p99 s": cuts[98],
    }


def compared(report: Report, seen: dict[str, Seen], began: float, seconds: float) -> list[tuple[str, float, float]]:
    """Return name, measured and simulated value of each figure."""
    rows, both = [], {"measured": 0.0, "simulated": 0.0}
    for each in report.classes:
        real = figures_of(seen[each.name], began, seconds)
        paper = (
            each.operations_per_s,
            each.trained_tokens_per_s,
            each.sampled_tokens_per_s,
            each.operation_p50_s,
            each.operation_p99_s,
        )
        rows += [
            (f"{each.name}, {name}", value, other) for (name, value), other in zip(real.items(), paper, strict=True)
        ]
        both["measured"] += real["operations/s"]
        both["simulated"] += each.operations_per_s
    rows.append(("all, operations/s", both["measured"], both["simulated"]))
    return [row for row in rows if row[1] or row[2]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=Path)
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    times = ServiceTimes.read(options.times) if options.times else measured("toy", repeats=5)
    with (
        tempfile.TemporaryDirectory(prefix="tinsmith-point-") as directory,
        served(Path(directory), options.tenants, {"max_models": times.backend.max_models}) as toy,
    ):
        seen, began, client_s = asyncio.run(lived(toy.url, options, times))
    report = simulated(options, beside_clients(times, client_s))
    rows = compared(report, seen, began, options.seconds)
    for name, real, paper in rows:
        print(f"{name:<28} measured {real:10,.3f}   simulated {paper:10,.3f}   ratio {paper / real:5.2f}")
    print(f"a client's CPU time for an operation: {1000 * client_s:.2f} ms; {times.measured}")
    if options.json:
        found = {"times": times.model_dump(), "client_s": client_s, "rows": rows, "report": asdict(report)}
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    off = [name for name, real, paper in rows if name.endswith("/s") and abs(paper / real - 1) > MOST_OFF]
    print("off by more than 20 %: " + (", ".join(off) or "nothing"))
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
