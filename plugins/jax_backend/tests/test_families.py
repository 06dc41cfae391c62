"""Each family against transformers, and how families are found."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from few_programs import make_jax_cache
from jax_harness import add_model, as_shipped, make_backend
from sampling_harness import assert_same_sequences, make_sample, prompt, sample, sample_all

from tinsmith import ConfigError, Failed, LoraConfig, SampleOutput
from tinsmith_checkpoints.huggingface import TINY
from tinsmith_jax import ModelConfig, decoder, family
from tinsmith_jax.config import JaxConfig
from tinsmith_jax.families import read_config
from tinsmith_jax.runtime import decide
from tinsmith_jax.sampling_values import Drawn
from tinsmith_jax.slots import Slot
from tinsmith_jax.testing import FamilyContract

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


@pytest.fixture
def as_users_do() -> Iterator[None]:
    with as_shipped():
        yield


class OneCache(FamilyContract):
    @pytest.fixture(autouse=True)
    def compile_quickly(self, request: pytest.FixtureRequest) -> None:
        """Only what `make test` runs. Programs whose bits are compared must all be compiled in one way."""
        quick = request.function.__name__ == "test_logprobs"
        request.getfixturevalue("quick_compilation" if quick else "as_users_do")

    @classmethod
    def cache_dir(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_jax_cache(tmp_path_factory)


class TestLlama(OneCache):
    architecture = "LlamaForCausalLM"
    settings: ClassVar = {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3_ROPE}


class TestQwen2(OneCache):
    architecture = "Qwen2ForCausalLM"
    settings: ClassVar = {"tie_word_embeddings": True}


@pytest.mark.thorough  # test_jax_parity.py compares one with torch
class TestQwen3(OneCache):
    architecture = "Qwen3ForCausalLM"


@pytest.mark.thorough  # the hybrid has these layers, too
class TestQwen35(OneCache):
    architecture = "Qwen3_5ForCausalLM"
    settings: ClassVar = {"layer_types": ["full_attention"] * 2, "attention_bias": True}


@pytest.mark.thorough  # the one that sees has these layers, too
class TestQwen35Moe(OneCache):
    architecture = "Qwen3_5MoeForCausalLM"
    settings: ClassVar = {"layer_types": ["full_attention"] * 2}


class TestQwen2Moe(OneCache):
    architecture = "Qwen2MoeForCausalLM"


YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.3,
    "original_max_position_embeddings": 64,
}


class TestDeepseekV3(OneCache):
    """A dense layer before two with experts; frequencies of a longer context, whose factors differ."""

    architecture = "DeepseekV3ForCausalLM"
    settings: ClassVar = {"num_hidden_layers": 3, "rope_parameters": YARN}


class TestKimiK25(OneCache):
    """The language part, and no groups."""

    architecture = "Kimi_K25ForConditionalGeneration"
    settings: ClassVar = TestDeepseekV3.settings


@pytest.mark.thorough
class TestDeepseekV32(OneCache):
    """In sequences that its sparse attention sees whole."""

    architecture = "DeepseekV32ForCausalLM"
    settings: ClassVar = TestDeepseekV3.settings
    unread = "self_attn.indexer"


class TestGlmMoeDsa(OneCache):
    """The second layer has no indexer: it would take the tokens that the first one chose."""

    architecture = "GlmMoeDsaForCausalLM"
    settings: ClassVar = {"indexer_types": ["full", "shared"]}
    unread = "self_attn.indexer"


@pytest.mark.thorough
class TestQueriesOfInputs(OneCache):
    """Queries are products of the input, and rotate in halves; all layers have experts."""

    architecture = "DeepseekV3ForCausalLM"
    settings: ClassVar = {"q_lora_rank": None, "rope_interleave": False, "first_k_dense_replace": 0}


class TestQwen3VLMoe(OneCache):
    """Published files have the matrices of experts [in, out]."""

    architecture = "Qwen3VLMoeForConditionalGeneration"


class TestGptOss(OneCache):
    architecture = "GptOssForCausalLM"


class TestHybridQwen35(OneCache):
    """Two periods of the pattern, with more heads of values than of keys."""

    architecture = "Qwen3_5ForCausalLM"
    settings: ClassVar = {"num_hidden_layers": 4, "attention_bias": True}

    @pytest.mark.thorough
    async def test_samples_keep_their_bits_in_company(
        self, model_path: Path, jax_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also beside a request that fails when a step has been computed already: the others take the step again."""
        backend = make_backend(model_path, jax_cache, decode_slots=3)
        add_model(backend, "m", LoraConfig(rank=4, seed=1), random_B=True)
        await backend.load_snapshot(backend.publish("m", "s"))
        ops = [
            make_sample(prompt(length, seed=length), snapshot, num_samples=number, max_tokens=9, prompt_logprobs=True)
            for length, number, snapshot in ((70, 1, "s"), (1, 2, None), (64, 1, "s"), (130, 3, "s"), (131, 1, None))
        ]
        alone = [await sample(backend, op) for op in ops]
        for output, expected in zip(await sample_all(backend, ops), alone, strict=True):
            assert_same_sequences(output, expected)

        def fail_at_second(slot: Slot, drawn: Drawn, row: int) -> None:
            assert slot.draw is not None
            if slot.request.op is ops[0] and slot.draw.tokens:
                msg = "as told"
                raise RuntimeError(msg)
            take(slot, drawn, row)

        take = Slot.take
        monkeypatch.setattr(Slot, "take", fail_at_second)
        failed, *others = await asyncio.gather(*map(backend.sample, ops))
        assert isinstance(failed, Failed)
        for other, expected in zip(others, alone[1:], strict=True):
            assert isinstance(other, SampleOutput)
            assert_same_sequences(other, expected)
        backend.close()


