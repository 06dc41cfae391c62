"""What every call looks like on the wire."""

from __future__ import annotations

import time
from typing import Any, Final

import httpx
import numpy as np
import tinker
import zstandard
from tinker.proto import tinker_public_pb2 as pb

from tinsmith_conformance.data import TOKENS, learned, ragged
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import POLL_S, PROTOBUF, Future, Tester, floats, tokens_of
from tinsmith_conformance.verdicts import CheckError, expect, skip

GROUP: Final = Group("wire", "Routes, content types, ids and the forms of results.")


@GROUP.check
def client_config(t: Tester) -> None:
    """client/config answers an object.

    No SDK from 0.18 on can start: it is the first call of each client.
    """
    t.ok("client/config", {"sdk_version": tinker.__version__})


@GROUP.check
def config_of_unknown_sdks(t: Tester) -> None:
    """client/config answers SDKs that it does not know.

    The server stops working on the day of the next release of the SDK.
    """
    t.ok("client/config", {"sdk_version": "99.0.0"})


@GROUP.check
def semaphores_are_positive(t: Tester) -> None:
    """The limits in client/config are above zero.

    The SDK waits for ever, or raises, before its first request.
    """
    limits = ("sample_max_concurrent_requests", "fwdbwd_max_chunk_len", "fwdbwd_max_chunk_bytes_count")
    config = t.ok("client/config", {"sdk_version": tinker.__version__})
    for name in limits:
        expect(config.get(name, 1) > 0, f"{name} is {config.get(name)}; it must be above 0")


@GROUP.check
def dynamic_config(t: Tester) -> None:
    """client/dynamic_config answers an object, or a 404.

    Other errors end the construction of each client.
    """
    response = t.http.post("client/dynamic_config", json={"sdk_version": tinker.__version__})
    if response.status_code != 404:
        expect(response.is_success and isinstance(response.json(), dict), f"status {response.status_code}")


@GROUP.check
def capabilities(t: Tester) -> None:
    """get_server_capabilities lists the model under test.

    Users cannot learn what they may train: `tinker model list` is empty or fails.
    """
    models = t.get("get_server_capabilities")["supported_models"]
    names = [each.get("model_name") for each in models]
    expect(t.target.model in names, f"'{t.target.model}' is not among {names}")


@GROUP.check
def context_length(t: Tester) -> None:
    """get_server_capabilities states the context length of the model under test.

    Scripts that size their batches by it fall back to guesses.
    """
    models = t.get("get_server_capabilities")["supported_models"]
    length = next((each.get("max_context_length") for each in models if each.get("model_name") == t.target.model), None)
    expect(isinstance(length, int) and length > 0, f"max_context_length is {length}")


@GROUP.check
def healthz(t: Tester) -> None:
    """The call of healthz answers that the server is well.

    Load balancers and scripts that wait for the server never see it come up.
    """
    expect(t.get("healthz").get("status") == "ok", "the status is not 'ok'")


@GROUP.check
def telemetry(t: Tester) -> None:
    """The SDK's telemetry is accepted.

    Each error that a user sees comes up to 30 s late, because the SDK sends telemetry first.
    """
    body = {"events": [], "platform": "Linux", "sdk_version": tinker.__version__, "session_id": t.session}
    answer = t.ok("telemetry", {**body, "process_uuid": "00000000-0000-0000-0000-000000000000"})
    expect(answer == {"status": "accepted"}, f"the answer is {answer}; it must be {{'status': 'accepted'}}")


@GROUP.check
def heartbeat(t: Tester) -> None:
    """A session's heartbeat is accepted.

    Clients warn that their session is lost, and idle ones are ended.
    """
    t.ok("session_heartbeat", {"session_id": t.session, "type": "session_heartbeat"})


@GROUP.check
def finish(t: Tester) -> None:
    """A session can be finished.

    Training succeeds, and then the `with` block around it raises.
    """
    t.ok_without_body(t.http.post(f"sessions/{t.session}/finish", json={"reason": {"type": "success"}, "detail": None}))


@GROUP.check
def finish_twice(t: Tester) -> None:
    """A session can be finished again.

    A close whose first answer got lost raises after training succeeded.
    """
    for _ in range(2):
        finish(t)


