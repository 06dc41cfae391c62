"""What a model directory may hold, and the errors where it does not. Rotary frequencies against transformers."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

import jax
import numpy as np
import pytest
import torch
from jax._src import hardware_utils  # where JAX counts TPU chips
from jax_harness import LOSSES, add_model, make_backend, make_op
from safetensors import torch as torch_files
from safetensors.numpy import load_file, save_file
from transformers import LlamaConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tinsmith import BackendContext, ConfigError, Forward, LoraConfig, Placement
from tinsmith.testing.int8_model import write_int8_model
from tinsmith_checkpoints.huggingface import StoredTensors, WeightFiles, read_rope
from tinsmith_checkpoints.huggingface.int8 import W8A16, Int8
from tinsmith_jax import plugin, runtime
from tinsmith_jax.backend import JaxBackend
from tinsmith_jax.config import JaxConfig, JaxSamplerConfig
from tinsmith_jax.families import config_of, read_config
from tinsmith_jax.placing import sampler_demand, trainer_demand
from tinsmith_jax.weights import load_base

pytestmark = pytest.mark.usefixtures("quick_compilation")

ROPES: Mapping[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 512},
}


@pytest.fixture
def directory(tiny_models: Mapping[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_models["qwen3"], tmp_path / "model"))


def edit(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("kind", ROPES)
def test_rotary_frequencies(kind: str, share: float) -> None:
    parameters = {"rope_type": kind, "rope_theta": 10_000.0, "partial_rotary_factor": share, **ROPES[kind]}
    config = LlamaConfig(hidden_size=128, num_attention_heads=4, rope_parameters=parameters)
    inv_freq, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    ours = read_rope({"rope_parameters": parameters, "max_position_embeddings": 2048}, 32, "config.json", partial=1.0)
    np.testing.assert_allclose(ours.inv_freq, inv_freq.numpy(), rtol=1e-6)
    assert ours.factor == pytest.approx(factor)


def test_a_part_of_each_head_rotates_only_where_a_model_does_so() -> None:
    assert read_rope({}, 32, "", partial=0.25) == read_rope({"partial_rotary_factor": 0.25}, 32, "", partial=1.0)
    with pytest.raises(ConfigError, match="partial rotary embeddings are not supported"):
        read_rope({"partial_rotary_factor": 0.25}, 32, "")


def test_the_older_spelling_of_rope() -> None:
    old = {"rope_theta": 10_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}
    assert read_rope(old, 32, "") == read_rope(new, 32, "")


def test_sharded_files_hold_the_same_model(directory: Path, jax_cache: Path, tiny_backend: JaxBackend) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, directory / file)
    weight_map = {name: file for file, part in shards.items() for name in part}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    results = []
    for backend in (tiny_backend, make_backend(directory, jax_cache)):
        add_model(backend, "m", LoraConfig(rank=1, seed=0))
        (output,) = backend.forward([Forward(model_id="m", data=make_op("m", 0, (9,)).data)])
        results.append(output.loss_fn_outputs[0]["logprobs"])
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_8_bit_integers_are_read_as_what_they_stand_for(
    kind: str, tiny_models: Mapping[str, Path], tmp_path: Path
) -> None:
    write_int8_model(tiny_models[kind], tmp_path / "int8", tmp_path / "plain", group_size=16)
    bases = [
        load_base(tmp_path / name, read_config(tmp_path / name), "float32", lambda *_: None)
        for name in ("int8", "plain")
    ]
    assert read_config(tmp_path / "int8").int8 == Int8(16)
    left, right = (jax.tree.leaves_with_path(base) for base in bases)
    for (name, one), (_, other) in zip(left, right, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(name))


def _drop_tensor(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, directory / "model.safetensors")


def _break_file(directory: Path) -> None:
    (directory / "model.safetensors").write_bytes(b"not a safetensors file")


def _break_json(directory: Path) -> None:
    (directory / "config.json").write_text("{")


BROKEN: Mapping[str, tuple[Callable[[Path], None], str]] = {
    "no config": (
        lambda path: (path / "config.json").unlink(),
        "Hugging Face model directory: it has no config.json",
    ),
    "bad config": (_break_json, "cannot be read as JSON"),
    "architecture": (lambda path: edit(path, architectures=["GPT2LMHeadModel"]), "'GPT2LMHeadModel' is not supported"),
    "rope": (lambda path: edit(path, rope_parameters={"rope_type": "dynamic"}), "'dynamic' is not supported"),
    "window": (lambda path: edit(path, use_sliding_window=True), "use_sliding_window is True"),
    "shape": (lambda path: edit(path, vocab_size=161), r"has shape \(160, 64\), config.json says \(161, 64\)"),
    "missing key": (lambda path: edit(path, rope_parameters={"rope_type": "linear"}), "'linear' needs 'factor'"),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), "neither model.safetensors nor"),
    "no tensor": (_drop_tensor, "'model.layers.1.mlp.up_proj.weight' is missing"),
    "bad weights": (_break_file, "cannot be read"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_directories_are_named(directory: Path, jax_cache: Path, case: str) -> None:
    damage, message = BROKEN[case]
    damage(directory)
    with pytest.raises(ConfigError, match=message):
        make_backend(directory, jax_cache)


VALUES: Final = (None, True, -1, 0, 1.5, 1 << 80, "x", "", [], [1], {}, {"a": 1}, [[]])


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")  # of frequencies from absurd values
def test_a_value_of_any_type_in_config_json_is_no_crash(kind: str, tiny_models: Mapping[str, Path]) -> None:
    """The supervisor would take any other exception for a crash."""
    config, refused = json.loads((tiny_models[kind] / "config.json").read_text()), 0
    for name in (*config, "quantization_config", "rope_scaling", "text_config"):
        for value in VALUES:
            try:
                config_of({**config, name: value}, tiny_models[kind] / "config.json")
            except ConfigError:
                refused += 1
    assert refused > len(VALUES)


def test_a_model_needs_a_directory(jax_cache: Path) -> None:
    context = BackendContext(model_name="tiny", model_path=None, cache_dir=jax_cache, losses=LOSSES)
    with pytest.raises(ConfigError, match="'tiny' has no directory"):
        JaxBackend(JaxConfig(), context)


def test_a_platform_that_is_not_there_is_told_as_a_misconfiguration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No later start finds it. A device that another process uses may be free then."""

    def unable(why: str) -> None:
        def fail() -> str:
            raise RuntimeError(f"Unable to initialize backend 'tpu': {why}\nmore")

        monkeypatch.setattr(jax, "default_backend", fail)

    unable("INTERNAL: Failed to open libtpu.so")
    with pytest.raises(ConfigError, match=r"no such platform here: .* libtpu.so; set or unset JAX_PLATFORMS"):
        runtime.prepare(tmp_path, kernels=False)
    unable("ABORTED: The TPU is already in use by process 7")
    with pytest.raises(RuntimeError, match="already in use"):
        runtime.prepare(tmp_path, kernels=False)


