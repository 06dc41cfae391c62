"""Reading the tokenizer of a Hugging Face directory: what is in its files is honoured, or refused by name."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from tinsmith_checkpoints.errors import ConfigError
from tinsmith_checkpoints.huggingface.fields import FileFields, announce, holds_something
from tinsmith_checkpoints.huggingface.outside_files import open_regular, read_optional_object
from tinsmith_checkpoints.huggingface.tokenizer_fields import (
    ADDED_TOKEN_FIELDS,
    TOKENIZER_CONFIG_FIELDS,
    TOKENIZER_FIELDS,
    TOKENIZER_MODEL_FIELDS,
)
from tinsmith_checkpoints.values import Json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FILE: Final = "tokenizer.json"
_COMPONENTS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")
_FORMER: Final = {"Metaspace": ("add_prefix_space", "str_rep")}
"""Fields of components that the library reads, and writes under other names."""
_LARGE: Final = ("vocab", "merges")
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized")
_NAMED: Final = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""In the order in which transformers adds them."""
_TOKEN: Final = "_token"  # how the names of special tokens end


def read_tokenizer(directory: Path) -> "Tokenizer | None":
    """Return the tokenizer, which neither cuts nor pads; None if the directory has no tokenizer.json.

    Raise ConfigError, naming the field, for what would be ignored or would make tokens random.
    """
    from tokenizers import Tokenizer  # not every process that imports this package needs it

    file = directory / _FILE
    try:
        with open_regular(file) as opened:
            content = opened.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        msg = f"{str(file)!r} cannot be read: {error.strerror or error}"
        raise ConfigError(msg) from error
    parts = _parts(content, file)
    try:
        tokenizer = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises nothing narrower
        msg = f"{str(file)!r} cannot be read as a tokenizer: {error}"
        raise ConfigError(msg) from error
    lost = [name for component in _COMPONENTS for name in _lost_of(tokenizer, component, parts.get(component))]
    if lost:
        msg = (
            f"{str(file)!r}: the installed library `tokenizers` ignores {', '.join(lost)}; install a newer one, or "
            "remove what has no meaning"
        )
        raise ConfigError(msg)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    config = tokenizer_config(directory)
    tokenizer.encode_special_tokens = bool(config.get("split_special_tokens"))
    _add_tokens(tokenizer, config)
    return tokenizer


def tokenizer_config(directory: Path) -> dict[str, Json]:
    """Read tokenizer_config.json, and special_tokens_map.json where transformers does. Any may be absent.

    Raise ConfigError, naming the field, for what is not honoured. What is not known is announced.
    """
    file = directory / "tokenizer_config.json"
    config = read_optional_object(file)
    _refuse(TOKENIZER_CONFIG_FIELDS, config, file)
    announce(file, [name for name in TOKENIZER_CONFIG_FIELDS.unknown(config) if not name.endswith(_TOKEN)])
    if "added_tokens_decoder" not in config:
        config |= read_optional_object(directory / "special_tokens_map.json")
    return config


def special_tokens(config: Mapping[str, Json]) -> dict[str, str]:
    """Return the named special tokens of a tokenizer_config.json, such as `bos_token`."""
    named = {name: config.get(name) for name in _NAMED}
    named |= {name: value for name, value in config.items() if name.endswith(_TOKEN)}
    for more in (config.get("extra_special_tokens"), config.get("model_specific_special_tokens")):
        named |= more if isinstance(more, dict) else {}
    return {name: text for name, value in named.items() if (text := _text(value))}


def _parts(content: bytes, file: Path) -> dict[str, Any]:
    """Return the file's small parts, having checked the fields of all. The vocabulary is not parsed."""
    try:
        raw = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(raw.pop("model", b"{}"), type=dict[str, msgspec.Raw])
        parts = {name: msgspec.json.decode(value) for name, value in raw.items()}
        small = {name: msgspec.json.decode(value) for name, value in model.items() if name not in _LARGE}
        added = msgspec.convert(parts.get("added_tokens") or [], list[dict[str, Any]])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        msg = f"{str(file)!r} cannot be read as a tokenizer: {error}"
        raise ConfigError(msg) from error
    _refuse(TOKENIZER_FIELDS, parts, file, unknown=True)
    _refuse(TOKENIZER_MODEL_FIELDS, small, file, unknown=True)
    for each in added:
        _refuse(ADDED_TOKEN_FIELDS, each, file, unknown=True)
    return parts


def _refuse(table: FileFields, content: Mapping[str, Json], file: Path, *, unknown: bool = False) -> None:
    problems = list(table.refusals(content))
    problems += [
        f"{name} is not known here; remove it if it has no meaning" for name in table.unknown(content) if unknown
    ]
    if problems:
        msg = f"{str(file)!r}: {'; '.join(problems)}"
        raise ConfigError(msg)


def _lost_of(tokenizer: "Tokenizer", component: str, given: Json) -> Iterator[str]:
    kept = getattr(tokenizer, component)
    if kept is not None:
        yield from _lost(given, json.loads(kept.__getstate__()), component)


def _lost(given: Json, kept: Json, where: str) -> Iterator[str]:
    """Name what the library has not kept of a component."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            if name in kept:
                yield from _lost(value, kept[name], f"{where}.{name}")
            elif holds_something(value) and name not in _FORMER.get(str(given.get("type")), ()):
                yield f"{where}.{name}"
    elif isinstance(given, list) and isinstance(kept, list):
        for index, (one, other) in enumerate(zip(given, kept, strict=False)):
            yield from _lost(one, other, f"{where}[{index}]")


def _add_tokens(tokenizer: "Tokenizer", config: Mapping[str, Json]) -> None:
    """Add what transformers adds, in its order: tokens with numbers, named ones, further ones."""
    from tokenizers import AddedToken

    numbered = config.get("added_tokens_decoder")
    by_number = sorted(numbered.items(), key=_number) if isinstance(numbered, dict) else []
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens")
    wanted = [each for _, each in by_number]
    wanted += list(special_tokens(config).values())
    wanted += extra if isinstance(extra, list) else []
    named = set(special_tokens(config).values())
    known = {each.content for each in tokenizer.get_added_tokens_decoder().values()}
    added: list[AddedToken] = []
    for each in wanted:
        text = _text(each)
        if text and text not in known:
            known.add(text)
            told = each if isinstance(each, dict) else {"special": True}
            flags = {name: bool(told[name]) for name in _FLAGS if name in told}
            added.append(AddedToken(text, special=text in named or bool(told.get("special")), **flags))
    tokenizer.add_tokens(added)


def _number(numbered: tuple[str, Json]) -> int:
    if not numbered[0].isdecimal():
        msg = f"tokenizer_config.json: added_tokens_decoder has {numbered[0]!r}, which is not the number of a token"
        raise ConfigError(msg)
    return int(numbered[0])


def _text(value: Json) -> str:
    """Return a special token; older files hold its whole description."""
    content = value.get("content") if isinstance(value, dict) else value
    return content if isinstance(content, str) else ""
