"""Lists of runs, checkpoints and sessions, and the operations on them."""

from __future__ import annotations

import secrets
import time
from datetime import UTC, datetime
from typing import Any, Final

import httpx
import numpy as np

from tinsmith_conformance.adapters import exported, links
from tinsmith_conformance.data import learned
from tinsmith_conformance.registry import Group
from tinsmith_conformance.tester import Model, Tester
from tinsmith_conformance.verdicts import RequestFailedError, expect, skip

GROUP: Final = Group("rest", "Lists of runs, checkpoints and sessions, and the operations on them.")

_HOUR: Final = 3600
_SAME: Final = 1e-3  # nats: an adapter may be stored in bfloat16


def _aware(value: Any, what: str) -> datetime:
    expect(isinstance(value, str), f"{what} is {value}")
    found = datetime.fromisoformat(str(value).replace("Z", "+00:00"))
    expect(found.tzinfo is not None, f"{what} has no time zone: {value}")
    return found


def _checkpoints(t: Tester, model: Model) -> dict[str, Any]:
    return {each["checkpoint_id"]: each for each in t.get(f"training_runs/{model.id}/checkpoints")["checkpoints"]}


@GROUP.check
def runs_are_listed(t: Tester) -> None:
    """The list of runs holds a new one, and counts all.

    `tinker run list` does not show what is there.
    """
    model = t.model()
    found = t.get("training_runs", limit=100)
    expect(model.id in [each["training_run_id"] for each in found["training_runs"]], "the new one is missing")
    expect(found["cursor"]["total_count"] >= 1, f"cursor is {found['cursor']}")


@GROUP.check
def pages_of_runs(t: Tester) -> None:
    """The list of runs comes in pages.

    The first page comes again and again.
    """
    t.model()
    t.model()
    first, second = (t.get("training_runs", limit=1, offset=offset)["training_runs"] for offset in (0, 1))
    expect(len(first) == len(second) == 1, f"pages of 1 have {len(first)} and {len(second)}")
    expect(first[0]["training_run_id"] != second[0]["training_run_id"], "both pages have the same run")


@GROUP.check
def about_runs(t: Tester) -> None:
    """A run tells its base model, owner, rank and last request.

    `tinker run info` fails, and resuming needs what nobody wrote down.
    """
    model = t.model(rank=4)
    run = t.get(f"training_runs/{model.id}")
    expect(run.get("base_model") == t.target.model, f"base_model is {run.get('base_model')}")
    expect(isinstance(run.get("model_owner"), str), f"model_owner is {run.get('model_owner')}")
    expect(
        (run.get("is_lora"), run.get("lora_rank")) == (True, 4), f"{run.get('is_lora')}, rank {run.get('lora_rank')}"
    )
    _aware(run.get("last_request_time"), "last_request_time")


@GROUP.check
def metadata_of_runs(t: Tester) -> None:
    """A run returns its metadata, as text.

    The cookbook looks for the name of its renderer there; other types fail validation.
    """
    model = t.model(user_metadata={"renderer": "qwen", "step": 3})
    found = t.get(f"training_runs/{model.id}").get("user_metadata")
    expect(found == {"renderer": "qwen", "step": "3"}, f"it is {found}")


@GROUP.check
def last_checkpoints(t: Tester) -> None:
    """A run names its last checkpoints of both kinds.

    `tinker run list` shows runs without checkpoints.
    """
    model = t.model()
    state, snapshot = model.save("one"), model.save_for_sampling("two")
    run = t.get(f"training_runs/{model.id}")
    for name, path in (("last_checkpoint", state), ("last_sampler_checkpoint", snapshot)):
        found = (run.get(name) or {}).get("tinker_path")
        expect(found == path, f"{name} is {found}")


