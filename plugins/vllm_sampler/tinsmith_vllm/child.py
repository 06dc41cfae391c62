"""The vLLM process: takes requests from a socket, steps the engine, and sends back the drawn tokens.

Ends when the other end of the socket closes, for whatever reason. Imports no tinsmith package except this one, because
it may run in an environment that has only vLLM.
"""

import ctypes
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from typing import Any, Final

import numpy as np

from tinsmith_vllm import compat
from tinsmith_vllm.channel import Channel
from tinsmith_vllm.messages import (
    QUESTION,
    SEED,
    Abort,
    Beat,
    Count,
    Counted,
    Drawn,
    Generate,
    Load,
    Loaded,
    PromptQuestion,
    PromptScores,
    Ready,
    Refused,
    Rest,
    Rested,
    Start,
    Target,
    ToVllm,
    Unload,
    Unstartable,
)
from tinsmith_vllm.weights_queue import WeightsQueue

_BEAT_S: Final = 2.0
_POLL_S: Final = 0.005  # while only adapters are being read
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    descriptor = int(sys.argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # Linux; elsewhere the closed socket ends it
    channel: Channel[ToVllm] = Channel(socket.socket(fileno=descriptor), ToVllm)
    start = channel.receive()
    if not isinstance(start, Start):
        return
    inbox: queue.SimpleQueue[ToVllm] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, inbox), name="reader", daemon=True).start()
    try:
        engine, merges = _engine(start, channel)
    except Exception as error:
        if compat.is_hopeless(error):
            channel.send(Unstartable(message=f"{type(error).__name__}: {error}"))
        raise
    if start.routed_experts:
        engine.collective_rpc("tinsmith_keep_experts")
    EngineLoop(engine, channel, inbox, WeightsQueue() if merges else None, routed_experts=start.routed_experts).run()


def _read(channel: Channel[ToVllm], inbox: "queue.SimpleQueue[ToVllm]") -> None:
    code = 1  # a message cannot be read
    try:
        while (message := channel.receive()) is not None:
            inbox.put(message)
        code = 0
    except Exception:
        traceback.print_exc()
        raise
    finally:
        os._exit(code)  # the parent is gone or cannot be understood, and vLLM may be doing anything


def _engine(start: Start, channel: Channel[ToVllm]) -> tuple[Any, bool]:
    version, cpu = compat.installed()
    compat.check_version(version)
    if cpu and start.impossible_on_cpu:
        raise compat.UnsupportedVllmError(start.impossible_on_cpu)
    engine_args = dict(start.engine_args)
    if start.float32_on_cpu:
        engine_args["dtype"] = "float32" if cpu else "bfloat16"
    if start.eager_on_cpu:
        engine_args["enforce_eager"] = cpu
    if start.half_the_memory_on_cpu and cpu:
        engine_args["gpu_memory_utilization"] = 0.5
    if start.merge_on_cpu and cpu:
        engine_args["enable_lora"] = False
    merges = not engine_args["enable_lora"]
    on_ray = engine_args.get("distributed_executor_backend") == "ray"  # and so perhaps on other machines
    compat.prepare_environment(cpu=cpu, eager=bool(engine_args["enforce_eager"]), on_ray=on_ray)
    if not cpu:
        compat.check_platform(version)
        engine_args.setdefault("max_num_batched_tokens", start.step_tokens_on_gpu)
    engine = compat.make_engine(engine_args)
    device, vocab_size, max_model_len, dtype = compat.describe(engine)
    targets: list[Target] = ["attn", "mlp", "unembed"] if merges else engine.collective_rpc("tinsmith_targets")[0]
    channel.send(
        Ready(
            version=version,
            device=device,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            dtype=dtype,
            targets=targets,
            merges=merges,
        )
    )
    return engine, merges


