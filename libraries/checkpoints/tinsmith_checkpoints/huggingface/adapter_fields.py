"""The fields of PEFT's adapter_config.json, and which modules they attach an adapter to."""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Final

from tinsmith_checkpoints.huggingface.decoder import HEAD
from tinsmith_checkpoints.huggingface.fields import OFF, FileFields, honoured, no_meaning, only, shown
from tinsmith_checkpoints.values import MAX_ALPHA, Json

_OF_INITIALISATION: Final = no_meaning("belongs to a value of `init_lora_weights`, which decides")
_CONVERSION: Final = (
    "the weights belong to another base model, from which the initial adapter was subtracted; save the adapter with "
    "path_initial_model_for_weight_conversion, which makes a plain one"
)

ADAPTER_CONFIG_FIELDS: Final = FileFields(
    "adapter_config.json",
    {
        "peft_type": only("LORA", otherwise="only LoRA is trained here; merge the adapter into its base model instead"),
        "task_type": only(None, "CAUSAL_LM", otherwise="the models here are causal language models"),
        "r": honoured("the rank, a positive whole number"),
        "lora_alpha": honoured(f"{1 / MAX_ALPHA:.8g} to {MAX_ALPHA:.8g}, else refused"),
        "use_rslora": honoured("`lora_alpha` is multiplied by the root of `r`, so that the scale is the same"),
        "target_modules": honoured(
            "weights of a module that a list leaves out are refused; a regular expression is not evaluated, and null "
            "means the modules that have weights"
        ),
        "exclude_modules": honoured("as `target_modules`: weights of a listed module are refused"),
        "layers_to_transform": honoured("weights of other layers are refused"),
        "layers_pattern": only(None, "", "layers", [], ["layers"], otherwise="the layers are called 'layers' here"),
        "rank_pattern": honoured("each rank must be `r`, else refused"),
        "alpha_pattern": honoured("each alpha must be `lora_alpha`, else refused"),
        "init_lora_weights": only(
            *(True, False, None, "gaussian", "orthogonal", "eva", "mica"),
            otherwise=_CONVERSION,
        ),
        "use_dora": only(*OFF, otherwise="its magnitudes have no place in a LoRA adapter, merge it instead"),
        "bias": only("none", None, otherwise="biases are not trained"),
        "lora_bias": only(*OFF, otherwise="biases are not trained"),
        "fan_in_fan_out": only(*OFF, otherwise="weights are [out, in] here"),
        "modules_to_save": only(None, [], otherwise="whole modules beside an adapter are not trained"),
        "trainable_token_indices": only(None, [], {}, otherwise="single rows of the embedding are not trained"),
        "target_parameters": only(None, [], otherwise="parameters outside modules are not adapted by a file of PEFT's"),
        "layer_replication": only(None, [], otherwise="the base model's layers are not repeated"),
        "ensure_weight_tying": only(*OFF, otherwise="the adapter of a tied head is the head's alone here"),
        "alora_invocation_tokens": only(
            None, otherwise="an adapter that acts from some tokens on would act on all of them here"
        ),
        "use_qalora": only(*OFF, otherwise="adapters that read sums of inputs are not computed here"),
        "qalora_group_size": no_meaning("belongs to `use_qalora`"),
        "use_bdlora": only(*OFF, otherwise="block-diagonal adapters are not computed here, merge it instead"),
        "arrow_config": only(None, otherwise="tokens are not routed among adapters here"),
        "kasa_config": only(None, {}, otherwise="singular values beside an adapter are not computed here"),
        "monteclora_config": only(None, {}, otherwise="adapters that are drawn at random are not computed here"),
        "megatron_config": only(None, {}, otherwise="export the adapter from Megatron to the layout of PEFT"),
        "megatron_core": no_meaning("belongs to `megatron_config`"),
        "velora_config": only(None, {}, otherwise="its projections have no place in a LoRA adapter, remove them"),
        "lora_dropout": no_meaning("acts in PEFT's training alone; training here has no dropout"),
        "loftq_config": _OF_INITIALISATION,
        "eva_config": _OF_INITIALISATION,
        "corda_config": _OF_INITIALISATION,
        "lora_ga_config": _OF_INITIALISATION,
        "base_model_name_or_path": no_meaning("the base model is the server's, or named in the command; shapes decide"),
        "revision": no_meaning("the base model is the server's, or named in the command; shapes decide"),
        "auto_mapping": no_meaning("the class with which PEFT loads the base model"),
        "inference_mode": no_meaning("an imported adapter can be trained"),
        "runtime_config": no_meaning("how PEFT uses memory"),
        "peft_version": no_meaning("the fields tell what is needed"),
    },
)


