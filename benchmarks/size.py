"""The size of the code at one or more revisions: a table per package, and the functions between a request and its row.

    python benchmarks/size.py da1e69e main

- names: what the `__all__` of the package's `__init__.py` lists
- arrows: pairs of modules of which one imports the other, anywhere in its text: inside the package, and to others
- circles: groups of modules that reach each other by imports, over all of the code; listed below the table
- depth: functions of tinsmith on the stack from the endpoint of /api/v1/forward_backward to the `execute` that inserts
  the operation. It is measured, not computed: a server on SQLite takes one request, and a profiler stops at `execute`.
  The functions are those of the endpoint that await each other, then those of the thread with the connection.
"""

import argparse
import ast
import asyncio
import io
import os
import re
import sqlite3
import sqlite3.dbapi2
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import traceback
import types
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

DISTRIBUTIONS: Final = ("core", "libraries", "plugins", "tools")
SUITES: Final = "tinsmith.testing"
ENDPOINT: Final = "routes/training.py"


class Module:
    def __init__(self, name: str, text: str, *, is_package: bool) -> None:
        self.name = name
        self.lines = len(text.splitlines())
        self.tree = ast.parse(text)
        parts = name.split(".")
        self.package = ".".join(parts[:2] if is_package or len(parts) > 2 else parts[:1])

    @property
    def functions(self) -> int:
        return sum(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) for node in ast.walk(self.tree))

    @property
    def exported(self) -> int:
        lists = (node for node in self.tree.body if isinstance(node, ast.Assign | ast.AnnAssign))
        return sum(
            len(node.value.elts)
            for node in lists
            if isinstance(node.value, ast.List | ast.Tuple) and "__all__" in ast.unparse(node).partition("=")[0]
        )

    def imported(self, known: dict[str, "Module"]) -> Iterator[str]:
        """Yield the modules of ours that this one imports, a name of a package's only if it is no module."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in known)
            elif isinstance(node, ast.ImportFrom) and node.module in known:
                for alias in node.names:
                    module = f"{node.module}.{alias.name}"
                    yield module if module in known else node.module


def check_out(revision: str, tree: Path) -> None:
    archive = subprocess.run(["git", "archive", revision], check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(tree, filter="data")


def read_modules(tree: Path) -> dict[str, Module]:
    """Return the modules of the product, its libraries and plugins by name, without tests and migrations' versions."""
    modules = {}
    for root in DISTRIBUTIONS:
        for path in sorted((tree / root).rglob("*.py")):
            parts = path.relative_to(tree / root).parts[0 if root == "core" else 1 :]
            if not parts[0].startswith("tinsmith"):
                continue
            is_package = parts[-1] == "__init__.py"
            name = ".".join(parts[:-1] if is_package else (*parts[:-1], path.stem))
            modules[name] = Module(name, path.read_text(), is_package=is_package)
    return modules


