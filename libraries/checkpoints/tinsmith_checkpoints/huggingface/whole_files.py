"""Whether the files of a model's directory are whole. `doctor` asks, and every start of an engine.

Contents are not read, apart from JSON and the headers of weight files: a model of 100 shards takes a second.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tinsmith_checkpoints.errors import ConfigError, ServerError
from tinsmith_checkpoints.huggingface.model_files import read_model_config
from tinsmith_checkpoints.huggingface.outside_files import pointer_fault, read_json, read_regular
from tinsmith_checkpoints.huggingface.safetensors_files import index_file, read_header, shard_files, tensor_files

_TOKENIZER: Final = "tokenizer.json"
WITHOUT_TEXT: Final = (
    f"there is no {_TOKENIZER} in the model's directory, so this server takes and gives tokens of it, but no text: "
    "chats, completions and stop strings are refused"
)
_REMEDY: Final = "download or copy the files again"
_SHOWN: Final = 5  # faults; a download that broke off lacks many files


def check_model_files(directory: Path) -> int:
    """Return the size of the weights in bytes. Raise ConfigError that names each file with its fault."""
    read_model_config(directory)
    found = list(model_faults(directory))
    if found:
        more = f"; and {len(found) - _SHOWN} more faults" if len(found) > _SHOWN else ""
        msg = f"{str(directory)!r} cannot be served: {'; '.join(found[:_SHOWN])}{more}; {_REMEDY}"
        raise ConfigError(msg)
    return sum(file.stat().st_size for file in shard_files(directory, "model"))


def lacks_tokenizer(directory: Path) -> bool:
    return not (directory / _TOKENIZER).exists()


def model_faults(directory: Path) -> Iterator[str]:
    """Yield what is wrong with a directory whose config.json can be read: "FILE is damaged: ..."."""
    yield from _weight_faults(directory)
    for name, look in _BESIDE.items():
        file = directory / name
        if os.path.lexists(file) and (fault := _fault(file, look)) is not None:
            yield fault


def _weight_faults(directory: Path) -> Iterator[str]:
    """Yield the faults of each shard, and where the index says other than they do."""
    try:
        shards = shard_files(directory, "model")
        if not shards:
            yield "it has neither model.safetensors nor model.safetensors.index.json"
            return
    except ServerError as error:
        yield str(error)
        return
    whole: dict[Path, frozenset[str]] = {}
    for file in shards:
        try:
            whole[file] = frozenset(read_header(file, exact=True))
        except ServerError as error:
            yield str(error)
    index = index_file(directory, "model").name
    for name, file in tensor_files(directory, "model").items() if len(whole) == len(shards) else ():
        if name not in whole[file]:
            yield f"{index} places {name} in {file.name}, which does not have it"
            return  # the files are of two models


def _fault(file: Path, look: Callable[[Path], object]) -> str | None:
    try:
        if (pointer := pointer_fault(file)) is not None:
            return f"{file.name} {pointer}"
        look(file)
    except (OSError, ValueError) as error:
        return f"{file.name} cannot be read: {getattr(error, 'strerror', None) or error}"
    return None


def _object(file: Path) -> None:
    if not isinstance(read_json(file), dict):
        msg = "it does not hold a JSON object"
        raise ValueError(msg)  # noqa: TRY004 - as for any other content


def _tokenizer(file: Path) -> None:
    from tokenizers import Tokenizer

    content = read_regular(file)
    try:
        Tokenizer.from_buffer(content)
    except Exception as error:  # the package raises nothing more specific
        raise ValueError(str(error)) from error


def _text(file: Path) -> None:
    read_regular(file).decode()


_BESIDE: Final[dict[str, Callable[[Path], None]]] = {
    "generation_config.json": _object,
    _TOKENIZER: _tokenizer,
    "tokenizer_config.json": _object,
    "special_tokens_map.json": _object,
    "chat_template.jinja": _text,
}
"""Files that a model need not have. Each function raises OSError or ValueError if the file is damaged."""
