"""The figures and plots of docs/explanation/scale.md.

`python tools/workbench/scale_plots.py run` simulates, and writes docs/explanation/scale/figures.json: some minutes of
one core. `python tools/workbench/scale_plots.py draw` draws it. That needs matplotlib: the extra `plots`.
"""

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[2] / "docs" / "explanation" / "scale"
FIGURES = HERE / "figures.json"
LARGE = HERE / "large.json"
ENGINES = (1, 4, 16, 64)
TENANTS_PER_ENGINE = (3, 12, 24, 48)
ONE_MACHINE, SEVERAL = "one server, SQLite", "8 servers, PostgreSQL"
COLOURS = ("#1565c0", "#ad1457", "#2e7d32", "#ef6c00")


# Figures --------------------------------------------------------------------------------------------------------------


def run() -> None:
    from tinsmith_workbench.simulation.service_times import ServiceTimes

    hosts, large = ServiceTimes.read(), ServiceTimes.read(LARGE)
    large = large.model_copy(update={"server": hosts.server, "store": hosts.store})
    several = large.model_copy(update={"store": large.store.model_copy(update={"writers": 8})})
    found = {
        "crowd": [report(large, "mixed", tenants=number, minutes=5) for number in TENANTS_PER_ENGINE],
        "hog": [report(large, name, tenants=24) for name in ("sft", "hog")],
        ONE_MACHINE: [report(large, "sft", tenants=32 * number, engines=number) for number in ENGINES],
        SEVERAL: [report(several, "sft", tenants=32 * number, engines=number, servers=8) for number in ENGINES],
    }
    FIGURES.write_text(json.dumps(found, indent=0) + "\n", encoding="utf-8")


def report(times: Any, name: str, *, tenants: int, engines: int = 1, servers: int = 1, minutes: float = 1.5) -> object:
    from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
    from tinsmith_workbench.simulation.simulation import Scenario, Simulation
    from tinsmith_workbench.simulation.workload import workload_of

    began = time.process_time()
    scenario = Scenario(
        name=name,
        workload=workload_of(name),
        times=times,
        scheduler=lambda: FairScheduler(FairConfig()),
        tenants=tenants,
        engines=engines,
        servers=servers,
        seconds=60 * minutes,
    )
    found = asdict(Simulation(scenario).run())
    print(f"{name}, {tenants} tenants, {engines} engines: {time.process_time() - began:.1f} s of CPU time", flush=True)
    return {name: rounded(value) for name, value in found.items()}


def rounded(value: object) -> object:
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(each) for each in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


# Plots ----------------------------------------------------------------------------------------------------------------


def draw() -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {
        "svg.hashsalt": "tinsmith",  # the same bytes each time
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#eceff1",
        "figure.facecolor": "white",
    }
    found = json.loads(FIGURES.read_text(encoding="utf-8"))
    _machine(found)
    _busy(found)
    _crowd(found)


def _axes(x: str, y: str, title: str) -> tuple[Any, Any]:
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7.2, 4.0), layout="constrained")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold")
    return figure, axes


def _save(figure: Any, name: str) -> None:
    figure.savefig(HERE.parent / f"scale-{name}.svg", metadata={"Date": None})


def _engines_axis(axes: Any) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(ENGINES, [str(each) for each in ENGINES])


def _machine(found: Any) -> None:
    figure, axes = _axes("engines, each with 32 tenants", "operations per second", "What one machine serves")
    _engines_axis(axes)
    axes.set_yscale("log")
    first = found[ONE_MACHINE][0]["operations_per_s"]
    axes.plot(ENGINES, [first * each for each in ENGINES], "--", color="#90a4ae", label="proportional to engines")
    for colour, name in zip(COLOURS, (ONE_MACHINE, SEVERAL), strict=False):
        axes.plot(ENGINES, [each["operations_per_s"] for each in found[name]], "o-", color=colour, label=name)
    axes.legend(frameon=False)
    _save(figure, "engines")


def _busy(found: Any) -> None:
    figure, axes = _axes("engines, each with 32 tenants", "share of time", f"What is busy: {ONE_MACHINE}")
    _engines_axis(axes)
    parts = {"devices": "device_utilisation", "server process": "server_utilisation", "store": "store_utilisation"}
    for colour, (label, name) in zip(COLOURS, parts.items(), strict=False):
        axes.plot(ENGINES, [each[name] for each in found[ONE_MACHINE]], "o-", color=colour, label=label)
    axes.set_ylim(0, 1.05)
    axes.legend(frameon=False)
    _save(figure, "busy")


def _crowd(found: Any) -> None:
    figure, axes = _axes("tenants of one engine", "seconds of a step", "How long a tenant waits for a step")
    for colour, number in zip(COLOURS, range(3), strict=False):
        of_class = [report["classes"] for report in found["crowd"]]
        tenants = [report["tenants"] for report in found["crowd"]]
        name = of_class[0][number]["name"]
        axes.plot(tenants, [each[number]["step_p50_s"] for each in of_class], "o-", color=colour, label=f"{name}, p50")
        axes.plot(tenants, [each[number]["step_p99_s"] for each in of_class], "o:", color=colour, label=f"{name}, p99")
    axes.set_yscale("log")
    axes.legend(frameon=False, ncols=3, fontsize=9)
    _save(figure, "crowd")


if __name__ == "__main__":
    {"run": run, "draw": draw}[sys.argv[1]]()
