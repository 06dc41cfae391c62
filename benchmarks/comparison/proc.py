"""What /proc tells of this machine and of process trees: CPU seconds, peak memory, and the load that is not ours."""

import os
import platform
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

_PROC: Final = Path("/proc")
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")
_KIB: Final = 1024
_KIB_PER_MIB: Final = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """CPU seconds at a moment, or between two."""

    machine_s: float  # of all processes, and what a hypervisor took away
    server_s: float
    client_s: float

    @classmethod
    def now(cls, server_pid: int | None) -> Self:
        server_s = tree_cpu_s(server_pid) if server_pid else 0.0
        return cls(machine_s=_machine_s(), server_s=server_s, client_s=time.process_time())

    def since(self, earlier: "Usage") -> "Usage":
        return Usage(
            machine_s=self.machine_s - earlier.machine_s,
            server_s=self.server_s - earlier.server_s,
            client_s=self.client_s - earlier.client_s,
        )

    @property
    def others_s(self) -> float:
        """Return what neither the server nor this process used."""
        return max(0.0, self.machine_s - self.server_s - self.client_s)


def tree(pid: int) -> Iterator[int]:
    """Yield the process and all its descendants."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for each in _processes():
        if fields := _stat(each):
            children[int(fields[1])].append(each)
    waiting = [pid]
    while waiting:
        each = waiting.pop()
        yield each
        waiting += children[each]


def tree_cpu_s(pid: int) -> float:
    """Return what the tree has used, with those of its processes that have ended."""
    ticks = 0
    for each in tree(pid):
        fields = _stat(each)
        ticks += sum(int(field) for field in fields[11:15])
    return ticks / _TICKS_PER_S


def tree_peak_mib(pid: int) -> float:
    """Return the sum of the largest resident sizes that the tree's processes ever had."""
    kib = 0
    for each in tree(pid):
        try:
            status = (_PROC / str(each) / "status").read_text()
        except OSError:  # it has ended
            continue
        kib += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return kib / _KIB_PER_MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes of a process tree: the sums over its processes."""

    resident: int
    peak: int  # of what was resident, since `forget_peaks`
    shared_once: int  # resident, with what several processes share divided among them
    anonymous: int  # of that, what no file backs


def tree_memory(pid: int) -> Memory:
    found: defaultdict[str, int] = defaultdict(int)
    for each in tree(pid):
        try:
            lines = [line for name in ("status", "smaps_rollup") for line in (_PROC / str(each) / name).open()]
        except OSError:  # it has ended
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if value.endswith(" kB\n"):
                found[name] += int(value.split()[0]) * _KIB
    return Memory(resident=found["VmRSS"], peak=found["VmHWM"], shared_once=found["Pss"], anonymous=found["Pss_Anon"])


def forget_peaks(pid: int) -> None:
    """Have the tree's processes count their largest resident sizes from now on."""
    for each in tree(pid):
        (_PROC / str(each) / "clear_refs").write_text("5")


def machine() -> dict[str, str | int]:
    """Describe the machine, without its name."""
    info = (_PROC / "cpuinfo").read_text()
    models = {line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")}
    mib = int((_PROC / "meminfo").read_text().split()[1]) // _KIB_PER_MIB
    return {
        "cpu": ", ".join(sorted(models)) or platform.machine(),
        "cores": os.cpu_count() or 0,
        "memory_gib": round(mib / 1024),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
    }


def _machine_s() -> float:
    """Return the CPU seconds that were not idle. Guests' are part of the user's."""
    user, nice, system, _idle, _iowait, irq, softirq, steal, *_ = map(int, _first_line("stat").split()[1:])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S


def _first_line(name: str) -> str:
    with (_PROC / name).open() as file:
        return file.readline()


def _processes() -> Iterator[int]:
    return (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit())


def _stat(pid: int) -> list[str]:
    """Return the fields after the name, from the state on; none if the process has ended."""
    try:
        return (_PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []
