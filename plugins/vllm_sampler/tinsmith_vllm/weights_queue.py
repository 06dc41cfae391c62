"""The requests that wait until vLLM has the weights of their snapshot."""

from collections import deque

from tinsmith_vllm.messages import Generate


class WeightsQueue:
    """Who came first decides which weights are loaded next, and all who wait for the same ones start together.

    While anybody waits, nobody joins the running batch, so it drains: a busy snapshot cannot keep others waiting.
    """

    def __init__(self) -> None:
        self.loaded = 0  # the id of the weights that vLLM has; 0 = the base model's
        self._waiting: deque[Generate] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_sequences(self) -> int:
        return sum(len(request.seeds) for request in self._waiting)

    def add(self, request: Generate) -> None:
        self._waiting.append(request)

    def remove(self, request_id: int) -> None:
        self._waiting = deque(each for each in self._waiting if each.request_id != request_id)

    def next(self, *, idle: bool) -> list[Generate]:
        """Take out the requests that may start now: all for the same weights, which may be others if vLLM is idle."""
        if not self._waiting:
            return []
        wanted = self._waiting[0].adapter_id
        if wanted != self.loaded and not idle:
            return []
        chosen = [request for request in self._waiting if request.adapter_id == wanted]
        self._waiting = deque(request for request in self._waiting if request.adapter_id != wanted)
        return chosen