@GROUP.each(["success", "errored", "interrupted"])
def finish_reasons(t: Tester, case: str) -> None:
    """A session can end as '{case}'.

    Closing a client raises, and hides why it was closed.
    """
    body = {"reason": {"type": case}, "detail": "because"}
    t.ok_without_body(t.http.post(f"sessions/{t.session}/finish", json=body))


@GROUP.check
def beats_after_the_end(t: Tester) -> None:
    """The heartbeat of a finished session is answered with 410.

    Clients go on sending heartbeats for sessions that have ended.
    """
    session = t.new_session()
    t.ok_without_body(t.http.post(f"sessions/{session}/finish", json={"reason": {"type": "success"}}))
    status = t.http.post("session_heartbeat", json={"session_id": session}).status_code
    expect(status == 410, f"status {status}")


@GROUP.check
def session_ids(t: Tester) -> None:
    """Session ids are unique and hold no slash.

    Paths of checkpoints cannot be parsed, or lead to somebody else's.
    """
    first, second = t.new_session(), t.new_session()
    expect(first != second, "two sessions have one id")
    expect("/" not in first, f"the id is '{first}'")


@GROUP.check
def model_ids(t: Tester) -> None:
    """A model's id is its session's, with :train: and its number.

    Creating a model from a checkpoint fails: the SDK computes the id by itself.
    """
    for number in range(2):
        model = t.model()
        expect(model.id == f"{t.session}:train:{number}", f"the id is '{model.id}'")


@GROUP.check
def info(t: Tester) -> None:
    """get_info states the base model and the LoRA rank.

    The SDK calls it after each creation, and no training client is made.
    """
    model = t.model(rank=4)
    found = model.info()
    expect(found.get("model_id") == model.id, f"model_id is {found.get('model_id')}")
    name = found.get("model_data", {}).get("model_name")
    expect(name == t.target.model, f"model_data.model_name is {name}: tokenizers cannot be found by it")
    expect(found.get("lora_rank") == 4, f"lora_rank is {found.get('lora_rank')}; the model was created with 4")


@GROUP.check
def submissions_do_not_wait(t: Tester) -> None:
    """A pass is accepted though the one before it has not come.

    A batch that the SDK splits is a deadlock: it sends the first part last.
    """
    model = t.model()
    late = model.forward_backward([learned()], seq_id=2)
    model.forward_backward([learned()], seq_id=1).result()
    late.result()


@GROUP.check
def polls_are_held(t: Tester) -> None:
    """A poll for a result that is not there is held, and ends before the SDK gives up.

    Each waiting request sends hundreds of polls a second, or leaves waiters behind.
    """
    waiting = t.model().forward_backward([learned()], seq_id=2)
    began = time.monotonic()
    try:
        response = waiting.poll()
    except httpx.ReadTimeout:
        raise CheckError(f"the poll was held for more than {POLL_S:g} s") from None
    held = time.monotonic() - began
    pending = response.status_code == 408 or (response.is_success and response.json().get("type") == "try_again")
    expect(pending, f"status {response.status_code}: {response.text[:200]}")
    expect(held > 0.2, f"the poll was held for {held:.3f} s")


@GROUP.check
def passes_are_protobuf(t: Tester) -> None:
    """The result of a pass is protobuf, and says so.

    Every forward_backward raises ValueError in the SDK.
    """
    kind = t.model().forward_backward([learned()]).finished().headers.get("content-type", "")
    expect(PROTOBUF in kind, f"the content type is '{kind}'")


@GROUP.check
def samples_are_protobuf(t: Tester) -> None:
    """The result of a sample is protobuf, and says so.

    Every sample raises ValueError in the SDK.
    """
    sampler = t.sampler()
    kind = sampler.send(sampler.body()).finished().headers.get("content-type", "")
    expect(PROTOBUF in kind, f"the content type is '{kind}'")


@GROUP.check
def sequence_ids(t: Tester) -> None:
    """A call of asample answers with one sequence id for each sample.

    Every sample fails with an AssertionError since SDK 0.26.
    """
    sampler = t.sampler()
    ids = sampler.send(sampler.body(n=3)).submitted.get("sample_sequence_ids")
    expect(isinstance(ids, list) and len(set(ids)) == 3, f"sample_sequence_ids is {ids}")


