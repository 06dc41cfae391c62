"""Whatever a process starts ends with it, whatever ends it, and its scratch is removed."""

import ast
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from textwrap import dedent

import pytest
import syntax_trees

from tinsmith import lifeline
from tinsmith.lifeline import Tethered
from tinsmith.processes import engine_child
from tinsmith.processes.engine_child import EngineChild
from tinsmith.scratch import Scratch
from tinsmith.settings import Settings
from tinsmith_workers.testing.contract import alive, wait_until_ended

ROOT = Path(__file__).parents[2]
ENVIRON = dict(os.environ)

TREE = "sh -c 'sleep 1000 & echo $! $$ >&2; wait'"
"""A program that starts another and prints the ids of both, as a compiler's driver starts compilers."""

NATIVE = "import ctypes; ctypes.PyDLL(None).sleep(1000)"
"""Holds the interpreter, so that no thread of it gets a turn."""


def started(code: str) -> "subprocess.Popen[str]":
    """Run Python code in a session of its own, with a pipe as its standard input."""
    return subprocess.Popen(
        [sys.executable, "-c", dedent(code)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pids_of(victim: "subprocess.Popen[str]") -> list[int]:
    assert victim.stderr is not None
    pids = [int(word) for word in victim.stderr.readline().split()]
    assert len(pids) == 2
    return pids


# Processes ------------------------------------------------------------------------------------------------------------


def test_a_program_ends_with_a_killed_process_and_so_does_what_it_has_started() -> None:
    code = f"""
        import os
        from tinsmith.lifeline import Tethered
        held = Tethered({["sh", "-c", TREE]!r}, env=os.environ)
        {NATIVE}
    """
    with started(code) as victim:
        pids = pids_of(victim)
        victim.kill()
    wait_until_ended(pids)


def test_a_process_of_ours_ends_with_its_other_half_and_so_does_what_it_has_started() -> None:
    """The pipe closes while native code holds the interpreter: the kernel has to do it."""
    code = f"""
        import subprocess
        from tinsmith.lifeline import end_with
        end_with(0)
        subprocess.Popen({["sh", "-c", TREE]!r})
        {NATIVE}
    """
    with started(code) as ours:
        pids = pids_of(ours)
        assert ours.stdin is not None
        ours.stdin.close()
        assert ours.wait() == -signal.SIGKILL
    wait_until_ended(pids)


def test_one_that_does_not_lead_its_group_leaves_the_others_alone() -> None:
    code = """
        import os, subprocess, sys
        ours = "import time, tinsmith.lifeline as own; own.end_with(0); print(1, flush=True); time.sleep(1000)"
        with subprocess.Popen([sys.executable, "-c", ours], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            child.stdout.readline()
            child.stdin.close()
            sys.exit(child.wait() + 9)
    """
    with started(code) as leader:
        assert leader.wait() == 0


@pytest.mark.parametrize("how", ["end", "block", "error"])
def test_an_end_is_one_of_the_whole_group(how: str) -> None:
    pids: list[int] = []
    with suppress(KeyError), Tethered(["sh", "-c", TREE], env=ENVIRON, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        pids += map(int, program.stderr.readline().split())
        if how == "error":
            raise KeyError
        if how == "end":
            program.end()
            assert not any(map(alive, pids))
    assert len(pids) == 2
    assert not any(map(alive, pids))


def test_what_ignores_the_request_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "PATIENCE_S", 0.1)
    stubborn = "trap '' TERM; sleep 1000 2>/dev/null & echo $! >&2"
    with Tethered(["sh", "-c", stubborn], env=ENVIRON, stderr=subprocess.PIPE) as program:
        assert program.stderr is not None
        pid = int(program.stderr.readline())
        program.wait()
        assert alive(pid)
    wait_until_ended([pid])


def test_a_program_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError, match="No such file or directory: 'no-such-program'"):
        Tethered(["no-such-program"], env=ENVIRON)


@pytest.mark.parametrize("end", ["exit 0", "kill -9 $$", "sleep 1000"])
async def test_what_an_engine_has_started_ends_with_it(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the engine ends: in order, by a signal from outside, or because its supervisor kills it."""
    settings = Settings.model_validate({"server": {"data_dir": tmp_path}, "models": [{"name": "tiny"}]})
    log = tmp_path / "log"
    script = f"sleep 1000 >/dev/null 2>&1 & echo $! $! > {log}; echo started; {end}"
    monkeypatch.setattr(engine_child, "engine_command", lambda _: ("sh", "-c", script))
    child = EngineChild(settings, settings.models[0])

    def passed_on(line: str, **_: object) -> None:
        if end == "sleep 1000" and "started" in line:
            child.end(signal.SIGKILL)

    monkeypatch.setattr(engine_child, "print", passed_on, raising=False)
    await child.run(None)
    wait_until_ended([int(word) for word in log.read_text().split()])


# Scratch --------------------------------------------------------------------------------------------------------------


def test_scratch_is_removed_whatever_ends_its_process(tmp_path: Path) -> None:
    code = f"""
        import os
        from pathlib import Path
        from tinsmith import lifeline
        from tinsmith.scratch import Scratch
        for end in "held.close()", "del held", "exit(1)", "lifeline.leave(0)", "os.kill(os.getpid(), 9)":
            if os.fork() == 0:
                held = Scratch("own-", Path({str(tmp_path)!r}))
                (held.path / "file").touch()
                exec(end)
                os._exit(0)
            os.wait()
            print(end, len(os.listdir({str(tmp_path)!r})), flush=True)
    """
    with started(code) as process:
        assert process.stdout is not None
        assert process.stdout.read().splitlines() == [
            *("held.close() 0", "del held 0", "exit(1) 0", "lifeline.leave(0) 0", "os.kill(os.getpid(), 9) 1"),
        ]
    with Scratch("own-", tmp_path) as mine:
        assert list(tmp_path.iterdir()) == [mine.path], "what the killed one left is gone"
        assert mine.path.stat().st_mode & 0o777 == 0o700
        with Scratch("own-", tmp_path) as other:
            assert set(tmp_path.iterdir()) == {mine.path, other.path}, "what is in use stays"
    assert list(tmp_path.iterdir()) == []


def test_what_others_put_beside_scratch_is_neither_opened_nor_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shared memory is a directory in which everybody writes: links lead elsewhere, and locks may be of other users."""
    private, shared, target = (tmp_path / name for name in ("private", "shared", "target"))
    for directory in (private, shared):
        directory.mkdir(mode=0o700)
    (private / "kept").touch()
    linked = shared / "own-linked"
    linked.symlink_to(private)
    trap = shared / "own-trap"
    trap.mkdir(mode=0o700)
    (trap / "owner.lock").symlink_to(target)
    open_to_all = shared / "own-open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    Scratch("own-", shared).close()
    assert not target.exists(), "a lock is opened through a link"
    assert [path.name for path in private.iterdir()] == ["kept"]
    assert list(open_to_all.iterdir()) == []
    (trap / "owner.lock").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("os.geteuid", lambda: trap.stat().st_uid + 1)
        with pytest.raises(PermissionError, match="not a directory of this user"):
            Scratch("own-", shared)  # which is not that other user's, either
    assert list(trap.iterdir()) == [], "another user's lock is opened"
    Scratch("own-", shared).close()
    assert not trap.exists()


def test_a_process_that_leaves_ends_what_it_has_started_before_it_removes_its_scratch(tmp_path: Path) -> None:
    """While threads go on: what they start now is refused."""
    code = f"""
        import os, threading
        from pathlib import Path
        from tinsmith import lifeline
        from tinsmith.scratch import Scratch
        held = Scratch("own-", Path({str(tmp_path)!r}))
        busy = "while :; do date > $0/$$ 2>/dev/null; done"
        def work():
            while True:
                lifeline.run_tethered(["sh", "-c", busy, str(held.path)], env=os.environ)
        for _ in range(2):
            threading.Thread(target=work).start()
        while len(list(held.path.iterdir())) < 3:
            pass
        lifeline.leave(7)
    """
    with started(code) as process:
        assert process.wait() == 7
    assert list(tmp_path.iterdir()) == []


# All of them ----------------------------------------------------------------------------------------------------------

ONE_WAY = {"core/tinsmith/lifeline.py", "core/tinsmith/scratch.py"}
OTHERS = {
    "core/tinsmith/processes/engine_child.py": "an engine calls end_with, and its supervisor ends its group",
    "core/tinsmith/checkpoints/atomic_directory.py": "writes beside the target; housekeeping sweeps",
    "core/tinsmith/checkpoints/uploads.py": "writes beside the target; housekeeping sweeps",
    "libraries/checkpoints/tinsmith_checkpoints/tools/rewriting.py": "writes beside the target, which it then replaces",
    "libraries/workers/tinsmith_workers/state_files.py": "keeps files as long as their readers; sweeps for itself",
    "core/tinsmith/commands/doctor/probe.py": "a file without a name",
    "core/tinsmith/builtin/scratch_store.py": "asks where to make its scratch",
    "plugins/vllm_sampler/tinsmith_vllm/compat.py": "asks how long the path is, and makes nothing there",
    "plugins/jax_backend/tinsmith_jax/native/library.py": "leaves markers on purpose, for the next process",
    "tools/conformance/tinsmith_conformance/runner.py": "does without tinsmith; a child ends with its standard input",
    "tools/conformance/tinsmith_conformance/checks/client.py": "does without tinsmith; a home for the SDK's command",
    "core/tinsmith/testing/postgres.py": "of tests, as another user; a watcher removes it",
    "libraries/workers/tinsmith_workers/testing/forked_workers.py": "of tests; ends with them",
}
MODULES = {"subprocess": {"run", "call", "check_call", "check_output", "Popen", "getoutput"}, "tempfile": set()}
NAMES = {"create_subprocess_exec", "create_subprocess_shell", "fork", "forkpty", "posix_spawn", "system", "popen"}
NAMES |= {"Process", "ProcessPoolExecutor", "mkdtemp", "mkstemp", "TemporaryDirectory", "NamedTemporaryFile"}
NAMES |= {"TemporaryFile", "gettempdir", "subprocess_exec", "spawnv", "spawnvp"}


def starts(file: Path) -> Iterator[int]:
    """Yield the lines in which a module starts a process or makes temporary files."""
    text = file.read_text()
    if not any(name in text for name in (*MODULES, *NAMES)):
        return
    for node in ast.walk(syntax_trees.parse(text)):
        if isinstance(node, ast.ClassDef):
            called: list[ast.expr] = [each.value if isinstance(each, ast.Subscript) else each for each in node.bases]
        else:
            called = [node.func] if isinstance(node, ast.Call) else []
        for each in called:
            name = each.attr if isinstance(each, ast.Attribute) else each.id if isinstance(each, ast.Name) else ""
            module = each.value.id if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) else ""
            if name in NAMES or name in MODULES.get(module, ()):
                yield node.lineno


def test_every_process_and_every_temporary_file_has_one_way_or_a_reason() -> None:
    roots = (ROOT / "core", *(path for path in ROOT.glob("[a-z]*/*/tinsmith_*") if path.is_dir()))
    files = [file for root in roots for file in root.rglob("*.py")]
    found = {str(file.relative_to(ROOT)): lines for file in files if (lines := [*starts(file)])}
    assert found.keys() == ONE_WAY | OTHERS.keys(), found
