"""A simulation's measurements and report."""

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tinsmith_workbench.simulation.clock import Clock
from tinsmith_workbench.simulation.request import Request
from tinsmith_workbench.simulation.tenant import Tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassFigures:
    """Of the tenants of one class, after the warm-up. Latencies are from send to answer, in seconds."""

    name: str
    tenants: int
    operations_per_s: float
    trained_tokens_per_s: float
    sampled_tokens_per_s: float
    operation_p50_s: float
    operation_p99_s: float
    longest_s: float  # of an operation, answered or not
    steps_per_s: float
    step_p50_s: float
    step_p99_s: float
    jain: float  # of tokens; 1 if all tenants got the same, 1/n if one got everything


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    workload: str
    tenants: int
    engines: int
    servers: int
    seconds: float  # simulated
    warm_up_s: float  # of them, not measured
    seed: int
    measured: str  # where the service times come from
    classes: tuple[ClassFigures, ...]
    operations_per_s: float
    trained_tokens_per_s: float
    sampled_tokens_per_s: float
    device_utilisation: float  # share of time with a batch or a row, mean of the engines; so are the next two
    training_utilisation: float
    sampling_utilisation: float
    server_utilisation: float
    store_utilisation: float
    transactions_per_s: float
    models_resident: int  # of the engine that holds most
    model_bytes: int  # of that engine's device
    payload_bytes_mean: float  # of operations that are not recorded, in all engines
    payload_bytes_peak: int


@dataclass(slots=True)
class _OfClass:
    operations_s: "array[float]" = field(default_factory=lambda: array("d"))
    steps_s: "array[float]" = field(default_factory=lambda: array("d"))
    trained: int = 0
    sampled: int = 0
    tokens: Counter[int] = field(default_factory=Counter)  # by tenant


class Figures:
    """Counts what is answered after the warm-up."""

    def __init__(self, clock: Clock, warm_up_s: float) -> None:
        self.payload_peak = 0
        self._clock = clock
        self._warm_up_s = warm_up_s
        self._classes: dict[str, _OfClass] = {}
        self._payload = 0
        self._payload_since_s = 0.0
        self._payload_seconds = 0.0  # bytes times seconds, since the warm-up

    def answered(self, tenant: Tenant, request: Request) -> None:
        if self._clock.now_s < self._warm_up_s:
            return
        of, wanted = self._of(tenant), request.wanted
        of.operations_s.append(self._clock.now_s - request.sent_s)
        of.trained += wanted.tokens if wanted.kind == "forward_backward" else 0
        of.sampled += wanted.tokens * wanted.sequences
        of.tokens[tenant.number] += wanted.num_tokens

    def stepped(self, tenant: Tenant, seconds: float) -> None:
        if self._clock.now_s >= self._warm_up_s:
            self._of(tenant).steps_s.append(seconds)

    def payload(self, num_bytes: int) -> None:
        """So many bytes more wait, or fewer."""
        self._integrate()
        self._payload += num_bytes
        self.payload_peak = max(self.payload_peak, self._payload)

    @property
    def payload_mean(self) -> float:
        self._integrate()
        return self._payload_seconds / (self._clock.now_s - self._warm_up_s)

    def _integrate(self) -> None:
        since_s = max(self._payload_since_s, self._warm_up_s)
        self._payload_seconds += self._payload * max(0.0, self._clock.now_s - since_s)
        self._payload_since_s = self._clock.now_s

    def _of(self, tenant: Tenant) -> _OfClass:
        return self._classes.setdefault(tenant.of.name, _OfClass())

    def of_class(self, tenants: Sequence[Tenant]) -> ClassFigures:
        """Return the figures of a class; these are all its tenants."""
        of = self._of(tenants[0])
        seconds = self._clock.now_s - self._warm_up_s
        waiting_s = [self._clock.now_s - each.sent_s for tenant in tenants for each in tenant.outstanding.values()]
        operations_s, steps_s = sorted(of.operations_s), sorted(of.steps_s)
        return ClassFigures(
            name=tenants[0].of.name,
            tenants=len(tenants),
            operations_per_s=len(operations_s) / seconds,
            trained_tokens_per_s=of.trained / seconds,
            sampled_tokens_per_s=of.sampled / seconds,
            operation_p50_s=_quantile(operations_s, 0.5),
            operation_p99_s=_quantile(operations_s, 0.99),
            longest_s=max([0.0, *operations_s[-1:], *waiting_s]),
            steps_per_s=len(steps_s) / seconds,
            step_p50_s=_quantile(steps_s, 0.5),
            step_p99_s=_quantile(steps_s, 0.99),
            jain=jain([of.tokens[tenant.number] for tenant in tenants]),
        )


def jain(shares: Sequence[float]) -> float:
    """Return Jain's index of fairness: (sum x)^2 / (n sum x^2). R. Jain et al., DEC-TR-301, 1984."""
    squares = sum(share * share for share in shares)
    return sum(shares) ** 2 / (len(shares) * squares) if squares else 1.0


def _quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least this share does not exceed; 0 of nothing. `values` are sorted."""
    return values[max(0, -int(-share * len(values) // 1) - 1)] if values else 0.0
