"""The command `tinsmith simulate`: scale on paper."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from tinsmith_workbench.simulation.figures import Report


def simulate(
    workload: Annotated[
        str, typer.Argument(help="hog, mixed, rl, sampling or sft; or a JSON file of classes of tenants")
    ] = "mixed",
    tenants: Annotated[int, typer.Option(min=1, help="how many there are")] = 64,
    engines: Annotated[int, typer.Option(min=1, help="how many there are; each serves its part of the tenants")] = 1,
    servers: Annotated[int, typer.Option(min=1, help="server processes that share the store")] = 1,
    minutes: Annotated[float, typer.Option(min=0.001, help="of virtual time; the first tenth is not measured")] = 10.0,
    seed: Annotated[int, typer.Option(help="of lengths and pauses; the same seed gives the same figures")] = 0,
    times: Annotated[
        Path | None, typer.Option(help="service times, from benchmarks/service_times.py", show_default=False)
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="write all figures to this file", show_default=False)
    ] = None,
) -> None:
    """Simulate tenants, engines and a store: the production scheduler over virtual time, with measured service times.

    docs/explanation/scale.md describes the simulation and its limits.
    """
    from tinsmith.builtin.fair_scheduler import FairConfig, FairScheduler
    from tinsmith_workbench.simulation.service_times import DEFAULT, ServiceTimes
    from tinsmith_workbench.simulation.simulation import Scenario, Simulation
    from tinsmith_workbench.simulation.workload import workload_of

    scenario = Scenario(
        name=workload,
        workload=workload_of(workload),
        times=ServiceTimes.read(times or DEFAULT),
        scheduler=lambda: FairScheduler(FairConfig()),
        tenants=tenants,
        engines=engines,
        servers=servers,
        seconds=60 * minutes,
        seed=seed,
    )
    report = Simulation(scenario).run()
    if json_file is not None:
        json_file.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    _show(report)


def _show(report: Report) -> None:
    console = Console(emoji=False, highlight=False, soft_wrap=True)
    table = Table("class", box=None, pad_edge=False)
    headers = ("tenants", "operations/s", "trained tok/s", "sampled tok/s", "p50 s", "p99 s", "longest s")
    for header in (*headers, "step p50 s", "step p99 s", "Jain"):
        table.add_column(header, justify="right")
    for each in report.classes:
        table.add_row(
            each.name,
            f"{each.tenants:,}",
            f"{each.operations_per_s:,.1f}",
            f"{each.trained_tokens_per_s:,.0f}",
            f"{each.sampled_tokens_per_s:,.0f}",
            *(f"{value:,.3g}" for value in (each.operation_p50_s, each.operation_p99_s, each.longest_s)),
            *(f"{value:,.3g}" for value in (each.step_p50_s, each.step_p99_s)),
            f"{each.jain:.3f}",
        )
    console.print(table)
    console.print(
        f"\nall: {report.operations_per_s:,.1f} operations/s, {report.trained_tokens_per_s:,.0f} trained tok/s, "
        f"{report.sampled_tokens_per_s:,.0f} sampled tok/s\n"
        f"busy: devices {report.device_utilisation:.0%} (training {report.training_utilisation:.0%}, sampling "
        f"{report.sampling_utilisation:.0%}), servers {report.server_utilisation:.0%}, store "
        f"{report.store_utilisation:.0%} with {report.transactions_per_s:,.0f} transactions/s\n"
        f"memory: up to {report.models_resident:,} models of an engine take {report.model_bytes / 1e6:,.0f} MB; "
        f"payloads that wait take {report.payload_bytes_mean / 1e6:,.1f} MB on average, "
        f"{report.payload_bytes_peak / 1e6:,.1f} MB at most\n"
        f"service times: {report.measured}"
    )
