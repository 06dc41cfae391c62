"""A base model of 8-bit integers: computes what the numbers compute that they stand for, in a quarter of the memory."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch
from fsdp_harness import VOCAB, fork_backend, shape
from safetensors.torch import load_file, save_file

from tinsmith import Array, ConfigError
from tinsmith.testing import ModelDriver, assert_close_arrays, logprobs_of, ragged_data, write_tiny_model
from tinsmith.testing.int8_model import int8_config, write_int8_model
from tinsmith_checkpoints.huggingface import StoredTensors, read_model_config, weight_counts
from tinsmith_fsdp.architecture import architecture_of
from tinsmith_fsdp.backend import FsdpBackend
from tinsmith_fsdp.int8 import int8_linear

pytestmark = pytest.mark.slow  # imports torch and transformers

LENGTHS = (1, 7, 33, 64)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp-int8")
    for family in ("qwen3", "llama"):
        write_tiny_model(root / family, shape(family))
        for kind, group_size in (("", None), ("-groups", 8)):
            places = root / f"{family}-int8{kind}", root / f"{family}-plain{kind}"
            write_int8_model(root / family, *places, group_size=group_size)
    return root


@pytest.fixture(scope="module")
def plain(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, FsdpBackend]]:
    """The unquantised models, by their kind."""
    with ExitStack() as stack:
        found = {}
        for kind in ("", "-groups"):
            found[kind] = fork_backend(
                models / f"qwen3-plain{kind}", tmp_path_factory.mktemp("cache"), nproc_per_node=1
            )
            stack.callback(found[kind].close)
        yield found


@pytest.mark.filterwarnings("default")  # the compiler itself does what PyTorch warns of
@pytest.mark.parametrize("groups", [1, 4])
def test_compiled_code_keeps_no_converted_matrix(groups: int) -> None:
    """It kept them, which take twice what the integers take, of each layer that does not recompute."""
    weight, scale = torch.ones(64, 32, dtype=torch.int8), torch.ones(64, groups)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(int8_linear(x, weight, scale))

    compiled = torch.compile(layer, backend="aot_eager_decomp_partition")
    x = torch.ones(4, 32, dtype=torch.bfloat16, requires_grad=True)
    y = compiled(x)
    assert y.grad_fn is not None
    saved: tuple[torch.Tensor, ...] = y.grad_fn.saved_tensors  # type: ignore[attr-defined]
    assert not [kept.shape for kept in saved if kept.dtype == torch.bfloat16 and kept.numel() >= weight.numel()]
    y.sum().backward()
    (plain,) = torch.autograd.grad(layer(other := x.detach().requires_grad_()).sum(), other)
    torch.testing.assert_close(x.grad, plain)
    torch.compiler.reset()


@pytest.mark.thorough  # importing its library takes ten seconds
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, on import
@pytest.mark.parametrize("group_size", [None, 8])
def test_compressed_tensors_writes_what_is_read(group_size: int | None, tmp_path: Path, models: Path) -> None:
    """Both ways: its compressor's output is read here, and its decompressor reads what the tests' writer writes."""
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationScheme

    kind = "" if group_size is None else "-groups"
    scheme = QuantizationScheme.model_validate(int8_config(group_size)["config_groups"]["group_0"])
    weight = torch.randn(7, 10 if group_size is None else 24)  # 10: no multiple of four columns
    scale = weight.view(7, -1, group_size or 10).abs().amax(2) / 127.5
    written = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    save_file({f"x.{name}": tensor for name, tensor in written.items()}, tmp_path / "model.safetensors")
    expected = PackedQuantizationCompressor.decompress(written, scheme)["weight"]
    np.testing.assert_array_equal(StoredTensors.of(tmp_path, "model")["x.weight"], expected.numpy())

    name = "model.layers.1.mlp.down_proj.weight"
    stored = load_file(models / f"qwen3-int8{kind}" / "model.safetensors")
    parts = {f"weight_{end}": stored[f"{name}_{end}"] for end in ("packed", "scale", "shape")}
    read = PackedQuantizationCompressor.decompress(parts, scheme)["weight"]
    plain = load_file(models / f"qwen3-plain{kind}" / "model.safetensors")[name]
    torch.testing.assert_close(read, plain, rtol=0, atol=0)


@pytest.mark.parametrize("num_scales", [1, 3])
def test_a_product_and_its_gradient_are_those_of_the_numbers(num_scales: int) -> None:
    rng = np.random.default_rng(0)
    integers = torch.from_numpy(rng.integers(-128, 128, (5, 6)).astype(np.int8))
    scale = torch.from_numpy(rng.uniform(0.1, 2, (5, num_scales)).astype(np.float32))
    torch.manual_seed(0)  # what is left of a sum that cancels has fewer digits than the test compares
    x = torch.randn(2, 3, 6, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    seed = torch.randn(2, 3, 5)
    y, expected = int8_linear(x, integers, scale), other @ (integers * scale.repeat_interleave(6 // num_scales, 1)).T
    torch.testing.assert_close(y, expected)
    y.backward(seed)
    expected.backward(seed)
    torch.testing.assert_close(x.grad, other.grad)


def trained(backend: FsdpBackend) -> tuple[list[Array], dict[str, Array]]:
    """Take two steps with one model. Return the scores of the third pass, and the adapter."""
    driver = ModelDriver(backend)
    model_id = driver.create(rank=4)
    try:
        for step in range(2):
            driver.forward_backward(model_id, ragged_data(step, VOCAB, LENGTHS))
            driver.optim_step(model_id)
        output = driver.forward_backward(model_id, ragged_data(7, VOCAB, LENGTHS))
        return list(logprobs_of(output)), dict(driver.state(model_id).weights)
    finally:
        driver.unload(model_id)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("", {"nproc_per_node": 2}),
        pytest.param("", {"nproc_per_node": 2, "tensor_parallel": 2}, marks=pytest.mark.thorough),
        ("-groups", {"nproc_per_node": 2, "tensor_parallel": 2}),
        pytest.param("-groups", {"nproc_per_node": 2}, marks=pytest.mark.thorough),
        pytest.param("", {"nproc_per_node": 1}, marks=pytest.mark.thorough),
        pytest.param(
            "",
            {"nproc_per_node": 2, "isolation": "fast", "activation_checkpointing": True},
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_it_trains_as_the_unquantised_model(
    kind: str, settings: dict[str, object], models: Path, plain: Mapping[str, FsdpBackend], tmp_path: Path
) -> None:
    expected_scores, expected_weights = trained(plain[kind])
    backend = fork_backend(models / f"qwen3-int8{kind}", tmp_path, max_full_models=0, **settings)
    try:
        scores, weights = trained(backend)
        held = sum(each.parameter_bytes for each in backend.loaded)
    finally:
        backend.close()
    for score, expected in zip(scores, expected_scores, strict=True):
        np.testing.assert_allclose(score, expected, rtol=0, atol=1e-4)
    assert_close_arrays(weights, expected_weights, 1e-4, "the adapter")
    if "tensor_parallel" not in settings:  # else each rank holds the whole vocabulary
        assert held == weight_counts(backend.architecture).total_bytes(4)


def test_nothing_can_be_trained_in_integers(models: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_full_models is 1, and the base model's matrices are 8-bit integers"):
        fork_backend(models / "llama-int8", tmp_path, max_full_models=1)


def test_groups_that_ranks_would_share_are_refused(models: Path, tmp_path: Path) -> None:
    write_int8_model(models / "llama", tmp_path / "wide", group_size=16)
    with pytest.raises(ConfigError, match=r"intermediate_size of the model \(48\) / tensor_parallel \(2\) must be"):
        fork_backend(tmp_path / "wide", tmp_path, max_full_models=0, nproc_per_node=2, tensor_parallel=2)


def test_groups_that_do_not_divide_the_columns_are_refused(models: Path) -> None:
    config = {**read_model_config(models / "llama"), "quantization_config": int8_config(128)}
    with pytest.raises(ConfigError, match=r"group_size of the 8-bit integers \(128\) must divide the 32 columns"):
        architecture_of(config, Path("config.json"))