def refusals(config: Mapping[str, Json]) -> Iterator[str]:
    """Say what in an adapter_config.json keeps the adapter from being one of ours, and what to do about it."""
    yield from ADAPTER_CONFIG_FIELDS.refusals({"peft_type": None, **config})
    for name in ADAPTER_CONFIG_FIELDS.unknown(config):
        yield (
            f"{name} is {shown(config[name])}: this field is not known here; if it does not change what the adapter "
            "computes, remove it"
        )
    yield from _sizes(config)
    for name, single in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        pattern = config.get(name) or {}
        if not isinstance(pattern, dict) or any(each != config.get(single) for each in pattern.values()):
            yield f"{name} is {shown(pattern)}: every module has the same {single} here"
    yield from _malformed(config)


def _sizes(config: Mapping[str, Json]) -> Iterator[str]:
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank <= 0:
        yield f"r is {rank!r}; it must be a positive whole number"
    elif not isinstance(alpha, int | float) or isinstance(alpha, bool) or not _is_alpha(alpha):
        yield f"lora_alpha is {alpha!r}; it must be a number of {1 / MAX_ALPHA:.8g} to {MAX_ALPHA:.8g}"
    elif config.get("use_rslora") not in (True, False, None):
        yield f"use_rslora is {shown(config['use_rslora'])}; it must be true or false"
    elif not _is_alpha(alpha_of(config)):
        yield (
            f"use_rslora is set, and lora_alpha is {alpha!r}: the same adapter without it has {alpha_of(config):.8g}, "
            f"which must be a number of {1 / MAX_ALPHA:.8g} to {MAX_ALPHA:.8g}"
        )


def _is_alpha(value: float) -> bool:
    return 1 / MAX_ALPHA <= value <= MAX_ALPHA


def alpha_of(config: Mapping[str, Json]) -> float:
    """Return the alpha of the same adapter without `use_rslora`, which divides by the root of the rank."""
    alpha = float(config["lora_alpha"])
    return alpha * math.sqrt(config["r"]) if config.get("use_rslora") else alpha


def _malformed(config: Mapping[str, Json]) -> Iterator[str]:
    for name in ("target_modules", "exclude_modules"):
        value = config.get(name)
        if value is not None and not isinstance(value, str) and not _are(str, value):
            yield f"{name} is {shown(value)}; it must be a list of names, or a regular expression"
    layers = config.get("layers_to_transform")
    if layers is not None and not _are(int, [layers] if isinstance(layers, int) else layers):
        yield f"layers_to_transform is {shown(layers)}; it must be a list of whole numbers"


def _are(kind: type, values: Json) -> bool:
    return isinstance(values, list) and all(isinstance(each, kind) and not isinstance(each, bool) for each in values)


def unattached(config: Mapping[str, Json], module: str) -> str | None:
    """Say which field keeps PEFT from attaching an adapter to a module, so that it ignores its weights; None: none.

    Take a config without `refusals`. Regular expressions of strangers may take for ever, so nothing evaluates them.
    """
    excluded, targets = config.get("exclude_modules"), config.get("target_modules")
    if isinstance(excluded, list) and _names(excluded, module):
        return f"exclude_modules names it ({shown(excluded)})"
    if targets == "all-linear" and module == HEAD:
        return "target_modules is 'all-linear', which leaves out the output head"
    if isinstance(targets, list):
        if not _names(targets, module):
            return f"target_modules leaves it out ({shown(targets)})"
        layers = config.get("layers_to_transform")
        layers = [layers] if isinstance(layers, int) else layers
        if layers and _layer(module) not in layers:
            return f"layers_to_transform leaves it out ({shown(layers)})"
    return None


def _names(names: list[str], module: str) -> bool:
    return any(module == name or module.endswith(f".{name}") for name in names)


def _layer(module: str) -> int | None:
    found = re.search(r"(?:^|\.)layers\.(\d{1,9})\.", module)
    return None if found is None else int(found[1])
