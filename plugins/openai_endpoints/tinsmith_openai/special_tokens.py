"""Special tokens that somebody spells in a chat's text: they stay text.

A template writes its own special tokens as text too, so both look alike once a conversation is rendered. Therefore,
what is spelled in messages is quoted before: replaced by a word that nobody can guess. Rendered text with quotes is
encoded by a second tokenizer, which knows the special tokens by other, secret names: the template's are renamed, and
what was quoted is itself again, so the tokenizer finds nothing special about it.
"""

import json
import re
import secrets
from collections.abc import Iterable
from threading import Lock
from typing import Any, Final

from tokenizers import AddedToken, Tokenizer

from tinsmith_checkpoints.huggingface import Json

_BARS: Final = ("<|", "<\N{FULLWIDTH VERTICAL LINE}", "\N{FULLWIDTH VERTICAL LINE}")


class SpecialTokens:
    """Those of one tokenizer, and what looks like one: some models mark turns with tokens that are not said to be."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        added: Iterable[AddedToken] = tokenizer.get_added_tokens_decoder().values()
        self._texts = sorted(each.content for each in added if each.special or each.content.startswith(_BARS))
        self._spelled = re.compile(_any_of(self._texts)) if self._texts else None
        key = secrets.token_hex(12)
        self._quotes = {text: f"q{key}x{index}z" for index, text in enumerate(self._texts)}
        self._quoted = re.compile(f"q{key}x([0-9]+)z")
        self._begin = f"q{key}x"
        secret = secrets.token_hex(12)
        self._names = {text: f"s{secret}x{index}z" for index, text in enumerate(self._texts)}
        self._tokenizer = tokenizer
        self._renamed: Tokenizer | None = None
        self._lock = Lock()

    def quoted(self, value: Json) -> Json:
        """Return the value with quotes in place of all special tokens that are spelled in its texts."""
        match value:
            case str() if self._spelled is not None:
                return self._spelled.sub(lambda found: self._quotes[found[0]], value)
            case list():
                return [self.quoted(each) for each in value]
            case dict():
                return {str(self.quoted(name)): self.quoted(each) for name, each in value.items()}
        return value

    def has_quotes(self, text: str) -> bool:
        return self._begin in text

    def unquoted(self, text: str) -> str:
        """Return the text as it would be read without quotes."""
        return self._quoted.sub(lambda found: self._texts[int(found[1])], text) if self.has_quotes(text) else text

    def renamed(self, text: str) -> tuple[Tokenizer, str]:
        """Return a tokenizer by which the text of special tokens is text, unless it is the template's own."""
        with self._lock:
            if self._renamed is None:
                self._renamed = _renamed(self._tokenizer, self._names)
        assert self._spelled is not None, "something was quoted"
        return self._renamed, self.unquoted(self._spelled.sub(lambda found: self._names[found[0]], text))


def _any_of(texts: Iterable[str]) -> str:
    """Return a pattern for the longest of these texts, which takes one step for each character of a text.

    An alternative for each of a thousand special tokens would take a thousand.
    """
    tree: dict[str, Any] = {}  # Any: a tree of trees, by character; a text ends where one has the empty character
    for text in texts:
        branch = tree
        for character in text:
            branch = branch.setdefault(character, {})
        branch[""] = {}
    return _pattern(tree)


def _pattern(tree: dict[str, Any]) -> str:
    parts = [re.escape(character) + _pattern(branch) for character, branch in tree.items() if character]
    if not parts:
        return ""
    return f"(?:{'|'.join(parts)}){'?' if '' in tree else ''}"


def _renamed(tokenizer: Tokenizer, names: dict[str, str]) -> Tokenizer:
    described = json.loads(tokenizer.to_str())
    for token in described["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    model = described["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(text, text): number for text, number in vocabulary.items()}
    else:
        model["vocab"] = [[names.get(text, text), score] for text, score in vocabulary]
    if isinstance(unknown := model.get("unk_token"), str):
        model["unk_token"] = names.get(unknown, unknown)
    return Tokenizer.from_str(json.dumps(described))