@GROUP.check
def checkpoints_of_a_run(t: Tester) -> None:
    """The checkpoints of a run are listed, with their kind, path, time and size.

    Nobody finds a checkpoint again.
    """
    model = t.model()
    path = model.save("one")
    model.save_for_sampling("one")
    found = _checkpoints(t, model)
    expect(set(found) == {"weights/one", "sampler_weights/one"}, f"they are {sorted(found)}")
    one = found["weights/one"]
    expect(one["checkpoint_type"] == "training" and one["tinker_path"] == path, f"it is {one}")
    expect((one.get("size_bytes") or 0) > 0, f"size_bytes is {one.get('size_bytes')}")
    expect(abs((_aware(one["time"], "time") - datetime.now(UTC)).total_seconds()) < _HOUR, f"its time is {one['time']}")


@GROUP.check
def all_checkpoints(t: Tester) -> None:
    """The list of all checkpoints is newest first, and counts them.

    `tinker checkpoint list` shows the oldest ones.
    """
    model = t.model()
    paths = [model.save(name) for name in ("one", "two")]
    found = t.get("checkpoints", limit=2)
    expect([each["tinker_path"] for each in found["checkpoints"]] == paths[::-1], "the newest two are others")
    expect(found["cursor"]["total_count"] >= 2, f"cursor is {found.get('cursor')}")


@GROUP.check
def publishing(t: Tester) -> None:
    """A checkpoint can be published and made private, also twice.

    Sharing fails, or the SDK repeats a 409 for five minutes.
    """
    model = t.model()
    model.save("one")
    place = f"training_runs/{model.id}/checkpoints/weights/one/publish"
    for method, public in (("POST", True), ("POST", True), ("DELETE", False), ("DELETE", False)):
        status = t.http.request(method, place).status_code
        expect(status < 300 or status in (400, 422), f"{method}: status {status}")
        seen = _checkpoints(t, model)["weights/one"].get("public", False)
        expect(seen is public, f"after {method}, public is {seen}")


@GROUP.check
def time_to_live(t: Tester) -> None:
    """A checkpoint's time to live can be set, and taken back.

    Checkpoints vanish, or fill the disk.
    """
    model = t.model()
    model.save("one")
    place = f"training_runs/{model.id}/checkpoints/weights/one/ttl"
    t.ok_without_body(t.http.put(place, json={"ttl_seconds": 2 * _HOUR}))
    expires = _aware(_checkpoints(t, model)["weights/one"].get("expires_at"), "expires_at")
    left = (expires - datetime.now(UTC)).total_seconds()
    expect(abs(left - 2 * _HOUR) < _HOUR / 2, f"it expires in {left:.0f} s")
    t.ok_without_body(t.http.put(place, json={"ttl_seconds": None}))
    expect(_checkpoints(t, model)["weights/one"].get("expires_at") is None, "it still expires")


@GROUP.check
def saved_time_to_live(t: Tester) -> None:
    """A checkpoint that is saved with a time to live expires.

    Rolling checkpoints of the cookbook fill the disk.
    """
    model = t.model()
    model.save("one", ttl_seconds=2 * _HOUR)
    left = _aware(_checkpoints(t, model)["weights/one"].get("expires_at"), "expires_at") - datetime.now(UTC)
    expect(abs(left.total_seconds() - 2 * _HOUR) < _HOUR / 2, f"it expires in {left}")


@GROUP.check
def deleting(t: Tester) -> None:
    """A checkpoint can be deleted, and is then gone.

    Disks fill, and deleted checkpoints can still be loaded.
    """
    model = t.model()
    path = model.save("one")
    t.ok_without_body(t.http.delete(f"training_runs/{model.id}/checkpoints/weights/one"))
    expect(not _checkpoints(t, model), "it is still listed")
    t.refusal("load_weights", {"session_id": t.session, "model_seq_id": 80, "path": path, "optimizer": True})


@GROUP.check
def deleting_one_kind(t: Tester) -> None:
    """Deleting a checkpoint leaves the one of the other kind with the same name.

    The cookbook, which deletes old states, loses its samplers.
    """
    model = t.model()
    model.save("one")
    model.save_for_sampling("one")
    t.ok_without_body(t.http.delete(f"training_runs/{model.id}/checkpoints/weights/one"))
    expect(set(_checkpoints(t, model)) == {"sampler_weights/one"}, f"there are {sorted(_checkpoints(t, model))}")


