"""Servers, a store, engines and tenants in virtual time."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinsmith.errors import UserError
from tinsmith.scheduler import Scheduler
from tinsmith_workbench.simulation.clock import Clock
from tinsmith_workbench.simulation.engine import Engine
from tinsmith_workbench.simulation.figures import Figures, Report
from tinsmith_workbench.simulation.hosts import Server, Store
from tinsmith_workbench.simulation.request import Request
from tinsmith_workbench.simulation.service_times import ServiceTimes
from tinsmith_workbench.simulation.tenant import Tenant
from tinsmith_workbench.simulation.workload import TenantClass, Workload, life

_WARM_UP = 0.1  # of the time


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """The simulated system. Each engine serves a base model of its own to its part of the tenants."""

    name: str
    workload: Workload
    times: ServiceTimes
    scheduler: Callable[[], Scheduler]
    tenants: int = 64
    engines: int = 1
    servers: int = 1
    seconds: float = 600.0
    seed: int = 0


class Simulation:
    """Runs once. `saw` is told what happens to each request."""

    def __init__(self, scenario: Scenario, saw: Callable[[str, Request], None] = lambda _what, _request: None) -> None:
        """Raise UserError if the scenario does not fit together."""
        self.clock = Clock()
        self._scenario = scenario
        self._saw = saw
        self._figures = Figures(self.clock, _WARM_UP * scenario.seconds)
        classes = scenario.workload.tenants(scenario.tenants)
        self._models = _models(classes, scenario)
        self.store = Store(self.clock, scenario.times.store)
        self.servers = [
            Server(self.clock, scenario.times.server, self.store, self._committed) for _ in range(scenario.servers)
        ]
        self.engines = [
            Engine(self.clock, scenario.times, self.store, scenario.scheduler(), self._seen)
            for _ in range(scenario.engines)
        ]
        self.tenants = [self._tenant(number, each) for number, each in enumerate(classes)]

    def run(self) -> Report:
        for tenant in self.tenants:
            tenant.go_on()
        self.clock.run(self._scenario.seconds)
        return self._report()

    def _tenant(self, number: int, of: TenantClass) -> Tenant:
        scenario = self._scenario
        backend, rng = scenario.times.backend, random.Random(f"{scenario.seed}:{number}")
        return Tenant(
            number,
            of,
            life(of, rng, max_tokens=backend.max_batch_tokens, max_context_tokens=backend.max_context_tokens),
            clock=self.clock,
            server=self.servers[number % scenario.servers],
            engine=number % scenario.engines,
            sees=self._figures,
        )

    def _committed(self, requests: Sequence[Request]) -> None:
        for each in requests:
            self.engines[each.engine].arrived(each)

    def _seen(self, what: str, request: Request) -> None:
        self._saw(what, request)
        if what == "arrived":
            self._figures.payload(request.num_bytes)
        elif what == "recorded":
            self._figures.payload(-request.num_bytes)
            self.tenants[request.tenant].recorded(request)

    def _report(self) -> Report:
        scenario = self._scenario
        by_class: dict[str, list[Tenant]] = defaultdict(list)
        for tenant in self.tenants:
            by_class[tenant.of.name].append(tenant)
        classes = tuple(self._figures.of_class(tenants) for tenants in by_class.values())
        devices = [engine.device for engine in self.engines]
        for each in devices:
            each.advance()
        all_s = self.clock.now_s
        devices_s = len(devices) * all_s
        return Report(
            workload=scenario.name,
            tenants=scenario.tenants,
            engines=scenario.engines,
            servers=scenario.servers,
            seconds=scenario.seconds,
            warm_up_s=_WARM_UP * scenario.seconds,
            seed=scenario.seed,
            measured=scenario.times.measured,
            classes=classes,
            operations_per_s=sum(each.operations_per_s for each in classes),
            trained_tokens_per_s=sum(each.trained_tokens_per_s for each in classes),
            sampled_tokens_per_s=sum(each.sampled_tokens_per_s for each in classes),
            device_utilisation=sum(each.busy_s for each in devices) / devices_s,
            training_utilisation=sum(each.training_s for each in devices) / devices_s,
            sampling_utilisation=sum(each.sampling_s for each in devices) / devices_s,
            server_utilisation=min(1.0, sum(each.busy_s for each in self.servers) / scenario.servers / all_s),
            store_utilisation=min(1.0, self.store.busy_s / scenario.times.store.writers / all_s),
            transactions_per_s=self.store.transactions / all_s,
            models_resident=max(self._models.values(), default=0),
            model_bytes=max(self._models.values(), default=0) * scenario.times.backend.model_bytes,
            payload_bytes_mean=self._figures.payload_mean,
            payload_bytes_peak=self._figures.payload_peak,
        )


def _models(classes: Sequence[TenantClass], scenario: Scenario) -> Counter[int]:
    """Return how many models each engine holds."""
    found = Counter(number % scenario.engines for number, each in enumerate(classes) if each.passes)
    most, places = max(found.values(), default=0), scenario.times.backend.max_models
    if most > places:
        msg = (
            f"{scenario.engines} engines would hold up to {most} models each, and the service times allow {places} "
            f"(max_models); ask for at least {-(-sum(found.values()) // places)} engines, or fewer tenants"
        )
        raise UserError(msg)
    return found
