"""The text that each token adds to a sequence, at a cost that does not grow with the sequence."""

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MOST_UNFINISHED: Final = 8
"""Tokens of bytes that are no character yet. No character has more than four bytes, so what precedes is certain."""


class TextSteps:
    """Takes the tokens of a sequence one by one. A character comes with the token that completes it.

    A token's text depends on the one before it, in some tokenizers, so both are decoded together. The decoder of
    `tokenizers` has no bound: of bytes that never become a character, it decodes all again at each token.
    """

    def __init__(self, tokenizer: "Tokenizer", *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped: frozenset[int] = frozenset()
        if skip_special_tokens:
            added = tokenizer.get_added_tokens_decoder()
            self._skipped = frozenset(token for token, what in added.items() if what.special)
        self._tokens: list[int] = []
        self._num_said = 0  # tokens whose text is known: they are only decoded with the next
        self._known = 0  # characters of the tokens' text that were returned

    def add(self, token: int) -> str:
        """Return the text that is certain now and was not returned before."""
        if token in self._skipped or self._tokenizer.id_to_token(token) is None:
            return ""  # a row without a token (padding of the vocabulary) has no text
        self._tokens.append(token)
        text, end = self._decoded(), 0
        if not text.endswith(_REPLACEMENT):
            end = len(text)
        elif len(self._tokens) - self._num_said >= _MOST_UNFINISHED:
            end = len(text) - 1  # the last bytes may become a character
        else:
            return ""
        said = text[self._known : end]
        self._tokens = self._tokens[self._num_said :][-_MOST_UNFINISHED // 2 :]
        self._num_said = len(self._tokens)
        again = self._decoded()
        self._known = len(again) - (len(text) - end)
        return said

    def _decoded(self) -> str:
        return self._tokenizer.decode(self._tokens, skip_special_tokens=False)
