"""What the vLLM process is given of a snapshot, and the turns that snapshots take. No vLLM."""

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from typer.testing import CliRunner
from vllm_harness import blank_adapter, random_adapter

from tinsmith import Array, HostSnapshot, LoraConfig, ModelState, ServerError, UnsupportedError
from tinsmith.checkpoints.saved import write_checkpoint
from tinsmith.commands.cli import build_group
from tinsmith.plugins.loading import Plugins
from tinsmith.testing import assert_same_arrays
from tinsmith_checkpoints.huggingface import (
    Place,
    StoredTensors,
    read_model_config,
    save_as_published,
    tiny_causal_lm,
    weight_places,
)
from tinsmith_vllm.adapters import AdapterFiles
from tinsmith_vllm.memory import AdapterMemory
from tinsmith_vllm.messages import CONFIG, Generate
from tinsmith_vllm.weights import weights_of
from tinsmith_vllm.weights_queue import WeightsQueue

EXPERTS, INNER, HIDDEN, RANK = 6, 96, 64, 3


@pytest.fixture
def files(tmp_path: Path) -> Iterator[AdapterFiles]:
    made = AdapterFiles(tmp_path / "shared", tmp_path)
    yield made
    made.close()


@pytest.fixture
def memory() -> Iterator[AdapterMemory]:
    made = AdapterMemory(count(1))
    yield made
    made.close()


@pytest.fixture(params=["memory", "files"])
def store(request: pytest.FixtureRequest) -> AdapterMemory | AdapterFiles:
    made: AdapterMemory | AdapterFiles = request.getfixturevalue(request.param)
    return made


def shapes(directory: Path) -> dict[str, tuple[int, ...]]:
    return StoredTensors.of(directory, "model").shapes()


def places(directory: Path) -> dict[str, Place]:
    return weight_places(read_model_config(directory), shapes(directory))