BUSY = "Backend 'cuda' failed to initialize: RESOURCE_EXHAUSTED: out of memory"


@pytest.fixture
def reason(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """JAX as it is if nothing that computes on accelerators is installed. The test may change the reason."""
    reason = {"is": "Unknown backend {}. Available backends are ['cpu']"}

    def devices(platform: str | None = None) -> list[Any]:
        raise RuntimeError(reason["is"].format(platform))

    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(jax, "devices", devices)
    before = jax.config.jax_platforms  # type: ignore[attr-defined]  # as in runtime.py
    jax.config.update("jax_platforms", None)
    yield reason
    jax.config.update("jax_platforms", before)


def _give_gpus(monkeypatch: pytest.MonkeyPatch, number: int, _: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number))))


def _give_tpus(monkeypatch: pytest.MonkeyPatch, number: int, devices: Path) -> None:
    """Four chips are on the bus, and the process, in its container, may open so many."""
    _give_gpus(monkeypatch, 0, devices)
    monkeypatch.setattr(hardware_utils, "num_available_tpu_chips_and_device_id", lambda: (4, None))
    monkeypatch.setattr(runtime, "DEVICES", devices / str(number))
    for name in range(number):
        (devices / str(number) / "vfio").mkdir(parents=True, exist_ok=True)
        (devices / str(number) / "vfio" / str(name)).touch()


@pytest.mark.parametrize(
    ("give", "refused"),
    [
        (_give_gpus, r"jax .* \(Unknown backend cuda.*\), and CUDA_VISIBLE_DEVICES is '0': .* tinsmith-jax\[cuda13\]"),
        (_give_tpus, r"jax .* \(Unknown backend tpu.*\), and this machine offers 1 TPU chip: .* tinsmith-jax\[tpu\]"),
    ],
    ids=["gpu", "tpu"],
)
def test_the_cpu_never_takes_the_place_of_an_accelerator(
    reason: dict[str, str],
    directory: Path,
    jax_cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    give: Callable[[pytest.MonkeyPatch, int, Path], None],
    refused: str,
) -> None:
    """It trained there in float32, while the server had printed how much of the card it would take."""
    give(monkeypatch, 1, tmp_path)
    context = BackendContext(model_name="m", model_path=directory, cache_dir=jax_cache, losses=LOSSES)
    starts: list[Callable[[], object]] = [
        lambda: plugin.create(JaxConfig(), context),
        lambda: plugin.create_sampler(JaxSamplerConfig(), context),
        lambda: plugin.diagnose(JaxConfig(), None),
        lambda: plugin.diagnose_sampler(JaxSamplerConfig(), None),
    ]
    for start in starts:
        with pytest.raises(ConfigError, match=refused):
            start()
    reason["is"] = BUSY  # it may be free at the next start
    with pytest.raises(RuntimeError, match="out of memory"):
        runtime.computing_platform()
    jax.config.update("jax_platforms", "cpu")  # asked for
    assert runtime.computing_platform() == "cpu"
    jax.config.update("jax_platforms", None)
    give(monkeypatch, 0, tmp_path)
    assert runtime.computing_platform() == "cpu"


