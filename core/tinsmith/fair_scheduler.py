"""The default scheduler: packs passes of all tenants into one batch, by deficit round robin over their tokens.

Each tenant has a debt: the tokens served to it beyond those of the least served tenant that wants something. The
tenant with the smallest debt chooses what kind of batch runs, and every place in it goes to the smallest debt again.
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
        2.0, gt=0, description="debts are forgiven beyond this many full batches, so that nobody saves up for a burst"
    )


class FairScheduler(Scheduler):
    """Every tenant that has work waits for at most `max_debt_batches` full batches and those of its own length."""

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
        """Count debts from the least served active tenant, and forget what no longer matters."""
        least = min(debts[tenant] for tenant in active)
        cap = self._config.max_debt_batches * limits.max_batch_tokens
        settled = {tenant: min(debt - least, cap) for tenant, debt in debts.items()}
        return {tenant: debt for tenant, debt in settled.items() if debt > 0}


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
