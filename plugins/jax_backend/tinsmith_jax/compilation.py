"""Compiled programs. Each is compiled once: in advance by the warm-up thread, or on demand at its first use."""

import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import jax

from tinsmith import Figures, Progress
from tinsmith_jax.jax_types import Jax
from tinsmith_jax.memory import give_back_free_memory

logger = logging.getLogger(__name__)

Compiled = Callable[..., Jax]
Compile = Callable[[], Compiled]

_YNNPACK_FOR_PRODUCTS: Final = ("xla_cpu_experimental_ynn_fusion_type", "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT")
_OWN_PRODUCTS: Final = "xla_gpu_enable_triton_gemm"


@dataclass(frozen=True, slots=True)
class Program:
    """A function to compile, and the key that identifies it. Keys come only from bucket functions."""

    key: Hashable
    compile: Compile

    @property
    def name(self) -> str:
        """What logs call it."""
        parts = self.key if isinstance(self.key, tuple) else (self.key,)
        return " ".join(str(part) for part in parts if not isinstance(part, bool))


def compile_program(function: Jax, arguments: Sequence[Jax], *, on_cpu: bool) -> Compiled:
    """Compile what jax.jit returned, for arguments of which the shapes are known.

    On a CPU, XLA leaves products to YNNPACK, in which a row's bits do not depend on the number of rows. It would leave
    reductions to it as well, but only from 4096 elements on. A tenant's bits would then depend on the size of the pass,
    and so on its company.

    On a GPU, it leaves products to cuBLAS: else it compiles and times kernels of its own for each of them, which took
    more than half of the time on an H200, where the program then ran no faster. What XLA_FLAGS say of it holds.
    """
    made: Compiled = function.lower(*arguments).compile(dict(_options(on_cpu=on_cpu)) or None)
    return made


def _options(*, on_cpu: bool) -> Mapping[str, str]:
    if on_cpu:
        return _known(*_YNNPACK_FOR_PRODUCTS)
    if jax.default_backend() == "gpu" and _OWN_PRODUCTS not in os.environ.get("XLA_FLAGS", ""):
        return _known(_OWN_PRODUCTS, "False")
    return {}


@lru_cache
def _known(option: str, value: str) -> Mapping[str, str]:
    """Return no options if this version of XLA does not have it: it refuses what it does not know."""
    try:
        jax.jit(lambda: 0).lower().compile({option: value})
    except jax.errors.JaxRuntimeError:
        return {}
    return {option: value}


class Programs:
    """All compiled programs of a backend. Thread-safe: concurrent requests for a program share one compilation."""

    def __init__(self, progress: Progress, *, alone: bool = True, figures: Figures | None = None) -> None:
        """`alone`: no other process runs the same programs. Each process of a mesh warms up for itself."""
        self._progress = progress
        self._alone = alone
        self._figures = figures or Figures()
        self._lock = threading.Lock()
        self._nobody_waits = threading.Condition(self._lock)
        self._num_waiting = 0  # requests that wait for a program
        self._made: dict[Hashable, Future[Compiled]] = {}
        self._to_warm: dict[Hashable, Program] = {}  # in the order in which the warm-up takes them
        self._stop = threading.Event()
        self._warm = threading.Event()
        self._thread: threading.Thread | None = None
        self.compile_count = 0
        self.compile_seconds = 0.0

    def get(self, program: Program) -> Compiled:
        """Return the compiled program, compiling it now if necessary."""
        return self._get(program, announce=True)

    def pick(self, programs: Sequence[Program]) -> int:
        """Choose one of several programs that can do the same work: the first, which is the cheapest to run.

        During the warm-up, choose the first one that is ready, or if there is none, that is being compiled. Running a
        larger program takes less time than compiling, and the warm-up compiles the best one next. Several processes
        must choose alike, and a program ready in one need not be in another.
        """
        if not self._alone or self._thread is None or not self._thread.is_alive():
            return 0
        with self._lock:
            made = [self._made.get(program.key) for program in programs]
            ready = (index for index, one in enumerate(made) if one is not None and one.done())
            begun = (index for index, one in enumerate(made) if one is not None)
            index = next(ready, next(begun, 0))
            best = programs[0]
            if index > 0 and best.key in self._to_warm:
                self._to_warm = {best.key: best, **self._to_warm}
        return index

    def start_warm_up(self, programs: Sequence[Program]) -> None:
        """Compile the programs in the background, in the given order, but those first that requests do without.

        While a request waits for a program, no other one is begun.
        """
        self._to_warm = {program.key: program for program in programs}
        self._thread = threading.Thread(target=self._warm_up, name="jax-warm-up", daemon=True)
        self._thread.start()

    @property
    def warm(self) -> bool:
        """True if the warm-up has compiled everything."""
        return self._warm.is_set()

    def wait_until_warm(self, timeout_s: float) -> bool:
        """Wait for the warm-up to end. Return False if it did not end in time."""
        return self._warm.wait(timeout_s)

    def close(self) -> None:
        """Stop the warm-up once it has compiled its current program."""
        with self._lock:
            self._stop.set()
            self._nobody_waits.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _get(self, program: Program, *, announce: bool) -> Compiled:
        mine: Future[Compiled] = Future()
        with self._lock:
            made = self._made.setdefault(program.key, mine)
            waits = announce and not made.done()
            self._num_waiting += waits
        try:
            if waits:
                self._progress("compiling", None)
            if made is mine:
                self._compile(program, mine, announce=announce)
            return made.result()
        finally:
            if waits:
                with self._lock:
                    self._num_waiting -= 1
                    self._nobody_waits.notify_all()

    def _compile(self, program: Program, made: Future[Compiled], *, announce: bool) -> None:
        start = time.monotonic()
        logger.log(logging.INFO if announce else logging.DEBUG, "compiling %s", program.name)
        try:
            made.set_result(program.compile())
        except BaseException as error:
            with self._lock:
                del self._made[program.key]  # the next call tries again
            made.set_exception(error)
            raise
        give_back_free_memory()
        took_s = time.monotonic() - start
        self._figures.compiled(took_s)
        with self._lock:
            self.compile_count += 1
            self.compile_seconds += took_s

    def _warm_up(self) -> None:
        start, total = time.monotonic(), len(self._to_warm)
        logger.info("compiling %d programs in the background, the likely ones first", total)
        try:
            while not self._stop.is_set() and (program := self._next_to_warm()) is not None:
                self._progress("warming up", (total - len(self._to_warm) - 1) / total)
                self._get(program, announce=False)
        except Exception:
            logger.exception("warm-up stopped; remaining programs are compiled when first needed")
            return
        if self._stop.is_set():
            return
        self._progress("warming up", 1.0)
        logger.info("compiled %d programs in %.1f s", total, time.monotonic() - start)
        self._warm.set()

    def _next_to_warm(self) -> Program | None:
        with self._lock:
            self._nobody_waits.wait_for(lambda: self._num_waiting == 0 or self._stop.is_set())
            if self._stop.is_set():
                return None
            return self._to_warm.pop(next(iter(self._to_warm), None), None)