def test_no_gpu_is_taken_if_jax_is_to_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = JaxConfig.model_validate({"mesh": {"data": 2}, "launcher": "ray", "control_address": "h:1"})

    def numbers() -> list[int | None]:
        demands = [trainer_demand(each, None, Placement()) for each in (JaxConfig(), elsewhere)]
        return [each.num_devices for each in (*demands, sampler_demand(JaxSamplerConfig(), None, Placement()))]

    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert numbers() == [1, 0, 1]
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert numbers() == [0, 0, 0]


def test_mxfp4_is_read_as_the_numbers_it_stands_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 8, 2, 16), dtype=np.uint8)
    scales = rng.integers(100, 150, (3, 8, 2), dtype=np.uint8)
    save_file({"x_blocks": blocks, "x_scales": scales}, tmp_path / "model.safetensors")
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32).numpy()
    with WeightFiles(tmp_path, framework="numpy") as files:
        np.testing.assert_array_equal(files.whole("x", (3, 64, 8)), theirs)
        cut = (slice(1, 3), slice(40, 64), slice(0, 4))
        np.testing.assert_array_equal(files.part("x", (3, 64, 8), cut), theirs[cut])


@pytest.mark.parametrize("framework", ["numpy", "pt"])
def test_fp8_is_read_as_the_numbers_it_stands_for(directory: Path, framework: Literal["numpy", "pt"]) -> None:
    """Of blocks that do not divide a matrix, rows and columns too; merging reads them whole."""
    torch.manual_seed(0)
    every = torch.randint(0, 256, (210, 150), dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = every.nan_to_num(1.0).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 2) + 0.5
    of_numbers = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:210, :150]
    expected = (numbers.float() * of_numbers).numpy()
    torch_files.save_file({"x.weight": numbers, "x.weight_scale_inv": scales}, directory / "model.safetensors")
    with WeightFiles(directory, framework=framework) as files:
        np.testing.assert_array_equal(files.whole("x.weight", (210, 150)), expected)
        cut = (slice(120, 140), slice(100, 131))
        np.testing.assert_array_equal(files.part("x.weight", (210, 150), cut), expected[cut])
        with pytest.raises(ConfigError, match=r"has shape \(210, 150\), config.json says \(210, 151\)"):
            files.whole("x.weight", (210, 151))
    stored = StoredTensors.of(directory, "model")
    assert stored.shapes() == {"x.weight": (210, 150)}
    np.testing.assert_array_equal(stored["x.weight"], expected)
    edit(directory, quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert read_config(directory).int8 is None
    edit(directory, quantization_config={"quant_method": "fp8", "weight_block_size": [1, 64]})
    with pytest.raises(ConfigError, match=r"weight_block_size is \[1, 64\], supported is \[128, 128\]"):
        read_config(directory)


@pytest.mark.parametrize(("strategy", "framework"), [("group", "numpy"), ("channel", "pt")])
def test_int4_is_read_as_the_numbers_it_stands_for(
    directory: Path, strategy: str, framework: Literal["numpy", "pt"]
) -> None:
    """Of a number of columns that does not fill the last integer, with the shape in either type of integers."""
    torch.manual_seed(0)
    integers = torch.randint(-8, 8, (6, 76), dtype=torch.int8)
    scales = torch.rand(6, 4 if strategy == "group" else 1) + 0.5
    expected = (integers * (scales.repeat_interleave(19, 1) if strategy == "group" else scales)).numpy()
    padded = torch.nn.functional.pad(integers + 8, (0, 4)).reshape(6, 10, 8).to(torch.int64)
    words = (padded << torch.arange(0, 32, 4)).sum(-1)
    packed = {
        "x.weight_packed": (words - (words >> 31 << 32)).to(torch.int32),
        "x.weight_scale": scales,
        "x.weight_shape": torch.tensor([6, 76], dtype=torch.int32 if strategy == "group" else torch.int64),
    }
    torch_files.save_file(packed, directory / "model.safetensors")
    with WeightFiles(directory, framework=framework) as files:
        np.testing.assert_array_equal(files.whole("x.weight", (6, 76)), expected)
        cut = (slice(2, 5), slice(19, 31))
        np.testing.assert_array_equal(files.part("x.weight", (6, 76), cut), expected[cut])
        with pytest.raises(ConfigError, match=r"has shape \(6, 76\), config.json says \(6, 80\)"):
            files.whole("x.weight", (6, 80))
    stored = StoredTensors.of(directory, "model")
    assert stored.shapes() == {"x.weight": (6, 76)}
    np.testing.assert_array_equal(stored["x.weight"], expected)
    weights = {**W8A16["config_groups"]["group_0"]["weights"], "num_bits": 4, "group_size": 32, "strategy": strategy}
    groups = {"group_0": {**W8A16["config_groups"]["group_0"], "weights": weights}}
    edit(directory, quantization_config={**W8A16, "config_groups": groups})
    assert read_config(directory).int8 is None
    weights["symmetric"] = False
    edit(directory, quantization_config={**W8A16, "config_groups": groups})
    with pytest.raises(ConfigError, match=r"weights.symmetric is False, supported is True"):
        read_config(directory)
