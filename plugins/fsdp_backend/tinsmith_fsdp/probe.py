"""Whether a model of transformers can be trained on packed sequences: tried on a small one with random weights.

Layers may do what packing breaks: mix tokens by other means than attention, or attend in a way of their own. What they
do is in no configuration, so it is seen. Two sequences pass through the model side by side, and each through
transformers' own forward pass by itself. All logits must agree, and another neighbour must change no bit. With experts,
it may change roundings: their products have as many rows as there are tokens that choose them.

The answer holds for the class, its settings, and the versions of transformers and torch, and is kept in a file.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from torch import nn

from tinsmith import ConfigError
from tinsmith_fsdp.causal_lm import class_of, mix_packed, require_parts
from tinsmith_fsdp.experts import PATH
from tinsmith_fsdp.packed_model import PackedModel
from tinsmith_fsdp.streams import bare_stream

_TOLERANCE: Final = 1e-5  # of the largest logit
_LENGTHS: Final = (19, 26)  # more than the window
_VOCABULARY, _WINDOW = 61, 8
_EXPERT_SIZES: Final = ("moe_intermediate_size", "shared_expert_intermediate_size")
_EXPERT_SIZE: Final = 48
_DENSE_LAYERS: Final = "first_k_dense_replace"
_CODE: Final = (
    *("probe.py", "packed_model.py", "attention.py", "causal_lm.py", "experts.py", "grouped.py", "gated_delta.py"),
)


def require_packing(class_name: str, config: Any, directory: Path | None) -> None:
    """Raise ConfigError if sequences side by side change each other, or are not computed as transformers does.

    `config`: of the real model. `directory`: where answers are kept.
    """
    small = _small(config)
    file = None if directory is None else directory / f"{class_name}-{_key(small)}.json"
    answer = None if file is None else _kept(file)
    if answer is None:
        answer = tried(class_of(class_name, config), small)
        if file is not None:
            _keep(file, answer)
    if answer:
        msg = (
            f"{class_name} of transformers {transformers.__version__} cannot be trained by the fsdp backend: {answer}; "
            "use another backend for it, or another model"
        )
        raise ConfigError(msg)


def _small(config: Any) -> dict[str, Any]:
    """Return the settings of a small model, whose layers are of all kinds that the real model's are."""
    settings: dict[str, Any] = config.to_dict()
    layers = int(settings["num_hidden_layers"])
    lists = {key: value for key, value in settings.items() if isinstance(value, list) and len(value) == layers}
    columns = list(zip(*lists.values(), strict=True))
    first = [columns.index(column) for column in columns]
    dense = min(1, int(settings.get(_DENSE_LAYERS) or 0))  # before those with experts
    number = min(layers, max(2, 1 + max(first, default=0)))
    heads = settings.get("num_attention_heads") or 1
    head = getattr(config, "head_dim", None) or settings["hidden_size"] // heads
    shared = settings.get("num_key_value_heads") not in (None, heads)
    settings |= {key: value[:number] for key, value in lists.items()}
    settings |= {
        "num_hidden_layers": number,
        "num_attention_heads": 4,
        "num_key_value_heads": 2 if shared else 4,
        "hidden_size": 4 * head if settings["hidden_size"] == heads * head else 64,
        "intermediate_size": 96,
        "vocab_size": _VOCABULARY,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    if dense:
        settings[_DENSE_LAYERS] = dense
    settings |= {key: _EXPERT_SIZE for key in _EXPERT_SIZES if settings.get(key)}
    if settings.get("sliding_window"):
        settings["sliding_window"] = _WINDOW
    return {key: value for key, value in settings.items() if key != "quantization_config"}


def _key(small: dict[str, Any]) -> str:
    found = hashlib.sha256(json.dumps(small, sort_keys=True, default=str).encode())
    found.update(f"{transformers.__version__} {torch.__version__}".encode())
    for name in _CODE:
        found.update((Path(__file__).parent / name).read_bytes())
    return found.hexdigest()[:16]


def _kept(file: Path) -> str | None:
    try:
        answer = json.loads(file.read_text(encoding="utf-8"))["refused"]
    except (OSError, ValueError, KeyError):
        return None
    return answer if isinstance(answer, str) else None


def _keep(file: Path, answer: str) -> None:
    """Write the answer. Ranks may do so at the same time, and where nothing can be kept it is found again."""
    part = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"refused": answer}), encoding="utf-8")
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)


def tried(made: Any, small: dict[str, Any]) -> str:
    """Return why models of a class of transformers cannot be trained, or nothing."""
    try:
        config = made.config_class.from_dict(small)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            causal_lm = made(config).float().eval()
            _randomise(causal_lm)
        require_parts(causal_lm)
        random = np.random.default_rng(0)
        first, second, other = (
            torch.from_numpy(random.integers(0, _VOCABULARY, length)) for length in (*_LENGTHS, _LENGTHS[0])
        )
        with torch.no_grad():
            causal_lm.config._attn_implementation = "eager"  # noqa: SLF001  (where layers look)
            causal_lm.config._experts_implementation = "eager"  # noqa: SLF001  (as above)
            alone = [causal_lm(input_ids=each[None], use_cache=False).logits[0] for each in (first, second)]
            mix_packed(causal_lm)
            rotary = causal_lm.get_submodule("model.rotary_emb")
            packed = PackedModel(causal_lm, checkpointing=False)
            packed.set_rotary(rotary)
            together, beside = _logits(packed, [first, second]), _logits(packed, [other, second])
    except ConfigError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - whatever a model's code raises
        return f"a small model of its kind cannot be run ({type(error).__name__}: {str(error).splitlines()[0][:200]})"
    largest = max(float(logits.abs().max()) for logits in alone)
    has_experts = any(name.endswith(PATH) for name, _ in packed.named_modules())
    if not float((together[1] - beside[1]).abs().max()) <= (_TOLERANCE * largest if has_experts else 0.0):
        return "its layers let sequences that are packed side by side change each other"
    apart = max(float((a - b).abs().max()) for a, b in zip(together, alone, strict=True)) / largest
    if not apart <= _TOLERANCE:
        return f"packed sequences differ from transformers' own forward pass, by {apart:.1g} of the largest logit"
    return ""


def _randomise(causal_lm: nn.Module) -> None:
    """Give the weights structure: all of them matter, and each token's logits are its own."""
    for name, parameter in causal_lm.named_parameters():
        if parameter.ndim == 1 or name.endswith("bias"):
            parameter.data += torch.empty_like(parameter).uniform_(-0.3, 0.3)
        else:
            parameter.data.normal_(std=1.0 if "embed" in name else parameter.shape[-1] ** -0.5)


def _logits(packed: PackedModel, sequences: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    (normed,) = packed.normed([bare_stream(sequences)], backward=False)
    logits = packed.logits(normed)
    return list(torch.split(logits, [len(each) for each in sequences]))
