"""How engines see that another one is dead: a lock that the kernel frees."""

import subprocess
import sys
from pathlib import Path

import pytest

from tinsmith.processes import lease
from tinsmith.processes.lease import forget, forget_ended, has_ended, life_sign

LIVE = """
import pathlib, sys, tinsmith.processes.lease
with tinsmith.processes.lease.life_sign(pathlib.Path(sys.argv[1]), "e"):
    print(flush=True)
    input()
"""


def test_a_living_engine_a_dead_one_and_one_never_seen(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", LIVE, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert not has_ended(tmp_path, "e")
        process.kill()
    assert has_ended(tmp_path, "e")
    assert has_ended(tmp_path, "e")  # looking takes nothing away
    assert not has_ended(tmp_path, "never seen")
    with life_sign(tmp_path, "alive"):
        forget_ended(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["alive.alive"]
        forget(tmp_path, "alive")
    assert list(tmp_path.iterdir()) == []


def test_a_lock_proves_nothing_under_another_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with life_sign(tmp_path, "e"):
        pass
    assert has_ended(tmp_path, "e")
    for kernel in ("another", ""):  # another machine or a reboot; a system that does not say
        monkeypatch.setattr(lease, "running_kernel", lambda kernel=kernel: kernel)
        assert not has_ended(tmp_path, "e")
