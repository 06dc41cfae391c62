"""A server of ours with faults: `faulty_server.py DIRECTORY FAULT...` prints its URL and serves until its input ends.

A fault is one line of source that is replaced while its module is imported.
"""

import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import CodeType
from typing import Any

from conformance_faults import FAULTS, Fault


@dataclass(frozen=True)
class _Planter(MetaPathFinder):
    faults: Sequence[Fault]

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        mine = [fault for fault in self.faults if fault.module == fullname]
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target) if mine else None
        if spec is not None:
            assert spec.origin is not None
            spec.loader = _Planted(fullname, spec.origin, mine)
        return spec


class _Planted(importlib.machinery.SourceFileLoader):
    def __init__(self, fullname: str, path: str, faults: Sequence[Fault]) -> None:
        super().__init__(fullname, path)
        self._faults = faults

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text(encoding="utf-8")
        for fault in self._faults:
            assert source.count(fault.line) == 1, f"{fullname} has {source.count(fault.line)} times: {fault.line}"
            source = source.replace(fault.line, fault.instead)
        return compile(source, self.path, "exec")


def main(directory: str, *names: str) -> None:
    sys.meta_path.insert(0, _Planter([FAULTS[name] for name in names]))
    from tinsmith.testing.harness import running_server

    with running_server(Path(directory)) as server:
        sys.stdout.write(server.url + "\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main(*sys.argv[1:])
