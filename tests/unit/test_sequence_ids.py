"""Ids of sampled sequences: signed for one tenant, so that nothing needs to be stored."""

from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from tinsmith.protocol import training_request
from tinsmith.protocol.proto import tinker_public_pb2 as pb
from tinsmith.server.sequence_ids import SequenceIds
from tinsmith.store.request_ids import new_request_id

NOW = datetime(2026, 11, 27, 12, tzinfo=UTC)
DAY_S = 86400.0
PROMPT = 5
IDS = SequenceIds(b"secret", DAY_S)


def sampled(tenant: str = "ann", recorded: int | None = PROMPT, ids: SequenceIds = IDS, at: datetime = NOW) -> str:
    return ids.of_sample(tenant, new_request_id(at), 2, recorded_prompt=recorded)[1]


def problem(sequence_id: str, *, offset: int = 0, length: int = 3, at: datetime = NOW, tenant: str = "ann") -> str:
    """Return what is wrong with a datum of prompt tokens of this sequence, and of its sampled tokens."""
    message = pb.ForwardBackwardRequest(model_id="s1:train:0", seq_id=1, loss_fn="stable_reinforce")
    datum = message.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(3, dtype="<i4").tobytes()
    run = datum.model_input_spans.add().prompt_tokens
    run.sequence_id, run.offset, run.length = sequence_id, offset, length
    run = datum.loss_fn_input_spans.add().sampled_tokens
    run.sequence_id, run.offset, run.length = sequence_id, offset, length
    found = IDS.problem(training_request.parse(message.SerializeToString()), tenant, at)
    return "" if found is None else str(found)


def test_a_repeated_request_has_the_same_ids() -> None:
    request_id = new_request_id(NOW)
    for recorded in (None, PROMPT):
        ids = IDS.of_sample("ann", request_id, 3, recorded_prompt=recorded)
        assert len(set(ids)) == 3
        assert SequenceIds(b"secret", DAY_S).of_sample("ann", request_id, 3, recorded_prompt=recorded) == ids


@pytest.mark.parametrize(("offset", "length"), [(0, 3), (2, 3), (0, 0), (5, 0)])
def test_recorded_sequences_are_known_for_a_day(offset: int, length: int) -> None:
    assert not problem(sampled(), offset=offset, length=length, at=NOW + timedelta(days=1))


def test_ids_expire() -> None:
    found = problem(sampled(), at=NOW + timedelta(days=1, seconds=1))
    assert found.startswith("data[0]: model_input_spans: sequence 'req-")
    assert "has expired: it was sampled at 2026-11-27 12:00:00 UTC" in found
    assert "live for 86400 s (`losses.sequence_lifetime_s`)" in found


@pytest.mark.parametrize(
    ("sequence_id", "words"),
    [
        (sampled("bob"), "is not known"),
        (sampled(ids=SequenceIds(b"another store", DAY_S)), "is not known"),
        (sampled().replace(f":1:{PROMPT}:", f":1:{PROMPT + 1}:"), "is not known"),
        (sampled().replace(f":1:{PROMPT}:", f":0:{PROMPT}:"), "is not known"),
        ("r:0", "is not known"),
        ("x" * 10_000, "is not known"),
        (sampled(recorded=None), "was sampled without record_stability_info"),
    ],
    ids=["another tenant", "another store", "longer prompt", "another sample", "no id", "long", "not recorded"],
)
def test_other_ids_are_refused(sequence_id: str, words: str) -> None:
    found = problem(sequence_id)
    assert words in found
    assert len(found) < 400


@pytest.mark.parametrize(("offset", "length"), [(0, 6), (3, 3)])
def test_a_prompt_span_lies_in_the_prompt(offset: int, length: int) -> None:
    assert f"{length} tokens from {offset} on is not in the prompt" in problem(sampled(), offset=offset, length=length)
