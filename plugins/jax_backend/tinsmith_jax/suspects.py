"""Whose fault a failed step is: those who were in it are tried one by one, until each is past the place of the failure.

A step is a dispatch, or what the host prepares for it, of one request or of several at a time.
"""

from collections.abc import Iterable

from tinsmith_jax.slots import Draw, Request


class Suspects:
    """The sequences that were in a step that failed, with the number of tokens that they had."""

    def __init__(self) -> None:
        self._tokens: dict[Draw, int] = {}

    def add(self, draws: Iterable[Draw]) -> None:
        for draw in draws:
            self._tokens[draw] = max(len(draw.tokens), self._tokens.get(draw, 0))

    def groups(self, requests: Iterable[Request]) -> list[list[Request]]:
        """Return which requests may share a step: all that are under no suspicion, and each of the others alone."""
        if not self._tokens:
            together = list(dict.fromkeys(requests))
            return [together] if together else []
        self._drop_cleared()
        suspected = {draw.request for draw in self._tokens}
        shared: list[Request] = []
        alone: list[list[Request]] = []
        for request in dict.fromkeys(requests):
            if request in suspected:
                alone.append([request])
            else:
                shared.append(request)
        return [shared, *alone] if shared else alone

    def _drop_cleared(self) -> None:
        """Forget those that have drawn a token where the step failed, and those that have ended."""
        cleared = [
            draw
            for draw, tokens in self._tokens.items()
            if len(draw.tokens) > tokens or draw.stop_reason is not None or draw.request.cancelled
        ]
        for draw in cleared:
            del self._tokens[draw]