def whole_adapter(base: Mapping[str, Place]) -> HostSnapshot:
    """Everything in the layers that adapters train, by the places of a model's weights, and the head."""
    rng, weights = np.random.default_rng(0), dict[str, Array]()

    def add(module: str, A: tuple[int, ...], B: tuple[int, ...]) -> None:
        for side, shape in (("A", A), ("B", B)):
            name = f"base_model.model.{module}.lora_{side}.weight"
            weights[name] = rng.normal(scale=0.2, size=shape).astype(np.float32)

    joined = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    number = 1 + max((int(found[1]) for name in base if (found := re.search(r"experts\.(\d+)\.", name))), default=-1)
    for name, place in base.items():
        module = name.removesuffix(".weight")
        if not module.endswith(("_proj", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")):
            continue
        outputs, inputs = place.shape
        before, experts, rest = module.partition(".experts.")
        if not experts:
            add(module, (RANK, inputs), (outputs, RANK))
        elif rest.startswith("0."):
            shared = rest != "0.down_proj"
            A, B = (1, RANK, inputs) if shared else (number, RANK, inputs), (number if shared else 1, outputs, RANK)
            add(f"{before}.experts.{joined[rest.removeprefix('0.')]}", A, B)
    vocabulary, hidden = base["model.embed_tokens.weight"].shape
    add("lm_head", (RANK, hidden), (vocabulary, RANK))
    return HostSnapshot("whole", LoraConfig(rank=RANK, seed=0), weights)


def expert_adapter() -> HostSnapshot:
    """Attention, experts and the head of the first layer of SHAPES["qwen3_moe"]."""
    sides: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "model.layers.0.self_attn.o_proj": ((RANK, 128), (HIDDEN, RANK)),
        "model.layers.0.mlp.experts.w1": ((1, RANK, HIDDEN), (EXPERTS, INNER, RANK)),
        "model.layers.0.mlp.experts.w3": ((1, RANK, HIDDEN), (EXPERTS, INNER, RANK)),
        "model.layers.0.mlp.experts.w2": ((EXPERTS, RANK, INNER), (1, HIDDEN, RANK)),
        "lm_head": ((RANK, HIDDEN), (300, RANK)),
    }
    blank: Mapping[str, Array] = {
        f"base_model.model.{module}.lora_{side}.weight": np.zeros(shape, np.float32)
        for module, pair in sides.items()
        for side, shape in zip("AB", pair, strict=True)
    }
    return random_adapter("experts", HostSnapshot("blank", LoraConfig(rank=RANK, seed=0), blank), seed=1)


def base_of(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    yield from load_file(directory / "model.safetensors").items()


def test_what_is_merged_is_what_the_command_merges(
    tiny_models: dict[str, Path], tmp_path: Path, store: AdapterMemory | AdapterFiles
) -> None:
    snapshot, base = expert_adapter(), tiny_models["qwen3_moe"]
    originals, found = load_file(base / "model.safetensors"), merged_beside_the_command(snapshot, base, store, tmp_path)
    changed = {name for name in originals if not torch.equal(originals[name], found[name])}
    assert len(changed) == 1 + 3 * EXPERTS, "the head is a matrix of its own beside the embedding"


@pytest.mark.slow  # imports transformers
@pytest.mark.parametrize(
    ("class_name", "tied"),
    [
        ("Qwen3NextForCausalLM", False),  # rows of several modules in one matrix
        ("Qwen3_5MoeForConditionalGeneration", True),  # all experts in one tensor, names of a language part
        ("GptOssForCausalLM", False),  # gate and up alternate, [in, out]
        ("Phi3ForCausalLM", False),
    ],
)
def test_tensors_of_several_modules_are_merged(
    class_name: str, *, tied: bool, tmp_path: Path, memory: AdapterMemory
) -> None:
    base = tmp_path / "base"
    save_as_published(tiny_causal_lm(class_name, {"tie_word_embeddings": tied}, {"tie_word_embeddings": tied}), base)
    found = merged_beside_the_command(whole_adapter(places(base)), base, memory, tmp_path)
    for name, tensor in load_file(base / "model.safetensors").items():
        trained = name.endswith(("_proj", "_proj.weight")) or ".in_proj_" in name
        of_language = "visual" not in name and (name != "lm_head.weight" or not tied)
        assert torch.equal(found[name], tensor) != (of_language and (trained or name == "lm_head.weight")), name
    assert "lm_head.weight" in found


def merged_beside_the_command(
    snapshot: HostSnapshot, base: Path, store: AdapterMemory | AdapterFiles, tmp_path: Path
) -> dict[str, torch.Tensor]:
    """Return what vLLM loads, compared with what `tinsmith checkpoint merge` writes."""
    _, source = store.write_changes(snapshot, places(base))
    found = dict(weights_of(base_of(base), source))
    write_checkpoint(
        tmp_path, "run/weights/x", kind="sampler", base_model=str(base), user_metadata={}, overwrite=False,
        created_at=datetime(2026, 1, 31, tzinfo=UTC),
        state=ModelState(lora=snapshot.lora, weights=snapshot.adapter_weights()),
    )  # fmt: skip
    plugins = Plugins.load()
    command = ["checkpoint", "merge", str(tmp_path / "run/weights/x"), str(tmp_path / "merged")]
    command += ["--base-model", str(base), "--dtype", "float32"]
    result = CliRunner().invoke(build_group(plugins), command, obj=plugins)
    assert result.exit_code == 0, result.output
    merged = {name: torch.from_numpy(array) for name, array in StoredTensors.of(tmp_path / "merged", "model").items()}
    assert found.keys() == merged.keys()
    for name, expected in merged.items():
        np.testing.assert_allclose(found[name], expected, atol=1e-6, rtol=0, err_msg=name)
    return found


def full_snapshot(base: Path, **changed: Array) -> HostSnapshot:
    weights = {name: array + np.float32(0.125) for name, array in StoredTensors.of(base, "model").items()}
    return HostSnapshot("full", LoraConfig(rank=0, seed=0), {**weights, **changed})


def test_fully_trained_weights_are_passed_on_in_the_dtype_of_vllm(
    tiny_models: dict[str, Path], files: AdapterFiles
) -> None:
    base = tiny_models["qwen3"]
    snapshot = full_snapshot(base)
    for dtype, atol in (("float32", 0.0), ("bfloat16", 0.02)):
        _, directory = files.write_all(snapshot, shapes(base), dtype)
        found = dict(weights_of(iter(()), directory))
        assert {str(each.dtype) for each in found.values()} == {f"torch.{dtype}"}
        for name, array in snapshot.adapter_weights().items():
            np.testing.assert_allclose(found[name].float(), array, atol=atol, rtol=0, err_msg=name)


def test_the_base_model_is_its_own_weights(tiny_models: dict[str, Path]) -> None:
    base = StoredTensors.of(tiny_models["qwen3"], "model")
    found = {name: weight.numpy() for name, weight in weights_of(base_of(tiny_models["qwen3"]), None)}
    assert_same_arrays(found, base, "the base model")


def test_weights_that_do_not_fit_are_refused_by_name(tiny_models: dict[str, Path], files: AdapterFiles) -> None:
    base, weights = shapes(tiny_models["qwen3"]), places(tiny_models["qwen3"])
    with pytest.raises(UnsupportedError, match=r"'experts' has 'model.layers.0.mlp.experts.0.*base model has no such"):
        files.write_changes(expert_adapter(), weights)
    odd = full_snapshot(tiny_models["qwen3"], **{"model.norm.weight": np.ones(5, np.float32)})
    with pytest.raises(UnsupportedError, match=r"'full' has 'model.norm.weight' of the shape \[5\].* has \[64\]"):
        files.write_all(odd, base, "float32")
    few = HostSnapshot("few", LoraConfig(rank=0, seed=0), {"model.norm.weight": np.ones(64, np.float32)})
    with pytest.raises(UnsupportedError, match=r"'few' has no 'model.embed_tokens.weight'"):
        files.write_all(few, base, "float32")
    _, directory = files.write_changes(blank_adapter(), weights)
    assert [path.name for path in directory.parent.iterdir() if path.is_dir()] == [directory.name], "others are removed"


def test_an_adapter_that_vllm_applies_keeps_its_names(files: AdapterFiles) -> None:
    """With `enable_moe_shared_loras`, vLLM reads the arrays of experts as they are."""
    snapshot = expert_adapter()
    _, directory = files.write(snapshot, "base")
    found = {name: weight.numpy() for name, weight in load_file(directory / "adapter_model.safetensors").items()}
    assert_same_arrays(found, snapshot.adapter_weights(), "the adapter")
    config = json.loads((directory / "adapter_config.json").read_text())
    assert config["target_modules"] == ["lm_head", "o_proj", "w1", "w2", "w3"]


def test_an_adapter_in_memory_is_that_of_the_files(memory: AdapterMemory, files: AdapterFiles) -> None:
    """What vLLM maps of it, it may change: neither the copy that the snapshot keeps nor other processes see that."""
    snapshot = expert_adapter()
    wanted = {name: array.copy() for name, array in snapshot.adapter_weights().items()}
    _, directory = files.write(snapshot, "base")
    _, path = memory.write(snapshot, "base")
    with safe_open(path, framework="pt") as stored:
        assert json.loads(stored.metadata()[CONFIG]) == json.loads((directory / CONFIG).read_text())
    mapped = load_file(path)
    assert_same_arrays({name: weight.numpy() for name, weight in mapped.items()}, wanted, "the adapter")
    for weight in mapped.values():
        weight.mul_(2)
    assert_same_arrays(snapshot.adapter_weights(), wanted, "what the snapshot keeps")
    assert_same_arrays({name: weight.numpy() for name, weight in load_file(path).items()}, wanted, "read again")
    with pytest.raises(ValueError, match="read-only"):
        next(iter(snapshot.adapter_weights().values()))[...] = 0
    memory.remove(path)
    assert not path.exists()
    assert_same_arrays(snapshot.adapter_weights(), wanted, "what the snapshot keeps, after vLLM was told to drop it")


def test_memory_that_the_system_refuses_is_said_with_the_remedy(
    memory: AdapterMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    told = r"'blank' .* beside 1 others.*Cannot allocate.*resident_snapshot_bytes"
    memory.write(expert_adapter(), "base")
    for name in ("posix_fallocate", "memfd_create"):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, refuse)
            with pytest.raises(ServerError, match=told):
                memory.write(blank_adapter(), "base")
    assert len(memory.open) == 1


def test_full_shared_memory_is_refused_with_the_remedy(
    tiny_models: dict[str, Path], files: AdapterFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = shapes(tiny_models["qwen3"])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    told = r"MiB are free; .* --shm-size.*shared_memory_dir"
    with pytest.raises(ServerError, match=told):
        files.write(blank_adapter(), "base")
    with pytest.raises(ServerError, match=told):
        files.write_changes(blank_adapter(), places(tiny_models["qwen3"]))
    with pytest.raises(ServerError, match=told):
        files.write_all(full_snapshot(tiny_models["qwen3"]), base, "float32")


def request(number: int, adapter_id: int) -> Generate:
    return Generate(
        request_id=number, prompt=b"", seeds=[1, 2], max_tokens=1, temperature=1.0, top_k=0, top_p=1.0,
        stop_tokens=[], num_top=0, adapter_id=adapter_id, cache_salt="s", stream=False, question=None,
    )  # fmt: skip


def chosen(queue: WeightsQueue, *, idle: bool) -> list[int]:
    return [each.request_id for each in queue.next(idle=idle)]


def test_snapshots_take_turns() -> None:
    queue = WeightsQueue()
    for number, adapter_id in enumerate([7, 0, 7, 8]):
        queue.add(request(number, adapter_id))
    assert queue.num_sequences == 8
    assert chosen(queue, idle=False) == [], "the running batch has the weights of the base model"
    assert chosen(queue, idle=True) == [0, 2], "all who wait for the same weights start together"
    queue.loaded = 7
    queue.add(request(4, 7))
    assert chosen(queue, idle=False) == [], "nobody joins while others wait, so the batch drains"
    assert chosen(queue, idle=True) == [1]
    queue.loaded = 0
    queue.add(request(5, 0))
    queue.remove(3)
    assert chosen(queue, idle=True) == [4]
    queue.loaded = 7
    assert chosen(queue, idle=True) == [5]
    queue.loaded = 0
    queue.add(request(6, 0))
    assert chosen(queue, idle=False) == [6], "without others, requests join"
    assert len(queue) == 0
