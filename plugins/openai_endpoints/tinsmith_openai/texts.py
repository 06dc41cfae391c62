"""Text and tokens of a base model: its tokenizer and chat template, read once."""

import asyncio
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from tinsmith import ConfigError, TokenArray, UnsupportedError
from tinsmith_checkpoints.huggingface import TextSteps, read_tokenizer
from tinsmith_openai.chat_template import ChatTemplate
from tinsmith_openai.refusals import TooLongError
from tinsmith_openai.special_tokens import SpecialTokens
from tinsmith_openai.text_work import Asker

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_LIKELY_CHARS: Final = 8
"""Of a token. Hardly any text has as many on average."""
_CUT_TOKENS: Final = 64
"""By so many, the tokens of a text's beginning may differ from the beginning of its tokens."""
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
        self._longest = max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)
        """Of a token, in characters: where one stands for a byte, no text of the token has more."""
        self._pieces: dict[int, str] = {}  # of the vocabulary
        self.special_tokens = SpecialTokens(self._tokenizer)
        self._template = ChatTemplate.of_model(directory)
        marks = frozenset(() if self._template is None else self._template.marks)
        self._marks = frozenset(token for token, what in added.items() if what.special and what.content in marks)

    @property
    def template(self) -> ChatTemplate:
        if self._template is None:
            msg = (
                f"the tokenizer of {self.base_model!r} has no chat template, so there is no chat with it; send the "
                "prompt to /completions"
            )
            raise UnsupportedError(msg)
        return self._template

    def refuse_long(self, num_chars: int, window: int) -> None:
        """Raise TooLongError if no text of so many characters fits into a context of `window` tokens."""
        num_tokens = -(-num_chars // self._longest)
        if num_tokens > window:
            raise TooLongError(num_prompt=num_tokens, max_context_tokens=window, at_least=True)

    def encode(self, text: str, *, special: bool, window: int, asker: Asker) -> TokenArray:
        """Return the tokens, or raise TooLongError if they do not fit into a context of `window` tokens.

        Texts that are quoted in it, by `special_tokens`, are not read as special tokens.
        `special`: with the tokens that the model expects around a text, such as one at its beginning. Python's lock is
        free meanwhile: `Tokenizer.encode` holds it in any thread, for seconds with some megabytes. The beginning of a
        long text comes first, because it mostly shows that the whole is too long.
        """
        tokenizer = self._tokenizer
        self.refuse_long(len(self.special_tokens.unquoted(text)), window)
        if self.special_tokens.has_quotes(text):
            tokenizer, text = self.special_tokens.renamed(text)
        size = _LIKELY_CHARS * (window + _CUT_TOKENS)
        while size < len(text):
            found = tokenizer.encode_batch_fast([text[:size]], add_special_tokens=False)[0]
            asker.check()
            if len(found) > window + _CUT_TOKENS:
                raise TooLongError(num_prompt=len(found) - _CUT_TOKENS, max_context_tokens=window, at_least=True)
            size *= 4
        whole = tokenizer.encode_batch_fast([text], add_special_tokens=special)[0]
        asker.check()
        if len(whole) > window:
            raise TooLongError(num_prompt=len(whole), max_context_tokens=window)
        return np.array(whole.ids, np.int32)

    def decode(self, tokens: Sequence[int], *, marks: bool = False) -> str:
        """Return the text, without special tokens. `marks`: with those that mark reasoning and calls."""
        skipped = self._skipped(marks=marks)
        shown = [token for token in tokens if token not in skipped]
        (text,) = self._tokenizer.decode_batch([shown], skip_special_tokens=False)  # `decode` holds Python's lock
        return text

    def stepwise(self, *, marks: bool = False) -> Callable[[int], str]:
        """Return a function that takes the tokens of a text one by one, and returns what each adds to it.

        Nothing, if it is a special token, or a character is not complete. `marks`: as in `decode`.
        """
        skipped, add = self._skipped(marks=marks), TextSteps(self._tokenizer, skip_special_tokens=False).add
        return lambda token: "" if token in skipped else add(token)

    def _skipped(self, *, marks: bool) -> frozenset[int]:
        return self._special - self._marks if marks else self._special

    def piece(self, token: int) -> str:
        """Return the text of one token. Of a part of a character, it is a replacement character."""
        if (known := self._pieces.get(token)) is None:
            known = self._pieces[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return known

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