@GROUP.check
def one_result_per_datum(t: Tester) -> None:
    """A pass returns one result for each datum, in order, and as long as its targets.

    Losses are computed for the wrong sequences.
    """
    data = ragged(5)
    lengths = [len(each) for each in t.model().forward(data).logprobs]
    expect(lengths == [len(each.tokens) for each in data], f"the lengths are {lengths}")


@GROUP.check
def logprobs_are_flat(t: Tester) -> None:
    """Logprobs have one dimension for targets of one dimension.

    Recipes that index them with a mask raise.
    """
    shape = t.model().forward([learned()]).fields[0]["logprobs"].shape
    expect(shape == (len(TOKENS) - 1,), f"the shape is {shape}")


@GROUP.check
def metrics_have_reductions(t: Tester) -> None:
    """Each metric of a pass has one colon, before a way to combine it.

    The SDK raises ValueError for every forward_backward.
    """
    metrics = t.model().forward([learned()]).metrics
    wrong = [name for name in metrics if name.count(":") != 1]
    expect(not wrong, f"these do not: {wrong}")


@GROUP.check
def loss_sum(t: Tester) -> None:
    """The metrics of a pass hold loss:sum.

    forward_backward_custom raises KeyError, and nobody sees a loss.
    """
    expect("loss:sum" in t.model().forward([learned()]).metrics, "it is missing")


@GROUP.check
def results_stay(t: Tester) -> None:
    """A result can be fetched again, with the same bytes.

    A client whose connection broke while it read loses a step of training.
    """
    passed = t.model().forward_backward([learned()])
    first, again = passed.finished().content, passed.finished().content
    expect(first == again, "the second fetch has other bytes")


@GROUP.check
def results_of_samples_stay(t: Tester) -> None:
    """The result of a sample can be fetched again, with the same tokens.

    A client whose connection broke gets other tokens than were scored.
    """
    sampler = t.sampler()
    drawn = sampler.send(sampler.body())
    expect(drawn.finished().content == drawn.finished().content, "the second fetch has other bytes")


@GROUP.check
def no_error_key(t: Tester) -> None:
    """The result of a step that succeeded has no `error`.

    The SDK takes every step for a failure, even if the value is null.
    """
    model = t.model()
    model.forward_backward([learned()]).result()
    body = model.optim_step().finished().json()
    expect("error" not in body, f"the result is {body}")


@GROUP.check
def metrics_of_steps_are_numbers(t: Tester) -> None:
    """The metrics of a step are numbers.

    Every optim_step fails validation in the SDK.
    """
    model = t.model()
    model.forward_backward([learned()]).result()
    metrics = model.optim_step().result().get("metrics") or {}
    wrong = {name: value for name, value in metrics.items() if not _is_number(value)}
    expect(not wrong, f"these are not: {wrong}")


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return not isinstance(value, bool)


@GROUP.check
def many_chunks(t: Tester) -> None:
    """The text chunks of a sequence are joined.

    Prompts of the cookbook come in two chunks: the model would read half of them.
    """
    model = t.model()
    one, three = (model.forward([learned(chunks=count)]).logprobs[0] for count in (1, 3))
    expect(np.array_equal(one, three), "one chunk and three have other logprobs")


@GROUP.check
def many_chunks_of_prompts(t: Tester) -> None:
    """The text chunks of a prompt are joined.

    Prompts of the cookbook come in two chunks: the model would read half of them.
    """
    sampler = t.sampler()
    body = sampler.body(max_tokens=1, _prompt_logprobs=True)
    split = [{"type": "encoded_text", "tokens": list(part)} for part in (TOKENS[:3], TOKENS[3:])]
    scores = floats(sampler.send({**body, "prompt": {"chunks": split}}).result().prompt_logprobs)[1:]
    expect(np.allclose(scores, sampler.scores(), atol=1e-5), "one chunk and two have other logprobs")


