"""Running a batch: passes, or steps of which those are discarded whose window holds a failed pass."""

from collections.abc import Sequence
from typing import cast

from tinsmith import operations as ops
from tinsmith.engine.claimed import Claimed, Finished, Outcome
from tinsmith.engine.models import BatchOperation, Models
from tinsmith.engine.windows import Windows, discarded


class Batches:
    def __init__(self, models: Models, windows: Windows) -> None:
        self._models = models
        self._windows = windows

    async def run(self, chosen: Sequence[Claimed]) -> list[Finished]:
        """Run operations of one kind together."""
        results: dict[str, ops.Result] = dict(await self._discarded(chosen))
        running = [each for each in chosen if each.record.request_id not in results]
        if running:
            found = await self._models.run_batch([cast("BatchOperation", each.operation) for each in running])
            results |= {each.record.request_id: result for each, result in zip(running, found, strict=True)}
        for each in chosen:
            self._windows.ran(each.record, results[each.record.request_id])
        return [Finished(claimed=each, outcome=Outcome.of(results[each.record.request_id])) for each in chosen]

    async def _discarded(self, chosen: Sequence[Claimed]) -> dict[str, ops.Failed]:
        """Discard steps: drop their gradients, and return their results by request_id."""
        found: dict[str, ops.Failed] = {}
        for record in (each.record for each in chosen if each.record.kind == "optim_step"):
            failed = await self._windows.failed_pass(record)
            if failed is not None:
                await self._models.drop_gradient(record.subject_id)
                found[record.request_id] = discarded(failed)
        return found