class EngineLoop:
    """Runs the engine. Requests join the running batch between two steps.

    With `waiting`, vLLM has the weights of one snapshot at a time, and requests for others wait there.
    """

    def __init__(
        self,
        engine: Any,
        channel: Channel[ToVllm],
        inbox: "queue.SimpleQueue[ToVllm]",
        waiting: WeightsQueue | None,
        *,
        routed_experts: bool,
    ) -> None:
        self._engine = engine
        self._channel = channel
        self._inbox = inbox
        self._waiting = waiting
        self._routed_experts = routed_experts
        self._routed: dict[str, int] = {}  # of running sequences: tokens whose experts were sent
        self._adapters: dict[int, Load] = {}
        self._reading: set[int] = set()
        self._requests: dict[str, Generate] = {}  # running sequences, by vLLM's name for them
        self._asked: set[int] = set()  # requests whose prompt scores are still to be sent
        self._asleep = False
        self._beat = time.monotonic()

    def run(self) -> None:
        while True:
            self._take_messages()
            self._report_adapters()
            self._admit()
            if self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    self._report(output)
                self._say_beat()

    def _take_messages(self) -> None:
        """Handle all messages that have arrived. Wait for one if there is nothing else to do."""
        if not self._engine.has_unfinished_requests() and self._inbox.empty() and not self._waiting:
            try:
                self._handle(self._inbox.get(timeout=_POLL_S if self._reading else None))
            except queue.Empty:
                return
        while not self._inbox.empty():
            self._handle(self._inbox.get())

    def _handle(self, message: ToVllm) -> None:
        match message:
            case Generate() if self._waiting is not None:
                self._waiting.add(message)
            case Generate():
                self._generate(message)
            case Abort():
                self._abort(message)
            case Load():
                self._load(message)
            case Unload():
                self._unload(message)
            case Count():
                number = int(self._engine.get_num_unfinished_requests())
                number += 0 if self._waiting is None else self._waiting.num_sequences
                self._channel.send(Counted(request_id=message.request_id, num_sequences=number))
            case Rest():
                self._rest(asleep=message.asleep)
                self._channel.send(Rested(request_id=message.request_id))
            case Start():
                raise AssertionError(message)

    def _load(self, message: Load) -> None:
        self._adapters[message.adapter_id] = message
        if message.prepare:
            self._engine.collective_rpc("tinsmith_prepare", args=(message.adapter_id, message.name, message.path))
            self._reading.add(message.adapter_id)

    def _unload(self, message: Unload) -> None:
        self._adapters.pop(message.adapter_id, None)
        if self._waiting is None:
            self._engine.remove_lora(message.adapter_id)

    def _rest(self, *, asleep: bool) -> None:
        if asleep == self._asleep:
            return
        if asleep:
            while self._reading:  # adapters whose load was given up
                self._report_adapters()
                time.sleep(_POLL_S)
            compat.end_steps(self._engine)
            self._drop_prefixes()
            self._engine.sleep(level=1)  # the weights go to the host, keys and values are dropped
        else:
            self._engine.wake_up()
        self._asleep = asleep

    def _drop_prefixes(self) -> None:
        if not self._engine.reset_prefix_cache():
            msg = "vllm keeps a prefix cache that would be of other weights, or of memory that is gone"
            raise RuntimeError(msg)

    def _admit(self) -> None:
        """Start what waits in the queue and may start now, after loading its weights if need be."""
        if self._waiting is None:
            return
        requests = self._waiting.next(idle=not self._engine.has_unfinished_requests())
        if requests and requests[0].adapter_id != self._waiting.loaded:
            self._load_weights(requests[0].adapter_id)
            self._waiting.loaded = requests[0].adapter_id
        for request in requests:
            self._generate(request)

    def _load_weights(self, adapter_id: int) -> None:
        path = self._adapters[adapter_id].path if adapter_id else ""
        compat.end_steps(self._engine)
        self._engine.collective_rpc("tinsmith_load_weights", args=(path,))
        self._drop_prefixes()

    def _generate(self, message: Generate) -> None:
        prompt = np.frombuffer(message.prompt, np.int32).tolist()
        added: list[str] = []
        for index, seed in enumerate(message.seeds):
            name = f"{message.request_id}.{index}"
            try:
                self._engine.add_request(
                    name,
                    compat.tokens_prompt(prompt, message.cache_salt),
                    self._params(message, index, seed),
                    **self._adapter(message),
                )
            except Exception as error:  # noqa: BLE001 - whatever one request raises refuses that request alone
                self._engine.abort_request(added)
                for each in added:
                    del self._requests[each]
                self._channel.send(
                    Refused(
                        request_id=message.request_id,
                        message=f"{type(error).__name__}: {error}",
                        is_for_sender=compat.is_senders_fault(error),
                    )
                )
                return
            added.append(name)
            self._requests[name] = message
        if message.question is not None:
            self._asked.add(message.request_id)

    def _adapter(self, message: Generate) -> dict[str, Any]:
        if self._waiting is not None or not message.adapter_id:
            return {}
        found = self._adapters[message.adapter_id]
        return {"lora_request": compat.lora_request(found.adapter_id, found.name, found.path)}

    @staticmethod
    def _params(message: Generate, index: int, seed: int) -> Any:
        fields: dict[str, Any] = {"extra_args": {SEED: seed, compat.SEQUENCE: f"{message.request_id}.{index}"}}
        if index == 0 and message.question is not None:
            fields["prompt_logprobs"] = 0
            fields["skip_reading_prefix_cache"] = True  # every row must be computed
            fields["extra_args"][QUESTION] = _question(message, message.question)
        return compat.sampling_params(
            max_tokens=message.max_tokens,
            temperature=message.temperature,
            top_k=message.top_k,
            top_p=message.top_p,
            stop_token_ids=message.stop_tokens,
            logprobs=message.num_top,
            stream=message.stream,
            **fields,
        )

    def _abort(self, message: Abort) -> None:
        if self._waiting is not None:
            self._waiting.remove(message.request_id)
        names = [f"{message.request_id}.{index}" for index in message.indices]
        running = [name for name in names if self._requests.pop(name, None) is not None]
        for name in running:
            self._routed.pop(name, None)
        self._engine.abort_request(running)
        if 0 in message.indices and message.request_id in self._asked:
            self._asked.discard(message.request_id)
            self._scores(message.request_id)  # discard any scores: nobody needs them any more

    def _report_adapters(self) -> None:
        for adapter_id in list(self._reading):
            outcomes = self._engine.collective_rpc("tinsmith_prepared", args=(adapter_id,))
            ended = [outcome for outcome in outcomes if outcome is not None]
            if ended:  # all ranks read the same files; a slow rank finishes reading at the first use at the latest
                self._reading.discard(adapter_id)
                error = next((outcome for outcome in ended if outcome), "")
                self._channel.send(Loaded(adapter_id=adapter_id, error=error))

    def _report(self, output: Any) -> None:
        name = output.request_id
        request = self._requests.get(name)
        if request is None:
            return  # aborted meanwhile
        (completion,) = output.outputs
        index = int(name.partition(".")[2])
        ended = completion.finish_reason or ""
        experts = self._experts(request, name, len(completion.token_ids)) if self._routed_experts else b""
        if ended:
            self._routed.pop(name, None)
            del self._requests[name]
        asked = index == 0 and request.request_id in self._asked
        if asked:
            self._asked.discard(request.request_id)
        ids, logprobs = _rows(completion.logprobs, len(completion.token_ids), request.num_top)
        self._channel.send(
            Drawn(
                request_id=request.request_id,
                index=index,
                tokens=np.array(completion.token_ids, np.int32).tobytes(),
                logprobs=np.ascontiguousarray(logprobs[:, 0]).tobytes(),
                top_ids=np.ascontiguousarray(ids[:, 1:]).tobytes(),
                top_logprobs=np.ascontiguousarray(logprobs[:, 1:]).tobytes(),
                ended=ended,
                cached_tokens=output.num_cached_tokens or 0,
                scores=self._scores(request.request_id) if asked else None,
                experts=experts,
            )
        )

    def _experts(self, request: Generate, name: str, num_drawn: int) -> bytes:
        """Return the experts of the tokens that a sequence has computed since the last call: all but the last drawn."""
        first = self._routed.get(name, 0)
        last = max(first, len(request.prompt) // 4 - 1) + num_drawn
        self._routed[name] = last
        answers: list[bytes | None] = self._engine.collective_rpc("tinsmith_experts_of", args=(name, first, last))
        return next(answer for answer in answers if answer is not None)

    def _scores(self, request_id: int) -> PromptScores | None:
        answers = self._engine.collective_rpc("tinsmith_scores", args=(request_id,))
        scores = next((answer for answer in answers if answer is not None), None)
        if scores is None:
            return None
        logprobs, top_ids, top_logprobs, targets = (array.tobytes() for array in scores)
        return PromptScores(logprobs=logprobs, top_ids=top_ids, top_logprobs=top_logprobs, targets=targets)

    def _say_beat(self) -> None:
        if time.monotonic() - self._beat > _BEAT_S:
            self._beat = time.monotonic()
            self._channel.send(Beat())


def _question(message: Generate, question: PromptQuestion) -> dict[str, Any]:
    rows = len(message.prompt) // 4 - 1
    targets = np.frombuffer(question.targets, np.int64).reshape(rows, question.num_targets).copy()
    return {
        "key": message.request_id,
        "first_row": question.first_row,
        "num_top": question.num_top,
        "targets": targets,
    }


def _rows(flat: Any, length: int, num_top: int) -> tuple[Any, Any]:
    """Return ids and logprobs [length, 1 + num_top]: the drawn token first, then the best ones."""
    shape = (length, 1 + num_top)
    return (
        np.array(flat.token_ids if length else [], np.int32).reshape(shape),
        np.array(flat.logprobs if length else [], np.float32).reshape(shape),
    )


if __name__ == "__main__":
    main()