@GROUP.check
def shapes_may_be_absent(t: Tester) -> None:
    """A tensor without a shape has one dimension.

    Data that scripts pass as lists is refused.
    """
    model = t.model()
    request = pb.ForwardBackwardRequest()
    request.ParseFromString(model.pass_body([learned()], seq_id=model.number(), forward_only=True))
    for tensor in request.data[0].loss_fn_inputs.values():
        del tensor.shape[:]
    answer = model.send_pass(request.SerializeToString())
    expect(answer.is_success, f"status {answer.status_code}: {answer.text[:200]}")
    Future(t, answer.json(), len).result()


@GROUP.check
def zstd(t: Tester) -> None:
    """A pass may come compressed with zstd where client/config says so.

    The SDK compresses if the server tells it to.
    """
    asked = t.ok("client/config", {"sdk_version": tinker.__version__}).get("proto_compress_fwdbwd")
    model = t.model()
    packed = zstandard.compress(model.pass_body([learned()], seq_id=model.number()))
    answer = model.send_pass(packed, {"Content-Encoding": "zstd"})
    if answer.is_success:
        Future(t, answer.json(), len).result()
    else:
        expect(not asked and answer.status_code in (400, 415), f"status {answer.status_code}: {answer.text[:200]}")


@GROUP.check
def compressed_answers(t: Tester) -> None:
    """Answers are readable by a client that accepts gzip and zstd.

    The SDK cannot read what it asked for.
    """
    answer = t.http.get("get_server_capabilities", headers={"Accept-Encoding": "gzip, deflate, zstd"})
    expect(answer.is_success and "supported_models" in answer.json(), f"status {answer.status_code}")


@GROUP.check
def large_numbers(t: Tester) -> None:
    """Numbers of samples have 64 bits.

    Copies of a sampling client, which count from multiples of 10^9, cannot sample.
    """
    sampler = t.sampler()
    sampler.send({**sampler.body(), "seq_id": 10**18}).result()


@GROUP.check
def whole_records(t: Tester) -> None:
    """Tokens and logprobs of a sample are equally many, and at least one.

    Reinforcement learning fails in the middle of a rollout.
    """
    for sequence in t.sampler().sample(n=4, max_tokens=5).sequences:
        tokens, scores = tokens_of(sequence), floats(sequence.logprobs)
        expect(len(tokens) == len(scores) > 0, f"{len(tokens)} tokens have {len(scores)} logprobs")


@GROUP.check
def batched_polls(t: Tester) -> None:
    """retrieve_futures lists a finished sample, if the server wants to be polled so.

    Thousands of samples in flight never come back.
    """
    asked = t.ok("client/config", {"sdk_version": tinker.__version__}).get("sample_use_retrieve_futures")
    if not asked and t.http.post("retrieve_futures", json={}).status_code in (404, 405):
        skip("the server has no retrieve_futures, and does not ask to be polled so")
    sampler = t.sampler()
    drawn = sampler.send(sampler.body())
    drawn.result()
    found = _completions(t, sampler.id, 0)
    expect([each["request_id"] for each in found["completions"]] == [drawn.id], f"the answer is {found}")


@GROUP.check
def cursors_stand_still(t: Tester) -> None:
    """The cursor of retrieve_futures moves only when a sample finished.

    The SDK spins: it sends polls without a pause.
    """
    if t.http.post("retrieve_futures", json={}).status_code in (404, 405):
        skip("the server has no retrieve_futures")
    sampler = t.sampler()
    sampler.draw()
    first = _completions(t, sampler.id, 0)["cursor"]
    again = _completions(t, sampler.id, first)
    expect(again["cursor"] == first and not again["completions"], f"from {first} it moved to {again}")


def _completions(t: Tester, sampler: str, cursor: int) -> dict[str, Any]:
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    return t.ok("retrieve_futures", {"target": target, "prev_cursor": cursor, "timeout": 0.0})


@GROUP.check
def nulls(t: Tester) -> None:
    """Null for an optional field counts as absent.

    Clients in other languages, which send null for unset fields, are refused.
    """
    t.ok("create_session", {"tags": [], "sdk_version": "0.38.0", "user_metadata": None, "project_id": None})


@GROUP.check
def empty_lists_of_metadata(t: Tester) -> None:
    """A session may have tags, metadata and a name.

    `ServiceClient(user_metadata=...)`, as recipes of the cookbook call it, fails.
    """
    t.new_session(tags=["a"], user_metadata={"recipe": "sft"}, display_name="mine")
