"""Starts servers and engines quickly: a process that has imported tinsmith already, and forks where asked to.

Campaigns kill hundreds of processes; importing takes a second each time, forking milliseconds. What is started is a
process of its own, with its own memory, files and signals, whose death by SIGKILL is as sudden as any other's.

`python launcher.py SOCKET` listens on a Unix socket. A connection asks for one process: three descriptors (its standard
input, output and error) and NUL-separated text: number of arguments, arguments, environment. The arguments are those of
`tinsmith`, or `-m MODULE ...` or `-c CODE ...` as for Python. The answer is the process id and, when it has died, its
wait status. A connection that says `watch` is told of every birth and death instead.
"""

import ctypes
import functools
import gc
import importlib
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

POISONED = "CRASH_POISONED"
HANGING = "CRASH_HANGING"
LABEL = "CRASH_LABEL"  # in a process's environment: which campaign run it belongs to, if any
DIRECTORY = "CRASH_DIRECTORY"  # in a process's environment: where it runs
NETWORK = "CRASH_NETWORK"  # in a process's environment: the directory of the namespaces of its machine, see networks.py
_HERE = Path(__file__).parent
_MESSAGE_BYTES = 1 << 20


@dataclass
class _Child:
    pid: int
    pidfd: int
    connection: socket.socket
    label: str
    role: str


