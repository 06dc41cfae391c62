"""Each kind of adapter that PEFT makes computes what it computes in PEFT, or is refused by the name of its field."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tinsmith_checkpoints.errors import UnsupportedError
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model
from tinsmith_checkpoints.tools.contents import open_contents
from tinsmith_checkpoints.tools.rewriting import merge

TOKENS = torch.arange(3, 40)[None]
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@dataclass(frozen=True)
class Kind:
    name: str
    config: dict[str, Any] = field(default_factory=dict)
    converted: bool = False  # to plain LoRA, as it is saved
    refused: str | None = None  # by which words


TAKEN = (
    Kind("plain"),
    Kind("dropout", {"lora_dropout": 0.5}),
    Kind("rslora", {"use_rslora": True, "r": 3}),
    Kind("gaussian", {"init_lora_weights": "gaussian"}),
    Kind("random", {"init_lora_weights": False}),
    Kind("orthogonal", {"init_lora_weights": "orthogonal"}),
    Kind("mica", {"init_lora_weights": "mica"}),
    Kind("eva", {"init_lora_weights": "eva"}),
    Kind("some layers", {"layers_to_transform": [1]}),
    Kind("a pattern of layers", {"layers_to_transform": 0, "layers_pattern": "layers"}),
    Kind("without a module", {"exclude_modules": ["layers.0.mlp.up_proj"]}),
    Kind("a regular expression", {"target_modules": r".*\.1\..*_proj"}),
    Kind("all linear", {"target_modules": "all-linear"}),
    Kind("same ranks", {"rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 8}}),
    Kind("pissa, converted", {"init_lora_weights": "pissa"}, converted=True),
    Kind("olora, converted", {"init_lora_weights": "olora"}, converted=True),
)
REFUSED = (
    Kind("pissa", {"init_lora_weights": "pissa"}, refused="init_lora_weights is 'pissa'"),
    Kind("fast pissa", {"init_lora_weights": "pissa_niter_2"}, refused="init_lora_weights is 'pissa_niter_2'"),
    Kind("olora", {"init_lora_weights": "olora"}, refused="init_lora_weights is 'olora'"),
    Kind("dora", {"use_dora": True}, refused="use_dora is True"),
    Kind("alora", {"alora_invocation_tokens": [5, 6]}, refused="alora_invocation_tokens is [5, 6]"),
    Kind(
        "bdlora",
        {"use_bdlora": {"target_modules_bd_a": ["o_proj"], "nblocks": 2, "match_strict": False}},
        refused="use_bdlora is",
    ),
    Kind("velora", {"velora_config": {"num_groups": 4}}, refused="velora_config is"),
    Kind("kasa", {"kasa_config": {}}, refused="kasa_config is"),
    Kind("monteclora", {"monteclora_config": {}}, refused="monteclora_config is"),
    Kind("ranks", {"rank_pattern": {"q_proj": 2}}, refused="rank_pattern is {'q_proj': 2}"),
    Kind("alphas", {"alpha_pattern": {"q_proj": 2}}, refused="alpha_pattern is {'q_proj': 2}"),
    Kind("biases", {"bias": "all"}, refused="bias is 'all'"),
    Kind("biases of B", {"lora_bias": True}, refused="lora_bias is True"),
    Kind("modules", {"modules_to_save": ["lm_head"]}, refused="modules_to_save is ['lm_head']"),
    Kind("tokens", {"trainable_token_indices": [3]}, refused="trainable_token_indices is"),
    Kind("replicas", {"layer_replication": [[0, 2], [1, 2]]}, refused="layer_replication is"),
    Kind(
        "parameters",
        {"target_parameters": ["q_proj.weight"], "target_modules": ["k_proj"]},
        refused="target_parameters",
    ),
)
FAST = ("rslora", "some layers", "pissa, converted", "pissa", "dora")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "head_dim": 8}
    directory = tmp_path_factory.mktemp("base")
    write_tiny_model(directory, TinyShape(**sizes, num_heads=4, num_kv_heads=2, tied=False))
    return directory


def made_by_peft(kind: Kind, base: Path, directory: Path) -> Path:
    import peft

    settings = {"kasa_config": "KasaConfig", "monteclora_config": "MontecloraConfig", "use_bdlora": "BdLoraConfig"}
    settings["velora_config"] = "VeloraConfig"
    config = {
        name: getattr(peft.tuners.lora.config, settings[name])(**value) if name in settings else value
        for name, value in kind.config.items()
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    asked = {"r": 4, "lora_alpha": 8, "target_modules": list(MODULES), "task_type": "CAUSAL_LM", **config}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**asked))
    where: dict[str, Any] = {}
    if kind.converted:
        adapted.save_pretrained(directory / "initial")
        where["path_initial_model_for_weight_conversion"] = str(directory / "initial")
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_A" in name or "lora_B" in name:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    if kind.refused is None:
        torch.save(logits(adapted), directory.with_suffix(".trained"))
    adapted.save_pretrained(directory, **where)
    return directory


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits  # type: ignore[no-any-return]


def peft_logits(base: Path, directory: Path) -> torch.Tensor:
    import peft

    model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return logits(peft.PeftModel.from_pretrained(model, directory))


def merged_logits(base: Path, source: Path, target: Path) -> torch.Tensor:
    quietly = {"dtype": None, "shard_bytes": 1 << 30, "force": False, "progress": lambda _: None}
    merge(open_contents(source), base, target, **quietly)  # type: ignore[arg-type]  # keywords of several types
    return logits(transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32))


def kinds(every: Sequence[Kind]) -> list[Any]:
    """Return them as parameters, of which some run in `make test`."""
    return [pytest.param(each, id=each.name, marks=() if each.name in FAST else pytest.mark.thorough) for each in every]


@pytest.mark.parametrize("kind", kinds(TAKEN))
def test_a_kind_that_is_taken_computes_what_it_computes_in_peft(tmp_path: Path, base: Path, kind: Kind) -> None:
    source = made_by_peft(kind, base, tmp_path / "source")
    here = merged_logits(base, source, tmp_path / "merged").log_softmax(-1)
    torch.testing.assert_close(here, peft_logits(base, source).log_softmax(-1), rtol=0, atol=1e-4)
    trained: torch.Tensor = torch.load(source.with_suffix(".trained"))
    torch.testing.assert_close(here, trained.log_softmax(-1), rtol=0, atol=1e-4)
    plain = logits(transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert (here - plain.log_softmax(-1)).abs().max() > 0.01, "the adapter changes nothing, so nothing is tested"


@pytest.mark.parametrize("kind", kinds(REFUSED))
def test_a_kind_that_is_not_taken_is_refused_by_the_name_of_its_field(tmp_path: Path, base: Path, kind: Kind) -> None:
    source = made_by_peft(kind, base, tmp_path / "source")
    assert kind.refused is not None
    with pytest.raises(UnsupportedError) as refusal:
        merged_logits(base, source, tmp_path / "merged")
    assert kind.refused in str(refusal.value)


def test_a_field_of_a_newer_peft_is_refused_by_name(tmp_path: Path, base: Path) -> None:
    source = made_by_peft(TAKEN[0], base, tmp_path / "source")
    file = source / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_newest": True, "newer_config": None}))
    with pytest.raises(UnsupportedError, match="use_newest is True: this field is not known here") as refusal:
        merged_logits(base, source, tmp_path / "merged")
    assert "newer_config" not in str(refusal.value)