def circles(arrows: set[tuple[str, str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one module."""
    reach = {start: _reachable(start, arrows) for start, _ in arrows}
    groups = {frozenset(end for end in ends if start in reach.get(end, ())) for start, ends in reach.items()}
    return sorted(sorted(group) for group in groups if len(group) > 1)


def _reachable(start: str, arrows: set[tuple[str, str]]) -> set[str]:
    following = defaultdict(set)
    for source, target in arrows:
        following[source].add(target)
    reached: set[str] = set()
    waiting = [start]
    while waiting:
        new = following[waiting.pop()] - reached
        reached |= new
        waiting.extend(new)
    return reached


def print_table(modules: dict[str, Module]) -> None:
    arrows = {
        (module.name, target)
        for module in modules.values()
        for target in module.imported(modules)
        if target != module.name
    }
    package = {name: module.package for name, module in modules.items()}
    core = {name for name in set(package.values()) if name.split(".")[0] == "tinsmith"}
    rows = [(name, {name}) for name in sorted(set(package.values()) - core)]
    rows = [(name, {name}) for name in sorted(core)] + [("core without suites", core - {SUITES})] + rows
    print("| package | files | lines | functions | names | arrows inside | to others |\n|---|--:|--:|--:|--:|--:|--:|")
    for title, packages in rows:
        own = [module for module in modules.values() if module.package in packages]
        inside = sum(package[source] in packages and package[target] in packages for source, target in arrows)
        leaving = sum(package[source] in packages for source, _ in arrows) - inside
        figures = (
            len(own),
            sum(module.lines for module in own),
            sum(module.functions for module in own),
            sum(module.exported for module in own),
            inside,
            leaving,
        )
        print(f"| {title} | {' | '.join(f'{figure:,}' for figure in figures)} |")
    found = circles(arrows)
    print(f"\ncircles: {len(found)}")
    for circle in found:
        print("-", ", ".join(circle))


def measure_depth(tree: Path) -> str:
    """Run this program again on that tree's packages: metadata beside them make its own plugins the found ones."""
    metadata = tree / "core" / "tinsmith-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: tinsmith\nVersion: 0.1.0\n")
    groups = tomllib.loads((tree / "pyproject.toml").read_text())["project"].get("entry-points", {})
    entries = (f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in offers.items()) for group, offers in groups.items())
    (metadata / "entry_points.txt").write_text("\n".join(entries))
    command = [sys.executable, __file__, "--depth-of", str(tree / "core")]
    environment = {**os.environ, "PYTHONPATH": str(tree / "core")}
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


class Stacks:
    """Records the functions of `core` that are active at each INSERT of an operation, the endpoint's first."""

    def __init__(self, core: Path) -> None:
        self.core = core
        self.loop: asyncio.AbstractEventLoop | None = None
        self.last: list[str] = []

    def connect(self, *arguments: Any, **options: Any) -> sqlite3.Connection:
        connection = sqlite3.Connection(*arguments, **options)
        connection.set_trace_callback(self.traced)
        return connection

    def traced(self, statement: str) -> None:
        if statement.startswith("INSERT") and re.search(r"\boperations\b", statement) and self.loop:
            awaiting = max((self._awaiting(task) for task in asyncio.all_tasks(self.loop)), key=len)
            frames = [frame for frame, _ in traceback.walk_stack(None)]
            if awaiting:
                self.last = awaiting + self._ours(reversed(frames))

    def _awaiting(self, task: "asyncio.Task[Any]") -> list[str]:
        frames: list[types.FrameType] = []
        awaited: object = task.get_coro()
        while isinstance(awaited, types.CoroutineType) and awaited.cr_frame is not None:
            frames.append(awaited.cr_frame)
            awaited = awaited.cr_await
        names = self._ours(frames)
        return names[next((at for at, name in enumerate(names) if ENDPOINT in name), len(names)) :]

    def _ours(self, frames: Iterable[types.FrameType]) -> list[str]:
        named = ((Path(frame.f_code.co_filename), frame.f_code.co_qualname) for frame in frames)
        return [f"{path.relative_to(self.core)} {name}" for path, name in named if path.is_relative_to(self.core)]


def print_depth(core: Path) -> None:
    """Serve one request in this process, and print what was on the stack at its INSERT."""
    import tinker

    from tinsmith.testing.harness import running_server
    from tinsmith.testing.sdk_data import datum

    stacks = Stacks(core)
    sqlite3.dbapi2.connect = stacks.connect  # type: ignore[assignment]  # where SQLAlchemy looks
    with tempfile.TemporaryDirectory() as data_dir, running_server(Path(data_dir)) as server:
        client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
        model = client.create_lora_training_client(base_model="toy", rank=4).result()
        stacks.loop = server.call(_running_loop())
        model.forward_backward([datum()], "cross_entropy").result()
        client.holder.close()
    print(f"\ndepth: {len(stacks.last)}")
    for name in stacks.last:
        print("-", name)


async def _running_loop() -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revisions", nargs="*", default=["HEAD"])
    parser.add_argument("--depth-of", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.depth_of:
        print_depth(arguments.depth_of)
        return
    for revision in arguments.revisions:
        with tempfile.TemporaryDirectory() as folder:
            check_out(revision, Path(folder))
            print(f"\n## {revision}\n")
            print_table(read_modules(Path(folder)))
            print(measure_depth(Path(folder)), end="", flush=True)


if __name__ == "__main__":
    main()
