"""Requests for samples, their sequences and scores, and the queue for the slots.

Plain host objects without device state. Only the sampler's thread touches them once a request is in the line.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from tinsmith import (
    Array,
    FloatArray,
    IntArray,
    OnTokens,
    Sample,
    SampledSequence,
    SampleOutput,
    StopReason,
    TopLogprobs,
    WeightsSpan,
)
from tinsmith_checkpoints.huggingface import StopRules, StopWatch
from tinsmith_jax.adapters import Adapter
from tinsmith_jax.sampling_values import Drawn, PromptDraws, PromptFound

UNUSED_LOGPROB = -99999.0
"""The API's logprob for empty cells of top-k matrices; their token is 0."""
_OF_PROMPT = 1 << 32  # in place of a sequence's number: the generator of the prompt's alternatives


@dataclass(slots=True, kw_only=True)
class LoadedSnapshot:
    """A snapshot's device arrays. Requests hold references, so a dropped snapshot is freed after its last request."""

    snapshot_id: str
    serial: int  # unique in this process: identifies an adapter without keeping it alive
    arrays: Adapter
    scale: float


class Draw:
    """One of a request's sequences."""

    def __init__(self, request: "Request", index: int, watch: StopWatch) -> None:
        self.request = request
        self.index = index
        self.start_again(watch)

    def start_again(self, watch: StopWatch) -> None:
        """Begin with nothing drawn."""
        self.tokens: list[int] = []
        self.num_told = 0  # of a sample that is streamed
        self.logprobs: list[float] = []
        self.drawn_from: list[str | None] = []  # the snapshot of each token
        self.top_ids: list[IntArray] = []
        self.top_logprobs: list[FloatArray] = []
        self.experts: list[Array] = []  # [L, C], of the prompt's last token and of all drawn ones but the last
        self.experts_of_prompt: Array | None = None  # of the tokens before
        self.stop_reason: StopReason | None = None
        self._watch = watch

    @property
    def position(self) -> int:
        """Return where the latest token lies, which is not in the cache yet."""
        return len(self.request.op.prompt_P) - 1 + len(self.tokens)

    def push(self, token: int, logprob: float, snapshot_id: str | None) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.drawn_from.append(snapshot_id)
        self.stop_reason = self._watch.push(token)

    def take(self, drawn: Drawn, row: int, snapshot_id: str | None) -> None:
        """Take over what a dispatch has drawn in a row from a snapshot, up to the end of the sequence."""
        top_k = self.request.op.topk_sample_logprobs
        for step, token in enumerate(drawn.tokens_XB[:, row]):
            if token < 0 or self.stop_reason is not None:
                return
            self.push(int(token), float(drawn.logprobs_XB[step, row]), snapshot_id)
            if top_k and drawn.top_ids_XBK is not None and drawn.top_logprobs_XBK is not None:
                self.top_ids.append(drawn.top_ids_XBK[step, row, :top_k])
                self.top_logprobs.append(drawn.top_logprobs_XBK[step, row, :top_k])
            if drawn.experts_XBLC is not None:
                self.experts.append(drawn.experts_XBLC[step, row])

    def result(self) -> SampledSequence:
        assert self.stop_reason is not None, "a sequence has a result once it has ended"
        top = None
        if self.request.op.topk_sample_logprobs:
            ids, values = np.stack(self.top_ids).astype(np.int32), np.stack(self.top_logprobs).astype(np.float32)
            top = TopLogprobs(token_ids=ids, logprobs=values)
        experts = None
        if self.experts_of_prompt is not None:
            experts = np.concatenate((self.experts_of_prompt, np.stack(self.experts))).astype(np.uint16)
        return SampledSequence(
            tokens=np.array(self.tokens, np.int32),
            logprobs=np.array(self.logprobs, np.float32),
            stop_reason=self.stop_reason,
            top_logprobs=top,
            routed_experts=experts,
            weights=self._weights(),
        )

    def _weights(self) -> tuple[WeightsSpan, ...]:
        if set(self.drawn_from) == {self.request.op.snapshot_id}:
            return ()
        return WeightsSpan.of_tokens(name for name in self.drawn_from if name is not None)


