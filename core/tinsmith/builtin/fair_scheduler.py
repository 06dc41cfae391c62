"""The default scheduler: packs passes of all tenants into one batch, by deficit round robin over their tokens.

Each tenant has a debt: the tokens served to it beyond those of the least served tenant that wants something. The
tenant with the smallest debt chooses what kind of batch runs, and every place in it goes to the smallest debt again.

How far tenants can drift apart: let tenants i and j start level, and always have more passes of one kind waiting than a
batch holds, those of j no longer than those of i. Then the tokens served to i are never ahead of those of j by more
than the longest operation of i, L. Proof:

1. A place goes to i while j has one in hand, too: j leaves a batch where what it has does not fit into the room that is
   left, and then nothing of i does, since the room only shrinks. So i's debt was not above j's, and is not above it by
   more than L afterwards.
2. Debts are tokens served, up to what `_settle` does: it takes the same from all, and shortens what lies between two
   neighbours where that is longer than the cap. Where L is within the cap, nothing between i and a j below it is
   shortened. What lies between i and a j above it may be: i's debt then counts more than was served to it, never less.

It is exact: of two that are level, one is served first. Nothing of the kind holds for j, whose shorter operations may
also fill what no operation of i fits into; that costs i nothing.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from pydantic import Field

from tinsmith.backend import BackendConfig
from tinsmith.scheduler import Batch, Limits, Pending, Scheduler

PASSES: Final = frozenset({"forward", "forward_backward"})
"""Kinds of which a batch may hold several operations of one model."""

MERGED: Final = PASSES | {"optim_step"}
"""Kinds of which a batch may hold several models' operations. Any other runs alone: its result comes at once."""


class FairConfig(BackendConfig):
    """The `scheduler:` section where `plugin: fair`."""

    min_cost_tokens: int = Field(
        64, ge=1, description="what any operation costs its tenant at least, however few tokens it has"
    )
    max_debt_batches: float = Field(
        2.0,
        gt=0,
        description="what a tenant has been served beyond the next one is forgiven from this many full batches on, so "
        "that nobody saves up for a burst",
    )


class FairScheduler(Scheduler):
    """Of tenants that always have work none gets ahead of one with shorter operations by more than one operation."""

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
        """Give place after place to the smallest debt. `runs` may be consumed; `debts` is updated."""
        waiting: dict[str, list[list[Pending]]] = defaultdict(list)  # tenant -> its models' runs
        for run in runs:
            waiting[run[0].tenant].append(run)
        for models in waiting.values():
            models.sort(key=lambda run: (run[0] is lead, -run[0].enqueued_at_s, run[0].model_id))  # next is last
        places = [(debts[tenant], tenant != lead.tenant, tenant) for tenant in waiting]
        heapq.heapify(places)
        chosen: list[Pending] = []
        room = limits.max_batch_tokens
        while places:
            _, _, tenant = heapq.heappop(places)
            run = waiting[tenant][-1]
            if run[0].num_tokens <= room or not chosen:
                first = run.pop(0)
                chosen.append(first)
                room -= first.num_tokens
                debts[tenant] += max(first.num_tokens, self._config.min_cost_tokens)
                if first.kind not in MERGED:
                    break
            else:
                run.clear()  # what comes later of this model must not pass it
            if not run:
                waiting[tenant].pop()
            if waiting[tenant]:
                heapq.heappush(places, (debts[tenant], True, tenant))
        return chosen

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