@GROUP.check
def deleting_twice(t: Tester) -> None:
    """Deleting again succeeds or gets a 404.

    A delete whose answer got lost raises, or is repeated for minutes.
    """
    model = t.model()
    model.save("one")
    place = f"training_runs/{model.id}/checkpoints/weights/one"
    t.ok_without_body(t.http.delete(place))
    status = t.http.delete(place).status_code
    expect(status < 300 or status == 404, f"status {status}")


@GROUP.check
def sessions_are_listed(t: Tester) -> None:
    """The list of sessions holds a new one.

    Nobody finds a session again.
    """
    expect(t.session in t.get("sessions", limit=100)["sessions"], "it is missing")


@GROUP.check
def about_sessions(t: Tester) -> None:
    """A session tells its runs, samplers, metadata and name.

    What a script did cannot be found.
    """
    session = t.new_session(user_metadata={"recipe": "sft"}, display_name="mine")
    model = t.model(session_id=session, model_seq_id=0)
    found = t.get(f"sessions/{session}")
    expect(found.get("training_run_ids") == [model.id], f"training_run_ids is {found.get('training_run_ids')}")
    expect(isinstance(found.get("sampler_ids"), list), f"sampler_ids is {found.get('sampler_ids')}")
    expect(found.get("user_metadata") == {"recipe": "sft"}, f"user_metadata is {found.get('user_metadata')}")


@GROUP.check
def projects(t: Tester) -> None:
    """A session can be put into a project.

    `ServiceClient(project_id=...)` fails.
    """
    t.ok_without_body(t.http.put(f"sessions/{t.session}/project", json={"project_id": "mine"}))


@GROUP.check
def about_weights(t: Tester) -> None:
    """weights_info tells base model and rank of a checkpoint.

    SDKs up to 0.36 cannot resume, and `push-hf` fails.
    """
    found = t.ok("weights_info", {"tinker_path": t.model(rank=4).save()})
    expect(found.get("base_model") == t.target.model, f"base_model is {found.get('base_model')}")
    expect((found.get("is_lora"), found.get("lora_rank")) == (True, 4), f"it is {found}")


@GROUP.check
def downloads(t: Tester) -> None:
    """An export has links that need no key, with their size, for a while.

    `tinker checkpoint download` fails.
    """
    answer = links(t, t.model(), "export")
    expect(_aware(answer.get("expires"), "expires") > datetime.now(UTC), "the links have expired")
    expect({"adapter_config.json", "adapter_model.safetensors"} <= set(answer["urls"]), f"files: {answer['urls']}")
    for name, url in answer["urls"].items():
        response = httpx.get(url, timeout=60)
        expect(response.is_success, f"{name}: status {response.status_code}")
        size = int(response.headers.get("content-length", -1))
        expect(size == len(response.content), f"{name}: content-length is {size}, of {len(response.content)}")


@GROUP.check
def forged_links(t: Tester) -> None:
    """A link with another name does not work.

    Anybody reads any file of the server.
    """
    url = links(t, t.model(), "export")["urls"]["adapter_config.json"]
    status = httpx.get(url.replace("adapter_config.json", "adapter_model.bin"), timeout=60).status_code
    expect(400 <= status < 500, f"status {status}")


@GROUP.check
def configuration_of_exports(t: Tester) -> None:
    """An export's configuration names its rank, scale and modules.

    PEFT loads some of the modules, silently.
    """
    config = httpx.get(links(t, t.model(rank=4), "export")["urls"]["adapter_config.json"], timeout=60).json()
    expect(config.get("r") == 4, f"r is {config.get('r')}")
    expect(config.get("lora_alpha", 0) > 0, f"lora_alpha is {config.get('lora_alpha')}")
    expect(config.get("target_modules"), "target_modules is empty: PEFT takes its own default")