class Launcher:
    def __init__(self, path: str) -> None:
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(path)
        self.listener.listen(128)
        self.selector = selectors.DefaultSelector()
        self.watchers: list[socket.socket] = []
        self.children: dict[int, _Child] = {}
        self.watch(self.listener, self.accept)
        self.watch(sys.stdin.fileno(), self.leave)  # closes when the campaign ends, however it ends

    def watch(self, what: socket.socket | int, call: Callable[[], None]) -> None:
        self.selector.register(what, selectors.EVENT_READ, call)

    def run(self) -> None:
        while True:
            for key, _ in self.selector.select():
                key.data()

    def leave(self) -> None:
        for child in self.children.values():
            os.kill(child.pid, signal.SIGKILL)
        os._exit(0)

    def accept(self) -> None:
        connection, _ = self.listener.accept()
        self.watch(connection, lambda: self.asked(connection))

    def asked(self, connection: socket.socket) -> None:
        message, descriptors, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, 3)
        self.selector.unregister(connection)
        if message == b"watch":
            self.watchers.append(connection)
            return
        if not message:
            connection.close()
            return
        count, *rest = message.decode().split("\0")
        arguments, environ = rest[: int(count)], dict(each.split("=", 1) for each in rest[int(count) :])
        label = environ.get(LABEL, "")
        plan = self.take_plan(label, arguments[0]) if label else ""  # before anybody hears of the birth
        pid = os.fork()
        if pid == 0:
            self.become(arguments, environ, descriptors, plan)
        for descriptor in descriptors:
            os.close(descriptor)
        child = _Child(pid, os.pidfd_open(pid), connection, label, arguments[0])
        self.children[pid] = child
        self.watch(child.pidfd, lambda: self.died(child))
        self.watch(connection, lambda: self.abandoned(child))
        self.tell("born", child)
        with suppress(OSError):  # who asked has just been killed, so the child is abandoned
            connection.send(str(pid).encode())

    def died(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self.selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self.children[child.pid]
        self.tell("died", child, status)
        try:
            self.selector.unregister(child.connection)
            child.connection.send(str(status).encode())
        except (KeyError, OSError):
            pass  # nobody is there to hear it
        child.connection.close()

    def abandoned(self, child: _Child) -> None:
        """Who asked for it is gone. A supervisor kills an engine by killing what stands for it."""
        if child.pid not in self.children:
            return  # it has died, too, and that was told of first in the same round
        self.selector.unregister(child.connection)
        os.kill(child.pid, signal.SIGKILL)

    def tell(self, what: str, child: _Child, status: int = 0) -> None:
        message = f"{what} {child.pid} {child.role} {status} {time.monotonic()} {child.label}".encode()
        for watcher in list(self.watchers):
            try:
                watcher.send(message)
            except OSError:
                self.watchers.remove(watcher)

    def become(self, arguments: list[str], environ: dict[str, str], descriptors: list[int], plan: str) -> None:
        """Be the new process; does not return."""
        from tinsmith import failpoints

        code = 1
        try:
            os.setsid()
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
            os.closerange(3, 4096)
            # The streams that were inherited know the launcher's own files, which may have been of another kind.
            sys.stdout = os.fdopen(1, "w", closefd=False)
            sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
            os.environ.clear()
            os.environ.update(environ)
            os.chdir(environ.pop(DIRECTORY, "."))
            if NETWORK in environ:
                self.move_to(Path(environ[NETWORK]))
            sys.path[:1] = ["", *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]
            sys.dont_write_bytecode = bool(environ.get("PYTHONDONTWRITEBYTECODE"))
            failpoints.arm(plan or environ.get(failpoints.VARIABLE, ""))
            if arguments[0] == "serve":
                self.start_engines_here()
            if POISONED in environ:
                self.poison(int(environ[POISONED]), os.abort)
            if HANGING in environ:
                self.poison(int(environ[HANGING]), threading.Event().wait)
            self.run_program(arguments)
            code = 0
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else 1
        except BaseException:  # noqa: BLE001 - the process ends with it
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def move_to(self, namespaces: Path) -> None:
        kernel = ctypes.CDLL(None, use_errno=True)
        for name in ("net", "uts"):
            with (namespaces / name).open() as namespace:
                if kernel.setns(namespace.fileno(), 0):
                    raise OSError(ctypes.get_errno(), "setns")

    def run_program(self, arguments: list[str]) -> None:
        match arguments:
            case ["-m", module, *rest]:
                sys.argv = [module, *rest]
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case ["-c", code, *rest]:
                sys.argv = ["-c", *rest]
                exec(compile(code, "-c", "exec"), {"__name__": "__main__"})
            case _:
                from tinsmith.commands.cli import app

                sys.argv = ["tinsmith", *arguments]
                app()

    def take_plan(self, label: str, role: str) -> str:
        """What the campaign has written down is for one process."""
        file = Path(f"{label}.{role}.arm")
        try:
            plan = file.read_text()
            file.unlink()
        except FileNotFoundError:
            return ""
        return plan

    def poison(self, token: int, act: Callable[[], object]) -> None:
        """Have the toy backend abort the process, or never return, where a pass holds the token."""
        from tinsmith.builtin.toy_backend import ToyBackend

        passes = ToyBackend.forward_backward

        @functools.wraps(passes)
        def poisonous(self: ToyBackend, ops: Any) -> Any:
            if any(token in datum.tokens_T for op in ops for datum in op.data):
                act()
            return passes(self, ops)

        ToyBackend.forward_backward = poisonous

    def start_engines_here(self) -> None:
        from tinsmith.processes import engine_child

        stand_in = sys.executable, "-S", "-E", "-s", str(_HERE / "stand_in.py"), self.path
        own = engine_child.engine_command
        engine_child.engine_command = lambda child: (*stand_in, *own(child)[3:])  # without: python -m tinsmith


def _import_everything() -> None:
    from tinsmith.plugins.loading import Plugins
    from tinsmith.store import StoreContext

    for module in (
        "alembic.command",
        "pytest",
        "tinsmith.commands.cli",
        "tinsmith.processes.engine",
        "tinsmith.processes.serve",
    ):
        importlib.import_module(module)
    plugins = Plugins.load()
    spec = plugins.stores.get("sql")
    for url in (None, "postgresql:///nowhere"):
        spec.create(spec.config(url=url), StoreContext(data_dir=Path("/nowhere")))
    plugins.backends.unambiguous()


if __name__ == "__main__":
    _import_everything()
    launcher = Launcher(sys.argv[1])
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    launcher.run()