class TestHybridQwen3Next(OneCache):
    """Files join the projections of the gated delta rule."""

    architecture = "Qwen3NextForCausalLM"


class TestQwen35MoeThatSees(OneCache):
    """As published: the language part has a name, and each matrix of all experts is one tensor."""

    architecture = "Qwen3_5MoeForConditionalGeneration"


@pytest.mark.thorough
class TestQwen35ThatSees(OneCache):
    architecture = "Qwen3_5ForConditionalGeneration"
    settings: ClassVar = TestHybridQwen35.settings


@pytest.mark.thorough
class TestHybridQwen35Moe(OneCache):
    architecture = "Qwen3_5MoeForCausalLM"
    settings: ClassVar = TestHybridQwen35.settings


class TestMistral(OneCache):
    architecture = "MistralForCausalLM"


class TestMistral3(OneCache):
    """Older names of the tensors of the language part."""

    architecture = "Mistral3ForConditionalGeneration"


class TestPhi3(OneCache):
    """Joined matrices, half of each head rotates, and frequencies of a longer context."""

    architecture = "Phi3ForCausalLM"
    settings: ClassVar = {
        "original_max_position_embeddings": 192,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.2, 1.5, 2.0],
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 192,
        },
    }


@pytest.mark.thorough
class TestGemma(OneCache):
    """Files say "gelu" of the approximation."""

    architecture = "GemmaForCausalLM"
    settings: ClassVar = {"hidden_act": "gelu", "attention_bias": True}


@pytest.mark.thorough
class TestSeedOss(OneCache):
    architecture = "SeedOssForCausalLM"
    settings: ClassVar = {"attention_out_bias": True, "mlp_bias": True}


class TestGemma2(OneCache):
    architecture = "Gemma2ForCausalLM"


class TestGranite(OneCache):
    architecture = "GraniteForCausalLM"


class TestSmolLM3(OneCache):
    architecture = "SmolLM3ForCausalLM"


class TestNemotronH(OneCache):
    """One mixer, or experts, in a layer; experts read latents."""

    architecture = "NemotronHForCausalLM"
    settings: ClassVar = {"layers_block_type": ["linear_attention", "moe", "full_attention"], "moe_latent_size": 40}


@pytest.mark.thorough
class TestDenseNemotronH(OneCache):
    """An MLP first, and no pattern that repeats."""

    architecture = "NemotronHForCausalLM"
    settings: ClassVar = {
        "layers_block_type": ["mlp", "linear_attention", "full_attention", "linear_attention", "mlp"],
        "use_conv_bias": False,
    }


class TestCohere2(OneCache):
    """A window of the layers that encode positions, and none of the others."""

    architecture = "Cohere2ForCausalLM"
    settings: ClassVar = {"attention_bias": True}


class TestOlmo2(OneCache):
    architecture = "Olmo2ForCausalLM"


class TestOlmo3(OneCache):
    architecture = "Olmo3ForCausalLM"
    settings: ClassVar = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}}


class TestGemma3(OneCache):
    """A window that ends within a tile, and layers of both kinds, each with its frequencies."""

    architecture = "Gemma3ForCausalLM"


class TestGemma3ThatSees(OneCache):
    architecture = "Gemma3ForConditionalGeneration"


# How families are found ----------------------------------------------------------------------------------------------

STRANGER = """
import tinsmith_jax

@tinsmith_jax.family("StrangerForCausalLM")
def stranger(config, path):
    return tinsmith_jax.decoder(config, path, embedding_scale=3.0)
"""


def write_config(directory: Path, class_name: str, **settings: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**TINY, "architectures": [class_name], **settings}))
    return directory


