"""A tenant in virtual time: it sends what its class does, and goes on when all results are there."""

from collections import Counter
from typing import Protocol

from tinsmith_workbench.simulation.clock import Clock
from tinsmith_workbench.simulation.hosts import Server
from tinsmith_workbench.simulation.request import Request, a_request
from tinsmith_workbench.simulation.workload import Life, TenantClass, Wanted


class Sees(Protocol):
    """What measures."""

    def answered(self, tenant: "Tenant", request: Request) -> None: ...

    def stepped(self, tenant: "Tenant", seconds: float) -> None: ...


class Tenant:
    def __init__(
        self, number: int, of: TenantClass, life: Life, *, clock: Clock, server: Server, engine: int, sees: Sees
    ) -> None:
        self.number = number
        self.of = of
        self.engine = engine
        self.outstanding: dict[str, Request] = {}  # by request_id: sent, and not answered
        self._life = life
        self._clock = clock
        self._server = server
        self._sees = sees
        self._sent: Counter[bool] = Counter()  # samples or not
        self._step_began_s: float | None = None

    def go_on(self) -> None:
        following = next(self._life)
        if isinstance(following, list):
            self._send(following)
            return
        if self._step_began_s is not None:
            self._sees.stepped(self, self._clock.now_s - self._step_began_s)
            self._step_began_s = None
        self._clock.after(following, self.go_on)

    def _send(self, step: list[Wanted]) -> None:
        if self._step_began_s is None:
            self._step_began_s = self._clock.now_s
        for wanted in step:
            request = self._next(wanted)
            self.outstanding[request.request_id] = request
            self._server.submit(request)

    def _next(self, wanted: Wanted) -> Request:
        sample = wanted.kind == "sample"
        self._sent[sample] += 1
        return a_request(
            wanted, tenant=self.number, engine=self.engine, seq_id=self._sent[sample], sent_s=self._clock.now_s
        )

    def recorded(self, request: Request) -> None:
        """The result is durable, and the server knows."""
        self._server.answer(lambda: self._answered(request))

    def _answered(self, request: Request) -> None:
        del self.outstanding[request.request_id]
        self._sees.answered(self, request)
        if not self.outstanding:
            self.go_on()
