"""What a model takes, told from its configuration alone, against the files of a real one."""

from math import prod
from pathlib import Path

import pytest

from tinsmith_checkpoints.huggingface import adapter_weights, decoder_shape, known_config, weight_counts
from tinsmith_checkpoints.huggingface.adapter_shapes import adapted_modules
from tinsmith_checkpoints.huggingface.known_shapes import KNOWN_SHAPES
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.huggingface.safetensors_files import read_header, shard_files
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_jax import config_of

CLASSES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
)
SMALL = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 40, "num_layers": 3, "head_dim": 8}


@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe", "qwen2", "mistral"])
@pytest.mark.parametrize("tied", [True, False])
def test_counts_are_those_of_the_files(family: str, tied: bool, tmp_path: Path) -> None:
    directory = tmp_path / "model"
    write_tiny_model(directory, TinyShape(family=family, tied=tied, **SMALL))  # type: ignore[arg-type]
    (file,) = shard_files(directory, "model") or [directory / "model.safetensors"]
    shapes = {name: tensor.shape for name, tensor in read_header(file).items()}
    shape = decoder_shape(read_model_config(directory), directory, supported=CLASSES)
    assert weight_counts(shape).total == sum(map(prod, shapes.values()))
    adapted = {n: s for n, s in adapted_modules(shapes).items() if not n.endswith(("embed_tokens", "mlp.gate"))}
    everything = sum(prod(module.shape(side, 4)) for module in adapted.values() for side in ("A", "B"))
    assert adapter_weights(shape, 4) == everything


PUBLISHED = {
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "DeepSeek-V3.1": 671_026_419_200,
    "Kimi-K2": 1_026_408_232_448,
    "Qwen3-Next-80B-A3B": 79_674_391_296,
}
"""The weights of published files, without the layers that predict further tokens."""


def test_known_models_have_the_sizes_that_their_names_say() -> None:
    for name in KNOWN_SHAPES:
        config = known_config(name)
        assert config is not None
        shape = config_of(config, Path(name))
        found = weight_counts(shape).total
        if name in PUBLISHED:
            assert found == PUBLISHED[name]
            continue
        billions = float(name.rpartition("-A")[0].rpartition("-")[2][:-1] if "-A" in name else name.split("-")[-1][:-1])
        assert found / 1e9 == pytest.approx(billions, rel=0.25), name
        assert ("-A" in name) == (shape.experts is not None)


def test_a_name_may_have_an_owner_and_an_ending() -> None:
    for name in ("Qwen/Qwen3-8B", "qwen3-8b", "Qwen/Qwen3-8B-Base@main"):
        assert known_config(name) == known_config("Qwen3-8B")
    assert known_config("meta-llama/Meta-Llama-3-8B-Instruct") == known_config("Llama-3-8B")
    assert known_config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16") == known_config("Nemotron-3-Nano-30B-A3B")
    assert known_config("Qwen3-9B") is None
    assert known_config("/models/mine") is None