@GROUP.check
def exports_are_trained(t: Tester) -> None:
    """An export holds the trained weights.

    A downloaded adapter is the untrained one.
    """
    model = t.model()
    before = exported(t, model, "before")
    model.step([learned()], learning_rate=0.05)
    after = exported(t, model, "after")
    expect(any((after[name] != values).any() for name, values in before.items()), "training changed nothing in it")


@GROUP.check
def usage(t: Tester) -> None:
    """The billing endpoints answer, if only with nothing.

    `tinker billing` fails.
    """
    found = t.get("billing/usage/events", starting_on="2026-01-01T00:00:00Z", ending_before="2026-01-02T00:00:00Z")
    expect(isinstance(found.get("data"), list), f"it is {found}")
    found = t.get("billing/usage/checkpoints/current")
    expect(isinstance(found.get("data"), list), f"it is {found}")


@GROUP.check
def exchanged_keys(t: Tester) -> None:
    """A key is exchanged for a token that works, where the server asks for it.

    No client starts.
    """
    if not t.ok("client/config", {"sdk_version": "0.38.0"}).get("pjwt_auth_enabled"):
        return
    token = t.ok("auth/token", {})["jwt"]
    expect(token.startswith("eyJ"), "it is no JWT")
    answer = t.http.get("sessions", headers={"X-API-Key": token})
    expect(answer.is_success, f"status {answer.status_code}")


@GROUP.check
def forged_tokens(t: Tester) -> None:
    """A forged token gets a 401.

    Anybody is anybody.
    """
    forged = "eyJhbGciOiJub25lIn0.eyJzdWIiOiJhZG1pbiIsImV4cCI6OTk5OTk5OTk5OX0."
    status = t.http.get("sessions", headers={"X-API-Key": forged}).status_code
    expect(status in (401, 403), f"status {status}")


@GROUP.each(["training_runs/none:train:0", "sessions/none", "samplers/none", "training_runs/none:train:0/checkpoints"])
def absent(t: Tester, case: str) -> None:
    """{case}, which is not there, gets a 404.

    Scripts that look whether something exists fail otherwise.
    """
    status = t.http.get(case).status_code
    expect(status == 404, f"status {status}")


def _answered(t: Tester, path: str, body: dict[str, Any]) -> Any:
    """Skip the check if the server does not offer the call."""
    answer = t.http.post(path, json=body)
    if answer.status_code in (404, 405, 501) or "not offered" in answer.text:
        skip(f"the server does not offer {path}")
    expect(answer.is_success, f"{path}: status {answer.status_code}, {answer.text[:300]}")
    return answer.json()


@GROUP.check
def copies(t: Tester) -> None:
    """A copy of a checkpoint lives on when its source is deleted, and a repeat makes no second one.

    What was archived is gone, or the disk fills with copies.
    """
    model = t.model()
    model.step([learned()], learning_rate=0.05)
    source = model.save("one")
    body = {"source_path": source, "destination_project_id": "conformance"}
    t.http.headers["X-Idempotency-Key"] = f"copy of {source}"
    try:
        copy, again = (_answered(t, "copy_weights", body)["tinker_path"] for _ in range(2))
    finally:
        del t.http.headers["X-Idempotency-Key"]
    expect(copy == again, f"a repeat made {again} beside {copy}")
    t.ok_without_body(t.http.delete(f"training_runs/{model.id}/checkpoints/weights/one"))
    expect(t.ok("weights_info", {"tinker_path": copy})["base_model"] == t.target.model, "the copy is of another model")


@GROUP.check
def searching_sessions(t: Tester) -> None:
    """A search of sessions finds those with the metadata that it names, newest first in pages.

    Nobody finds a run among thousands.
    """
    mark = secrets.token_hex(8)
    made = [t.new_session(user_metadata={"mark": mark, "number": str(number)}) for number in range(3)]
    t.new_session(user_metadata={"number": "0"})
    found: list[str] = []
    body: dict[str, Any] = {"user_metadata": {"mark": mark}, "limit": 2}
    for _ in range(9):
        page = _answered(t, "sessions/search", body)
        found += [each["session_id"] for each in page["sessions"]]
        if not page.get("next_cursor"):
            break
        body["cursor"] = page["next_cursor"]
    expect(found == made[::-1], f"{found} of {made[::-1]}")


