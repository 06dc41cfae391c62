"""The default scheduler: packs passes of all tenants into one batch, by deficit round robin over their tokens.

Each tenant has a debt: its served tokens beyond the least served tenant's that has work. The tenant with
the smallest debt chooses the kind of the batch, and each position goes to the tenant whose debt is smallest.

How far tenants can drift apart: let tenants i and j start level, and always have more passes of one kind waiting than a
batch holds, those of j no longer than those of i. Then the tokens served to i are never ahead of j's by more
than the longest operation of i, L. Proof:

1. A position goes to i while j is a candidate, too: j drops out of a batch only if its operation does not fit into the
   room that is left, and then no operation of i fits either, since the room only shrinks. So i's debt was
   not above j's, and afterwards it exceeds it by at most L.
2. Debts are tokens served, except for what `_settle` does: it subtracts the same amount from all, and shortens the gap
   between two neighbours if it exceeds the cap. If L is within the cap, no gap between i and a j below it is shortened.
   The gap between i and a j above it may be: i's debt then counts more than i was served, never less.

With weights, a debt is the tokens served divided by the tenant's weight, and so is the bound: of i, L divided by its
weight. It holds end to end, because an engine always holds some operations of every tenant that has any waiting, unless
what it holds of j fills less than a batch (`store/shares.py`).

The bound is exact: of two tenants that are level, one is served first. It does not hold for j, whose shorter operations
may also fill room that is too small for any operation of i; that costs i nothing.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Final

from pydantic import Field

from tinsmith.backend import BackendConfig
from tinsmith.scheduler import Batch, Limits, Pending, Scheduler

PASSES: Final = frozenset({"forward", "forward_backward"})
"""Kinds of operation of which a batch may hold several from one model."""

MERGED: Final = PASSES | {"optim_step"}
"""Kinds of operation that a batch may mix across models. Any other kind runs alone, and its result comes at once."""


class FairConfig(BackendConfig):
    """The `scheduler:` section for `plugin: fair`."""

    min_cost_tokens: int = Field(
        64, ge=1, description="the least that an operation costs its tenant, in tokens, however short it is"
    )
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {},
        description="shares by name of tenant: one with 2.0 gets twice as many tokens as one with 1.0, the default",
    )
    max_debt_batches: float = Field(
        2.0,
        gt=0,
        description="the largest debt, in full batches, that a tenant keeps towards the next one; what exceeds it is "
        "forgiven, so that no tenant can save up for a burst",
    )


class FairScheduler(Scheduler):
    """No tenant gets ahead of one with shorter operations by more than one operation, if both always have work."""

    def __init__(self, config: FairConfig) -> None:
        self._config = config

    def plan(self, pending: Sequence[Pending], *, limits: Limits, now_s: float, memory: Mapping[str, float]) -> Batch:
        del now_s  # debts order tenants, and age orders what a tenant has
        if not pending:
            return Batch(memory=memory)
        debts = defaultdict(float, memory)
        heads = _heads(pending)
        lead = min(heads, key=lambda each: (debts[each.tenant], each.enqueued_at_s, each.model_id))
        chosen = self._fill(lead, _runs(pending, lead.kind), limits, debts)
        return Batch(
            kind=lead.kind,
            request_ids=tuple(each.request_id for each in chosen),
            memory=self._settle(debts, {each.tenant for each in pending}, limits),
        )

    def _fill(
        self, lead: Pending, runs: Iterable[list[Pending]], limits: Limits, debts: dict[str, float]
    ) -> list[Pending]:
        """Give position after position to the smallest debt. `runs` may be consumed; `debts` is updated."""
        waiting: dict[str, list[list[Pending]]] = defaultdict(list)  # tenant -> its models' runs
        for run in runs:
            waiting[run[0].tenant].append(run)
        for models in waiting.values():
            models.sort(key=lambda run: (run[0] is lead, -run[0].enqueued_at_s, run[0].model_id))  # next is last
        candidates = [(debts[tenant], tenant != lead.tenant, tenant) for tenant in waiting]
        heapq.heapify(candidates)
        chosen: list[Pending] = []
        room = limits.max_batch_tokens
        while candidates:
            _, _, tenant = heapq.heappop(candidates)
            run = waiting[tenant][-1]
            if run[0].num_tokens <= room or not chosen:
                first = run.pop(0)
                chosen.append(first)
                room -= first.num_tokens
                debts[tenant] += max(first.num_tokens, self._config.min_cost_tokens) / self._weight(tenant)
                if first.kind not in MERGED:
                    break
            else:
                run.clear()  # what comes later of this model must not pass it
            if not run:
                waiting[tenant].pop()
            if waiting[tenant]:
                heapq.heappush(candidates, (debts[tenant], True, tenant))
        return chosen

    def _weight(self, tenant: str) -> float:
        return self._config.weights.get(tenant, 1.0)

    def _settle(self, debts: Mapping[str, float], active: set[str], limits: Limits) -> dict[str, float]:
        """Count debts from the least served active tenant, and forget what no longer matters.

        The distance between neighbours has a bound, not each debt: two tenants far above a third would be made equal
        after every batch, and which of them got more in it would be forgotten every time.
        """
        cap = self._config.max_debt_batches * limits.max_batch_tokens
        below = min(debts[tenant] for tenant in active)
        settled: dict[str, float] = {}
        level = 0.0
        for tenant, debt in sorted(debts.items(), key=lambda each: each[1]):
            if debt > below:
                level += min(debt - below, cap)
                settled[tenant], below = level, debt
            elif level > 0 and debt == below:
                settled[tenant] = level
        return settled


def _heads(pending: Iterable[Pending]) -> list[Pending]:
    heads: dict[str, Pending] = {}
    for each in pending:
        head = heads.get(each.model_id)
        if head is None or each.seq_id < head.seq_id:
            heads[each.model_id] = each
    return list(heads.values())


def _runs(pending: Iterable[Pending], kind: str) -> list[list[Pending]]:
    """Return, of each model that starts with this kind, what one batch may hold, in order."""
    by_model: dict[str, list[Pending]] = defaultdict(list)
    for each in pending:
        by_model[each.model_id].append(each)
    runs = []
    for operations in by_model.values():
        operations.sort(key=lambda each: each.seq_id)
        others = (number for number, each in enumerate(operations) if each.kind != kind)
        length = next(others, len(operations))
        if length:
            runs.append(operations[: length if kind in PASSES else 1])
    return runs