def install(directory: Path, monkeypatch: pytest.MonkeyPatch, module: str, source: str) -> None:
    """Do as an installer: a module, and a distribution whose entry point names it."""
    (directory / f"{module}.py").write_text(source)
    info = directory / f"{module}-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[tinsmith_jax.families]\n{module} = {module}\n")
    monkeypatch.syspath_prepend(directory)


def test_a_stranger_adds_a_family_with_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = write_config(tmp_path / "model", "StrangerForCausalLM")
    with pytest.raises(
        ConfigError, match=r"architecture 'StrangerForCausalLM' is not supported, only Cohere2ForCausalLM, "
    ):
        read_config(model)
    install(tmp_path, monkeypatch, "stranger", STRANGER)
    config = read_config(model)
    assert (config.class_name, config.embedding_scale) == ("StrangerForCausalLM", 3.0)


def test_a_family_that_fails_to_load_is_named_where_it_may_be_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, monkeypatch, "broken_stranger", "import nothing_of_this_name")
    read_config(write_config(tmp_path / "llama", "LlamaForCausalLM"))
    with pytest.raises(ConfigError, match=r"broken_stranger could not be loaded: No module"):
        read_config(write_config(tmp_path / "other", "NobodysForCausalLM"))


def test_two_families_cannot_describe_one_class(tmp_path: Path) -> None:
    read_config(write_config(tmp_path, "LlamaForCausalLM"))

    def mine(config: dict[str, object], path: Path) -> ModelConfig:
        return decoder(config, path)

    with pytest.raises(ValueError, match=r"LlamaForCausalLM is described by tinsmith_jax.families.llama already"):
        family("LlamaForCausalLM")(mine)


@pytest.mark.parametrize(
    ("class_name", "settings", "message"),
    [
        (
            "Mistral3ForConditionalGeneration",
            {"text_config": {"model_type": "ministral3"}},
            "of the type 'ministral3', which scales queries by position",
        ),
        (
            "LlamaForCausalLM",
            {"hidden_act": "relu"},
            "activation 'relu' is not supported, only silu, gelu_pytorch_tanh",
        ),
        ("Gemma3ForCausalLM", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0: "),
        ("Olmo3ForCausalLM", {"layer_types": ["full_attention"]}, "for each of the 2 layers"),
        (
            "Olmo3ForCausalLM",
            {"rope_parameters": {"rope_theta": 1.0}},
            "it must have sliding_attention and full",
        ),
        ("Qwen3_5ForCausalLM", {"layer_types": ["linear_attention"] * 2}, "names no layer that attends"),
        ("Qwen2ForCausalLM", {"use_sliding_window": True}, "use_sliding_window is True: "),
        (
            "DeepseekV3ForCausalLM",
            {"scoring_func": "softmax"},
            "scoring_func is 'softmax': ",
        ),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq is 2: "),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*E-"}, "a dense MLP beside layers with experts"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "ME"}, "names no layer that attends"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"}, "layers_block_type must name one of"),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*", "time_step_limit": [0.001, 0.1]},
            "time_step_limit is ",
        ),
        (
            "GlmMoeDsaForCausalLM",
            {"mlp_layer_types": ["sparse", "dense"]},
            "supported are dense layers before all sparse",
        ),
    ],
)
def test_what_a_description_cannot_say_is_refused(
    tmp_path: Path, class_name: str, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        read_config(write_config(tmp_path, class_name, **settings))


def test_a_layer_is_what_a_letter_of_the_pattern_says(tmp_path: Path) -> None:
    """As published files of Nemotron say it; the number of layers is their own."""
    pattern = "MEMEM*EMEM*E"
    config = read_config(
        write_config(
            tmp_path, "NemotronHForCausalLM", hybrid_override_pattern=pattern, n_routed_experts=4, num_experts_per_tok=2
        )
    )
    assert config.num_layers == len(pattern)
    for name, letter in (("mamba_in", "M"), ("qkv", "*"), ("router", "E")):
        assert config.layers_with(name) == tuple(i for i, each in enumerate(pattern) if each == letter)


@pytest.mark.parametrize(
    ("class_name", "settings"),
    [
        ("GlmMoeDsaForCausalLM", {"index_topk": 96}),
        (
            "Phi3ForCausalLM",
            {
                "original_max_position_embeddings": 96,
                "rope_parameters": {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8},
            },
        ),
    ],
)
def test_no_context_goes_beyond_what_a_description_holds_for(
    tmp_path: Path, class_name: str, settings: dict[str, object]
) -> None:
    model = read_config(write_config(tmp_path, class_name, **settings))
    assert decide(JaxConfig(), model).max_context_tokens == 96
    with pytest.raises(ConfigError, match=f"{class_name} computes otherwise beyond 96 tokens.* at most 96"):
        decide(JaxConfig(max_context_tokens=97), model)
