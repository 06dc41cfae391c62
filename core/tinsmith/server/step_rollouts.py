"""The rollouts of a step: the sequences that it was trained on, and those that were sampled during it in vain.

A script may filter what it samples: groups whose rewards are all the same, for example. The log still has these samples
for `server.result_retention_s`. They belong to the step during which they finished.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from tinsmith import operations as ops
from tinsmith.server.run_views import step_ended
from tinsmith.store import OF_CLIENT, MetricsRow, OperationRecord, RequestStore, RolloutsRow, RunRecord
from tinsmith.store.codec import decode_operation, decode_result
from tinsmith.store.rollouts import Rollout, decode_rollouts

_PAGE: Final = 200  # rows of metrics in one read


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRollouts:
    rows: Sequence[RolloutsRow] = ()
    later: Sequence[RolloutsRow] = ()  # of the steps behind it, which may have trained on its samples as well
    samples: Sequence[OperationRecord] = ()  # that finished during it, if it can be told which were trained
    more_samples: bool = False  # there were too many to read

    def untrained(self) -> Iterator[tuple[str, Rollout]]:
        """Yield the sampled sequences that no kept pass has, each as a rollout, and where it is from.

        Passes may have a sequence with more behind it: a conversation is sampled in turns, and trained as a whole.
        """
        passes = [decode_rollouts(row.content) for row in (*self.rows, *self.later) if row.seq_id != OF_CLIENT]
        whole = sorted({each.tokens for found in passes for each in found.rollouts})
        ends = {end for found in passes for end in found.others}
        for record in self.samples:
            for number, rollout in enumerate(_drawn(record)):
                at = bisect_left(whole, rollout.tokens)
                trained = at < len(whole) and whole[at].startswith(rollout.tokens)
                if not trained and rollout.digest not in ends:
                    yield f"{record.request_id}-{number}", rollout


async def read_step(
    store: RequestStore, run: RunRecord, step: int, steps: Sequence[int], max_bytes: int
) -> StepRollouts:
    """Read a step. `steps`: of which rollouts are kept; `max_bytes`: of samples.

    Samples are left out while the step goes on, and where some of its passes are not among the kept rollouts: these may
    have trained on any of them.
    """
    rows = await store.read_rollouts(run.model_id, step)
    passes = {row.seq_id for row in rows if row.seq_id != OF_CLIENT}
    measured = await _measured(store, run.model_id, step)
    ended = step_ended(measured)
    if not passes or ended is None or not {row.seq_id for row in measured if _is_pass(row)} <= passes:
        return StepRollouts(rows=rows)
    before = step_ended(await _measured(store, run.model_id, step - 1)) if step else None
    samples, more = await store.samples_of(
        run.model_id, after=before or run.created_at, until=ended, max_bytes=max_bytes
    )
    later = [row for each in steps if each > step for row in await store.read_rollouts(run.model_id, each)]
    return StepRollouts(rows=rows, later=later, samples=samples, more_samples=more)


def _is_pass(row: MetricsRow) -> bool:
    return row.seq_id != OF_CLIENT and "loss:sum" in row.values


async def _measured(store: RequestStore, model_id: str, step: int) -> list[MetricsRow]:
    """Return the metrics of one step."""
    found: list[MetricsRow] = []
    page = await store.read_metrics(model_id, from_step=step, limit=_PAGE)
    while page:
        found += [row for row in page if row.step == step]
        if len(page) < _PAGE or page[-1].step != step:
            break
        page = await store.read_metrics(model_id, from_step=step, after=page[-1].seq_id, limit=_PAGE)
    return found


def _drawn(record: OperationRecord) -> Iterator[Rollout]:
    """Yield the sequences of a sample. One that scores its prompt is no rollout."""
    assert record.payload is not None
    assert record.result_kind is not None
    assert record.result is not None
    sample, output = decode_operation(record.kind, record.payload), decode_result(record.result_kind, record.result)
    assert isinstance(sample, ops.Sample)
    assert isinstance(output, ops.SampleOutput)
    if sample.prompt_logprobs or sample.topk_prompt_logprobs or sample.target_prompt_logprobs is not None:
        return
    given = len(sample.prompt_P)
    for each in output.sequences:
        tokens = np.concatenate([sample.prompt_P, each.tokens]).astype("<i4")
        yield Rollout(tokens=tokens.tobytes(), sampled=((given, len(tokens)),), advantage=float("nan"), kl=float("nan"))
