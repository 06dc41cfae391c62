"""What this process may take of the machine's memory: the least of what its control groups allow."""

from pathlib import Path

import pytest

from tinsmith.host import host_memory, machine_memory

MIB = 1 << 20


def limited(root: Path, groups: str, limits: dict[str, str]) -> int:
    """Return what is found if a process is in these groups, and they have these limits."""
    (root / "self").mkdir()
    (root / "self" / "cgroup").write_text(groups)
    for path, limit in limits.items():
        file = root / "cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(limit + "\n")
    return host_memory(root, root / "cgroup")


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {"memory.max": str(5 * MIB)}, 5),
        ("0::/pod/own\n", {"memory.max": "max", "pod/memory.max": str(7 * MIB), "pod/own/memory.max": "max"}, 7),
        ("0::/pod/own\n", {"pod/memory.max": str(7 * MIB), "pod/own/memory.max": str(6 * MIB)}, 6),
        ("0::/pod\n", {"other/memory.max": str(MIB), "memory.max": str(9 * MIB)}, 9),
        (
            "5:cpu,cpuacct:/a\n4:memory:/a/b\n0::/\n",
            {"memory/memory.limit_in_bytes": str(1 << 62), "memory/a/memory.limit_in_bytes": str(3 * MIB)},
            3,
        ),
    ],
)
def test_the_lowest_limit_on_the_way_to_the_root_counts(
    tmp_path: Path, groups: str, limits: dict[str, str], expected: int
) -> None:
    """Only the root's was read, so that a limit of systemd's on a service counted for nothing."""
    assert limited(tmp_path, groups, limits) == expected * MIB


def test_without_a_limit_it_is_the_machines(tmp_path: Path) -> None:
    assert limited(tmp_path, "0::/own\n", {"own/memory.max": "max"}) == machine_memory()
    assert host_memory(tmp_path / "nowhere", tmp_path / "nowhere") == machine_memory()