class PromptScores:
    """The requested scores of a prompt, filled in tile by tile.

    The hidden state at position i scores the token at i + 1, so `num_rows` is one less than the prompt's length.
    """

    def __init__(self, op: Sample) -> None:
        P = len(op.prompt_P)
        self._num_rows = P - 1
        last_n = P if op.prompt_logprobs_last_n is None else op.prompt_logprobs_last_n
        self._first_row = max(0, P - last_n - 1)
        self._wants_logprobs, self._num_top = op.prompt_logprobs, op.topk_prompt_logprobs
        next_token = op.prompt_P[1:].astype(np.int64)[:, None]
        extra = op.target_prompt_logprobs
        self.targets = next_token if extra is None else np.concatenate([next_token, extra], axis=1)
        self._scored = np.zeros(self.targets.shape, np.float32)
        self._wants_targets = extra is not None
        self._top_ids = np.zeros((P, self._num_top), np.int32)
        self._top_logprobs = np.full((P, self._num_top), UNUSED_LOGPROB, np.float32)
        self._num_drawn, self._temperature = op.prompt_alt_tokens_k, op.params.temperature
        rng = np.random.default_rng([op.params.seed, _OF_PROMPT])
        self._uniform = rng.random((P - 1, self._num_drawn), np.float32)
        self._drawn = np.zeros((P - 1, self._num_drawn), np.int32)
        self._drawn_logprobs = np.zeros((P - 1, self._num_drawn), np.float32)

    def wants(self, first: int, last: int) -> bool:
        """Return whether any of the rows from `first` up to but excluding `last` needs logits."""
        rows = slice(first, min(last, self._num_rows))
        windowed = (self._wants_logprobs or self._num_top > 0) and rows.stop > max(rows.start, self._first_row)
        drawn = self._num_drawn > 0 and rows.stop > rows.start
        return windowed or drawn or bool((self.targets[rows, 1:] >= 0).any())

    def draws(self, first: int, last: int) -> PromptDraws | None:
        """Return the draws for the rows from `first` up to but excluding `last`."""
        if not self._num_drawn:
            return None
        return PromptDraws(uniform_TD=self._uniform[first:last], temperature=self._temperature)

    @property
    def wants_top(self) -> bool:
        return self._num_top > 0

    def fill(self, first: int, found: PromptFound) -> None:
        """Store the scores of the rows from `first` on, ignoring rows past the prompt or outside the window."""
        rows = slice(first, min(first + len(found.logprobs), self._num_rows))
        number = rows.stop - rows.start
        self._scored[rows] = found.logprobs[:number]
        self._drawn[rows] = found.drawn[:number, : self._num_drawn]
        self._drawn_logprobs[rows] = found.drawn_logprobs[:number, : self._num_drawn]
        window = slice(max(first, self._first_row), rows.stop)
        if self._num_top and window.stop > window.start:
            source = slice(window.start - first, window.stop - first)
            self._top_ids[window.start + 1 : window.stop + 1] = found.top_ids[source, : self._num_top]
            self._top_logprobs[window.start + 1 : window.stop + 1] = found.top_logprobs[source, : self._num_top]

    def logprobs(self) -> FloatArray | None:
        if not self._wants_logprobs:
            return None
        result = np.full(self._num_rows + 1, np.nan, np.float32)
        result[self._first_row + 1 :] = self._scored[self._first_row :, 0]
        return result

    def top(self) -> TopLogprobs | None:
        return TopLogprobs(token_ids=self._top_ids, logprobs=self._top_logprobs) if self._num_top else None

    def drawn(self) -> TopLogprobs | None:
        return TopLogprobs(token_ids=self._drawn, logprobs=self._drawn_logprobs) if self._num_drawn else None

    def target_logprobs(self) -> FloatArray | None:
        return self._scored[:, 1:].copy() if self._wants_targets else None