@GROUP.check
def searching_checkpoints(t: Tester) -> None:
    """A search of checkpoints finds those of the kind and with the metadata that it names.

    `search_checkpoints` of SDK 0.39 finds nothing, or everything.
    """
    model, mark = t.model(), secrets.token_hex(8)
    path = model.save("one", user_metadata={"mark": mark})
    model.save("two")
    body = {"user_metadata": {"mark": mark}, "checkpoint_type": "training"}
    found = _answered(t, "checkpoints/search", body)["checkpoints"]
    expect([each["tinker_path"] for each in found] == [path], f"it found {found}")
    expect(found[0].get("base_model") == t.target.model, f"base_model is {found[0].get('base_model')}")
    others = _answered(t, "checkpoints/search", {**body, "checkpoint_type": "sampler"})["checkpoints"]
    expect(not others, f"of another kind: {others}")


_RECIPIENT: Final = "age198nahwnt85nknlheww3pk8l9uuqheemdqgss5fwgzx5q5h3hfqdqxhjd6d"
"""A public key of age. Nobody has kept the other half."""


@GROUP.check
def audit_log(t: Tester) -> None:
    """The audit log tells who saved, published and deleted a checkpoint, and nobody else.

    Nobody can say who did what, or everybody reads what others do.
    """
    answer = t.http.get("audit")
    if answer.status_code in (403, 404, 405, 501) or "not offered" in answer.text:
        skip("the server keeps no audit log, or the key may not read it")
    day = datetime.now(UTC).date().isoformat()
    model = t.model()
    path, place = model.save("one"), f"training_runs/{model.id}/checkpoints/weights/one"
    t.ok_without_body(t.http.post(f"{place}/publish"))
    t.ok_without_body(t.http.delete(place))
    days = {day, datetime.now(UTC).date().isoformat()}  # midnight may have passed
    found = [each for day in sorted(days) for each in t.get("audit", day=day)["entries"] if path in str(each)]
    actions = [str(each.get("event")).partition("_")[2] for each in found]
    expect(actions == ["create", "publish", "delete"], f"its events are {[each.get('event') for each in found]}")
    for each in found:
        _aware(each.get("timestamp"), "timestamp")
    other = t.other()
    theirs = [each for day in sorted(days) for each in other.get("audit", day=day)["entries"]]
    expect(path not in str(theirs), "another key reads of it")


@GROUP.check
def uploads(t: Tester) -> None:
    """An adapter that was exported can be uploaded by links, and computes the same.

    Nobody can bring an adapter of their own.
    """
    model = t.model(rank=4)
    model.step([learned()], learning_rate=0.05)
    files = {
        name: httpx.get(url, timeout=60).raise_for_status().content
        for name, url in links(t, model, "export")["urls"].items()
        if name in ("adapter_config.json", "adapter_model.safetensors")
    }
    started = _answered(t, "external_weights_upload_start", {"base_model": t.target.model, "lora_config": {"rank": 4}})
    urls = {name: each if isinstance(each, str) else each["url"] for name, each in started["urls"].items()}
    expect(urls.keys() == files.keys(), f"it has links for {sorted(urls)}")
    early = t.http.post("external_weights_upload_finish", json={"upload_id": started["upload_id"]})
    expect(400 <= early.status_code < 500, f"without files it can be finished: status {early.status_code}")
    for name, url in urls.items():
        status = httpx.put(url.replace(name, f"x{name}"), content=files[name], timeout=60).status_code
        expect(400 <= status < 500, f"a link that was changed takes a file: status {status}")
        t.ok_without_body(httpx.put(url, content=files[name], timeout=60))
    path = t.ok("external_weights_upload_finish", {"upload_id": started["upload_id"]})["tinker_path"]
    uploaded = t.model_from(path, optimizer=False)
    difference = float(np.abs(uploaded.logprobs() - model.logprobs()).max())
    expect(difference < _SAME, f"logprobs differ by {difference}")


