"""Text and tokens of a base model: its tokenizer and chat template, read once."""

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from tinsmith import ConfigError, UnsupportedError
from tinsmith_checkpoints.huggingface import read_tokenizer
from tinsmith_openai.chat_template import ChatTemplate

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_BYTE_FALLBACK: Final = re.compile("<0x([0-9A-F]{2})>")  # of SentencePiece


def _bytes_of_characters() -> dict[str, int]:
    """Return what GPT-2 and its followers write for each byte: printable Latin-1 as itself, the others from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(others)}


_BYTES: Final = _bytes_of_characters()


def _tokenizer_in(directory: Path) -> Tokenizer:
    try:
        found = read_tokenizer(directory)
    except ConfigError as error:
        raise UnsupportedError(str(error)) from error
    assert found is not None, "looked for before"
    return found


class ModelText:
    """The tokenizer of a base model, and its chat template if it has one. Any thread may use it."""

    def __init__(self, base_model: str, directory: Path) -> None:
        self.base_model = base_model
        self._tokenizer = _tokenizer_in(directory)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._template = ChatTemplate.of_model(directory)

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            msg = (
                f"the tokenizer of {self.base_model!r} has no chat template, so there is no chat with it; send the "
                "prompt to /completions"
            )
            raise UnsupportedError(msg)
        return self._template

    def encode(self, text: str, *, special: bool) -> list[int]:
        """`special`: with the tokens that the model expects around a text, such as one at its beginning."""
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text, without special tokens."""
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    def stepwise(self) -> Callable[[int], str | None]:
        """Return a function that takes the tokens of a text one by one, and returns what each adds to it.

        None or nothing: it is a special token, or a character is not complete.
        """
        return partial(DecodeStream(skip_special_tokens=True).step, self._tokenizer)

    def piece(self, token: int) -> str:
        """Return the text of one token. Of a part of a character, it is a replacement character."""
        return self._tokenizer.decode([token], skip_special_tokens=False)

    def bytes_of(self, token: int) -> bytes | None:
        """Return the UTF-8 of one token, which may be a part of a character. None if the tokenizer does not tell."""
        piece = self.piece(token)
        if _REPLACEMENT not in piece:
            return piece.encode()
        spelled = self._tokenizer.id_to_token(token) or ""  # an unused row of the output layer has no name
        if (byte := _BYTE_FALLBACK.fullmatch(spelled)) is not None:
            return bytes([int(byte[1], 16)])
        found = [_BYTES.get(character) for character in spelled]
        return bytes(byte for byte in found if byte is not None) if found and None not in found else None

    def is_special(self, token: int) -> bool:
        return token in self._special


class Texts:
    """Those of the base models, each read when somebody asks for it first."""

    def __init__(self, directory_of: Callable[[str], Path | None]) -> None:
        self._directory_of = directory_of
        self._read: dict[str, ModelText] = {}
        self._lock = asyncio.Lock()

    async def of(self, base_model: str) -> ModelText:
        """Raise UnsupportedError if the model has no tokenizer here."""
        if (known := self._read.get(base_model)) is not None:
            return known
        async with self._lock:
            if base_model not in self._read:
                self._read[base_model] = await asyncio.to_thread(self._load, base_model)
            return self._read[base_model]

    def _load(self, base_model: str) -> ModelText:
        directory = self._directory_of(base_model)
        if directory is None or not (directory / "tokenizer.json").exists():
            msg = (
                f"this server finds no tokenizer.json of {base_model!r}, so it cannot read or write text for it; "
                "use the tinker SDK, or set models[].path to the model's directory on this machine"
            )
            raise UnsupportedError(msg)
        return ModelText(base_model, directory)
