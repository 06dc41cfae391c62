"""The rounds of the sampler's thread, until it has to end.

In each round, it drops cancelled requests, fills slots from the queue, reads some prompt tiles, gives sequences the
newest weights of their requests, decodes a few steps and returns finished sequences.

Requests share these steps. If one fails, all go back to where they were before it, and those who were in it are tried
one by one: the one that fails alone is refused, and the others get the bits that they would have had.
"""

import logging
import time
from collections.abc import Sequence

import numpy as np

from tinsmith import Failed, Figures, diverged, log_privately, unless_diverged
from tinsmith_checkpoints.huggingface import StopRules
from tinsmith_jax.inbox import Inbox
from tinsmith_jax.model_config import ModelConfig
from tinsmith_jax.prompt_reader import PromptReader
from tinsmith_jax.requests import DrawQueue, Request
from tinsmith_jax.sampling_values import SamplerDevice, SlotInput
from tinsmith_jax.slots import Slot, Slots
from tinsmith_jax.suspects import Suspects
from tinsmith_workers import WorkerDiedError

logger = logging.getLogger(__name__)


class Rounds:
    """Draws what comes into an inbox. One thread runs it."""

    def __init__(
        self,
        device: SamplerDevice,
        config: ModelConfig,
        rules: StopRules,
        inbox: Inbox,
        *,
        tiles_per_round: int,
        idle_s: float,
        figures: Figures,
    ) -> None:
        """`idle_s`: seconds without a request after which nothing is kept for later ones."""
        self._device, self._rules, self._inbox, self._idle_s = device, rules, inbox, idle_s
        self._figures = figures
        self._suspects = Suspects()
        self.slots = Slots(device, self._suspects)
        self._reader = PromptReader(device, config, self.slots, self._suspects, tiles_per_round=tiles_per_round)
        self._queue = DrawQueue()

    def run(self) -> None:
        try:
            while self._take_arrived():
                try:
                    self._round()
                except WorkerDiedError:  # the devices are gone: only a new engine has others
                    raise
                except Exception as error:  # noqa: BLE001 - whatever it is, it has an owner
                    self._find_fault(error)
        except BaseException as error:
            logger.exception("sampling cannot go on")
            self._inbox.end_with(error)
        finally:  # no request may wait for a thread that has ended
            self._inbox.end()

    def _take_arrived(self) -> bool:
        """Wait until there is something to do. Return False if the thread must end."""
        if not self._inbox.wait(self._idle_s):
            self._forget_dropped()
            self._give_back()
        arrived = self._inbox.take()
        for request in arrived or ():
            self._queue.add(request)
        return arrived is not None

    def _give_back(self) -> None:
        """Keep nothing that nobody uses: prefixes, adapters, and the memory in which they lay."""
        if self._device.shape.grows:
            (pages,), (rows,) = self.slots.forget_unused()
            self._device.give_back(pages, rows)

    def _round(self) -> None:
        self._suspects.involved = ()
        self._drop_cancelled()
        self._forget_dropped()
        self._inbox.note_newest()
        self.slots.fill(self._queue)
        self._reader.read()
        self._inbox.note_newest()
        self.slots.catch_up()
        self._decode()
        self._tell_drawn()
        self._release_ended()

    def _drop_cancelled(self) -> None:
        for request in self._inbox.cancelled():
            self._forget(request)

    def _forget_dropped(self) -> None:
        for serial in self._inbox.dropped():
            self.slots.forget(serial)

    def _decode(self) -> None:
        running = [slot for slot in self.slots if slot.ready]
        for together in self._suspects.groups(slot.request for slot in running):
            wanted = set(together)
            self._decode_slots([slot for slot in running if slot.request in wanted], together)

    def _decode_slots(self, running: Sequence[Slot], requests: Sequence[Request]) -> None:
        num_steps = self._device.shape.max_steps
        for slot in running:
            self._suspects.involved = (slot.request,)
            slot.reserve(num_steps, self.slots.pages[slot.shard])
        rows, given = self.slots.in_rows(running), SlotInput.idle(self._device.shape)
        for row, slot in rows.items():
            self._suspects.involved = (slot.request,)
            slot.describe(given, row)
        self._suspects.involved = requests
        drawn = self._device.decode(given, num_steps)
        for row, slot in rows.items():
            self._suspects.involved = (slot.request,)
            slot.take(drawn, row)

    def _tell_drawn(self) -> None:
        for draw in self.slots.draws:
            if draw.request.first_token_s is None and draw.tokens:
                draw.request.first_token_s = time.monotonic() - draw.request.asked_at_s
                self._figures.drew_first(draw.request.first_token_s)
            if draw.request.on_tokens is not None and draw.num_told < len(draw.tokens):
                self._inbox.tell(draw.request, draw.index, draw.num_told, draw.tokens[draw.num_told :])
                draw.num_told = len(draw.tokens)

    def _release_ended(self) -> None:
        for request in {draw.request for draw in self.slots.draws}:
            self._suspects.involved = (request,)
            self._release_ended_of(request)

    def _release_ended_of(self, request: Request) -> None:
        """Free the slots of sequences that have ended. Complete a request once all its sequences have ended."""
        bad = next((d for d in request.draws if d.logprobs and not np.isfinite(d.logprobs[-1])), None)
        if bad is not None:
            self._inbox.answer(request, diverged(request.op))
            self._forget(request)
            return
        for slot in self.slots.of(request):
            if slot.draw is not None and slot.draw.stop_reason is not None:
                if slot.prompt is not None:
                    slot.draw.experts_of_prompt = self._reader.experts_of(slot.prompt)
                self.slots.leave(slot)
        if request.finished:
            self._inbox.answer(request, unless_diverged(request.op, request.result()))

    def _forget(self, request: Request) -> None:
        """Remove a request from slots and queue without completing it."""
        request.cancelled = True
        self._queue.remove_cancelled()
        for slot in self.slots.of(request):
            self.slots.leave(slot)
        self._inbox.forget(request)

    # Faults

    def _find_fault(self, error: Exception) -> None:
        """Put everybody back to before the step that failed. Refuse a request that was alone in it.

        Raise the error if no request caused it: if the device fails by itself, or does not start again.
        """
        involved = [request for request in self._suspects.involved if request in self._inbox]
        if not involved:
            raise error
        if len(involved) > 1:
            logger.warning("a sampling step of %d requests failed, they are tried one by one: %r", len(involved), error)
            self._suspects.add(draw for draw in self.slots.draws if draw.request in set(involved))
        if self._device.is_intact():
            self._reader.take_back(self._queue)
        else:
            self._start_again()
        if len(involved) == 1:
            self._try_device()
            self._inbox.answer(involved[0], fails_alone(error))
            self._forget(involved[0])

    def _start_again(self) -> None:
        """After the device's state is lost: draw every sequence in a slot anew. Its seed gives the same bits."""
        for draw in reversed(self.slots.draws):
            draw.start_again(self._rules.watch(draw.request.op.params))
            self._queue.put_back(draw)
        self.slots.clear()
        self._reader.clear()
        self._device.reset()

    def _try_device(self) -> None:
        """Decode one token of no request, on the page that no request uses."""
        given = SlotInput.idle(self._device.shape)
        given.left[0] = 1
        self._device.decode(given, 1)


def fails_alone(error: Exception) -> Failed:
    what = "sampling failed with this request alone"
    reference = log_privately(logger, what, error=error)
    return Failed(message=f"{what} ({reference})", category="server", cause=f"{type(error).__name__}: {error}")