@GROUP.check
def encrypted_exports(t: Tester) -> None:
    """An export for recipients is encrypted.

    Whoever reads the file on its way has the weights; `weights.download` of the cookbook fails.
    """
    model = t.model()
    body = {"model_id": model.id, "seq_id": model.number(), "path": "secret", "age_encryption_recipients": [_RECIPIENT]}
    answer = t.http.post("save_weights_external", json=body)
    if answer.status_code in (400, 422, 501):
        skip(f"the server does not encrypt exports: {answer.text[:300]}")
    try:
        path = t.future(answer).result()["path"]
    except RequestFailedError as error:
        skip(f"the server does not encrypt exports: {error.message}")
    place = f"training_runs/{model.id}/checkpoints/{path.split('/', 3)[3]}/external_weights_urls"
    for name, url in t.get(place)["urls"].items():
        content = httpx.get(url, timeout=60).raise_for_status().content
        expect(name.endswith(".age"), f"a file is called {name}")
        expect(content.startswith(b"age-encryption.org/v1"), f"{name} is not encrypted")


_KEY_ENDS_S: Final = 10.0  # servers may remember a key for a while


@GROUP.check
def made_keys(t: Tester) -> None:
    """A key that was made over HTTP reads what its maker reads until it is deleted, and nobody else can delete it.

    A key that was lost goes on working, or one tenant shuts another out.
    """
    if t.http.get("auth/apikeys").status_code != 200:
        skip("the server lists no API keys over HTTP")
    session, other = t.session, t.other()
    key, key_id = _made_key(t)
    try:
        with _with_key(t, key) as holder:
            expect(holder.get(f"sessions/{session}").status_code == 200, "it does not read what its maker has")
            listed = t.http.get("auth/apikeys").text
            expect(key_id in listed and key not in listed, "the list lacks its id, or shows the key itself")
            expect(key_id not in other.http.get("auth/apikeys").text, "another key's list has it")
            status = other.http.delete(f"auth/apikeys/{key_id}").status_code
            expect(status == 404, f"another key deletes it: status {status}")
            expect(holder.get("auth/apikey/me").status_code == 200, "it is refused while it is there")
            t.ok_without_body(t.http.delete(f"auth/apikeys/{key_id}"))
            _expect_refused(holder)
    finally:
        t.http.delete(f"auth/apikeys/{key_id}")  # of a server that fails: no key stays behind
    key, key_id = _made_key(t)
    try:
        with _with_key(t, key) as holder:
            t.ok_without_body(holder.delete("auth/apikey/me"))
            _expect_refused(holder)
    finally:
        t.http.delete(f"auth/apikeys/{key_id}")
    expect(t.http.get(f"sessions/{session}").status_code == 200, "with it, its maker's own key has gone")


def _made_key(t: Tester) -> tuple[str, str]:
    """Return a new key, and its id."""
    answer = t.http.post("auth/apikeys", json={"name": "conformance"})
    if answer.status_code in (400, 404, 405, 501):
        skip(f"the server makes no API keys for this one: {answer.text[:200]}")
    t.ok_without_body(answer)
    made = answer.json()
    key, key_id = made.get("key"), made.get("key_id")
    expect(isinstance(key, str) and isinstance(key_id, str), f"the answer lacks the key or its id: {sorted(made)}")
    expect(key not in (t.key, t.target.key, t.target.other_key), "the new key is one that there was before")
    return str(key), str(key_id)


def _with_key(t: Tester, key: str) -> httpx.Client:
    return httpx.Client(base_url=t.http.base_url, headers={"X-API-Key": key}, timeout=60)


def _expect_refused(holder: httpx.Client) -> None:
    ends = time.monotonic() + _KEY_ENDS_S
    while (status := holder.get("auth/apikey/me").status_code) == 200 and time.monotonic() < ends:
        time.sleep(0.1)
    expect(status in (401, 403), f"{_KEY_ENDS_S:g} s after it was deleted, it gets status {status}")
