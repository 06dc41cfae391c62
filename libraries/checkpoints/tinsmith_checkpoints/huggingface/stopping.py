"""When a sequence ends: stop tokens, end-of-sequence tokens, stop strings, the length limit."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from tinsmith_checkpoints.errors import ConfigError, UnsupportedError
from tinsmith_checkpoints.huggingface.fields import announce, shown
from tinsmith_checkpoints.huggingface.outside_files import read_optional_object
from tinsmith_checkpoints.huggingface.text_steps import TextSteps
from tinsmith_checkpoints.huggingface.tokenizer_fields import GENERATION_CONFIG_FIELDS
from tinsmith_checkpoints.huggingface.tokenizer_files import read_tokenizer, special_tokens, tokenizer_config
from tinsmith_checkpoints.values import StopReason

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class StopParams(Protocol):
    """The stop conditions of a request, such as `tinsmith.SamplingParams`."""

    @property
    def max_tokens(self) -> int: ...
    @property
    def stop_tokens(self) -> Sequence[int]: ...
    @property
    def stop_strings(self) -> Sequence[str]: ...
    @property
    def stop_at_eos(self) -> bool: ...


class StopRules:
    """Shared by all requests: the end-of-sequence tokens and the tokenizer of the base model."""

    def __init__(self, eos_tokens: Iterable[int], tokenizer: "Tokenizer | None") -> None:
        self.eos_tokens = frozenset(eos_tokens)
        self.tokenizer = tokenizer

    @classmethod
    def of_model(cls, model_path: Path) -> "StopRules":
        """Read a Hugging Face directory; its tokenizer may be absent.

        A sequence ends with the tokenizer's `eos_token` or an id of `generation_config.json` (of `config.json`, if the
        former has none). Raise ConfigError if one of these files is broken.
        """
        config_eos_tokens = _configured_eos(model_path)
        tokenizer = read_tokenizer(model_path)
        return cls({*config_eos_tokens, *_tokenizer_eos(model_path, tokenizer)}, tokenizer)

    def stop_tokens(self, params: StopParams) -> frozenset[int]:
        """Return the tokens that end a sequence: the listed ones, and end-of-sequence tokens if enabled."""
        return frozenset(params.stop_tokens) | (self.eos_tokens if params.stop_at_eos else frozenset())

    def watch(self, params: StopParams) -> "StopWatch":
        """Start watching one sequence. Raise UnsupportedError if it has stop strings and there is no tokenizer."""
        tail = None
        if params.stop_strings:
            if self.tokenizer is None:
                msg = (
                    f"stop strings {list(params.stop_strings)!r} need the model's tokenizer.json, which its directory "
                    "lacks; pass stop tokens instead"
                )
                raise UnsupportedError(msg)
            tail = DecodedTail(self.tokenizer, params.stop_strings)
        return StopWatch(self.stop_tokens(params), tail, params.max_tokens)


class DecodedTail:
    """Finds stop strings in the text of the last tokens, at a cost that does not grow with the sequence.

    Only a string's length of the text is kept, and only what a token adds is decoded. So a long string costs a search
    in as much text, and not its decoding.
    """

    def __init__(self, tokenizer: "Tokenizer", strings: Sequence[str]) -> None:
        self._steps = TextSteps(tokenizer, skip_special_tokens=False)
        self._strings = tuple(string for string in strings if string)
        self._most = max(map(len, self._strings), default=1) - 1
        self._tail = ""

    def push(self, token: int) -> bool:
        """Add a token. Return True if it completes one of the strings."""
        text = self._tail + self._steps.add(token)
        begin = len(self._tail) + 1  # of matches that end in what is new
        self._tail = text[-self._most :] if self._most else ""
        return any(text.find(string, max(0, begin - len(string))) >= 0 for string in self._strings)


class StopWatch:
    """Follows one sequence, token by token."""

    def __init__(self, stop_tokens: frozenset[int], tail: DecodedTail | None, max_tokens: int) -> None:
        self._stop_tokens = stop_tokens
        self._tail = tail
        self._left = max_tokens

    def push(self, token: int) -> StopReason | None:
        """Add a sampled token. Return the stop reason if it is the last one. It is part of the result in any case."""
        self._left -= 1
        if token in self._stop_tokens or (self._tail is not None and self._tail.push(token)):
            return "stop"
        return "length" if self._left <= 0 else None


def _configured_eos(model_path: Path) -> tuple[int, ...]:
    for name in ("generation_config.json", "config.json"):
        file = model_path / name
        config = read_optional_object(file)
        if name == GENERATION_CONFIG_FIELDS.file:
            announce(file, GENERATION_CONFIG_FIELDS.unknown(config))
        eos = config.get("eos_token_id")
        if eos is not None:
            tokens = eos if isinstance(eos, list) else [eos]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in tokens):
                msg = f"{str(file)!r}: eos_token_id is {shown(eos)}; it must be the number of a token, or several"
                raise ConfigError(msg)
            return tuple(tokens)
    return ()


def _tokenizer_eos(model_path: Path, tokenizer: "Tokenizer | None") -> set[int]:
    if tokenizer is None:
        return set()
    text = special_tokens(tokenizer_config(model_path)).get("eos_token")
    token = tokenizer.token_to_id(text) if text is not None else None
    return set() if token is None else {token}
