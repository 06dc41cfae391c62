"""Who is in the present step, and whose fault a failed one is: its members are tried one by one, at its position.

Sequences whose tokens are drawn anew share steps up to there, because those had gone well. A step is a dispatch, or the
host's preparation of one, for one request or several.
"""

from collections.abc import Iterable, Sequence

from tinsmith_jax.requests import Draw, Request


class Suspects:
    """The sequences that were in steps that failed, with the numbers of tokens that they had."""

    def __init__(self) -> None:
        self.involved: Sequence[Request] = ()  # in the present step
        self._positions: dict[Draw, set[int]] = {}

    def add(self, draws: Iterable[Draw]) -> None:
        for draw in draws:
            self._positions.setdefault(draw, set()).add(len(draw.tokens))

    def groups(self, requests: Iterable[Request]) -> list[list[Request]]:
        """Return which requests may share a step: those at a position of failure alone, then all others together.

        In this order, nobody who is alone waits behind a load that does not end.
        """
        if not self._positions:
            together = list(dict.fromkeys(requests))
            return [together] if together else []
        self._drop_cleared()
        suspected = {draw.request for draw, positions in self._positions.items() if len(draw.tokens) in positions}
        shared: list[Request] = []
        alone: list[list[Request]] = []
        for request in dict.fromkeys(requests):
            if request in suspected:
                alone.append([request])
            else:
                shared.append(request)
        return [*alone, shared] if shared else alone

    def _drop_cleared(self) -> None:
        """Forget those that are past all their positions, and those that have ended."""
        cleared = [
            draw
            for draw, positions in self._positions.items()
            if len(draw.tokens) > max(positions) or draw.stop_reason is not None or draw.request.cancelled
        ]
        for draw in cleared:
            del self._positions[draw]