class Request:
    """A sample operation in progress.

    Another thread may set `cancelled` and `newest`; they are read between dispatches.
    """

    def __init__(
        self, op: Sample, snapshot: LoadedSnapshot | None, rules: StopRules, on_tokens: OnTokens | None = None
    ) -> None:
        self.op = op
        self.on_tokens = on_tokens  # called from the event loop
        self.snapshot = snapshot  # with which its sequences go on
        self.newest = snapshot  # which takes its place, at a point that suits the thread
        self.cancelled = False
        self.asked_at_s = time.monotonic()
        self.first_token_s: float | None = None  # from then until the first token of any sequence was drawn
        self.stop_tokens = rules.stop_tokens(op.params)
        self.draws = [Draw(self, index, rules.watch(op.params)) for index in range(op.num_samples)]
        self.scores = PromptScores(op)
        self.scored_by = 0  # the serial of the adapter that scores the prompt
        self.scored_tokens = 0  # of the prompt, which is scored once even if several shards read it
        self.cached_tokens = 0  # of the prompt, that the first sequence found in the cache

    @property
    def num_prefill(self) -> int:
        """The number of prompt tokens to cache before decoding. The last prompt token is decoding's first input."""
        return len(self.op.prompt_P) - 1

    @property
    def num_kept(self) -> int:
        """The most tokens of a sequence that are in the cache. The last one that is drawn is not."""
        return len(self.op.prompt_P) + self.op.params.max_tokens - 1

    def read_with(self, serial: int) -> None:
        """Note that the prompt is about to be read with an adapter, from its beginning.

        The first one that reads it scores it. If a newer one reads it before that is done, it scores all of it.
        """
        if serial != self.scored_by and self.scored_tokens < self.num_prefill:
            self.scored_by, self.scored_tokens = serial, 0

    def scores_tile(self, first: int, last: int, serial: int) -> bool:
        """Return whether an adapter that reads these positions of the prompt is still to score them."""
        return serial == self.scored_by and last > self.scored_tokens and self.scores.wants(first, last)

    @property
    def finished(self) -> bool:
        return all(draw.stop_reason is not None for draw in self.draws)

    def result(self) -> SampleOutput:
        return SampleOutput(
            sequences=tuple(draw.result() for draw in self.draws),
            prompt_logprobs=self.scores.logprobs(),
            top_prompt_logprobs=self.scores.top(),
            target_prompt_logprobs=self.scores.target_logprobs(),
            prompt_alt_tokens=self.scores.drawn(),
            prompt_cache_hit_tokens=self.cached_tokens,
            first_token_s=self.first_token_s,
        )


@dataclass(slots=True)
class DrawQueue:
    """Sequences waiting for a slot: sessions with the fewest slots first, and in order within a sampling session."""

    _queues: OrderedDict[str, deque[Draw]] = field(default_factory=OrderedDict)

    def add(self, request: Request) -> None:
        self._queues.setdefault(request.op.sampling_session_id, deque()).extend(request.draws)

    def first(self, running: Iterable[Draw]) -> Draw | None:
        """Return the next sequence, given those that have a slot; None if the queue is empty."""
        if not self._queues:
            return None
        held = [draw.request.op.sampling_session_id for draw in running]
        session = min(self._queues, key=held.count)  # among equals, the one that has waited longest
        return self._queues[session][0]

    def remove(self, first: Draw) -> None:
        """Remove what `first` has returned."""
        session = first.request.op.sampling_session_id
        queue = self._queues.pop(session)
        draw = queue.popleft()
        assert draw is first
        if queue:
            self._queues[session] = queue  # at the end, as it has just been served

    def put_back(self, draw: Draw) -> None:
        """Add a sequence that had a slot, before all others."""
        session = draw.request.op.sampling_session_id
        self._queues.setdefault(session, deque()).appendleft(draw)
        self._queues.move_to_end(session, last=False)

    def remove_cancelled(self) -> None:
        for session, queue in list(self._queues.items()):
            kept = deque(draw for draw in queue if not draw.request.cancelled)
            if kept:
                self._queues[session] = kept
            else:
                del self._queues[session]

    def __iter__(self) -> Iterator[Draw]:
        return (draw for queue in self._queues.values() for draw in queue)

    def __len__(self) -> int:
        return sum(len(queue) for queue in self._queues.values())
