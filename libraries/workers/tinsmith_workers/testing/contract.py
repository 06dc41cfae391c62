"""`WorkersContract`: the behaviour of a launcher's workers, and what the engine learns of each death."""

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from shutil import rmtree
from typing import Final

import numpy as np
import pytest

from tinsmith import failpoints
from tinsmith.errors import ConfigError, ServerError
from tinsmith_workers import MakeLauncher, StateFiles, WorkerDiedError, WorkerGroup, WorkersConfig
from tinsmith_workers.testing.program import FAILURE, Program, state_tensor

PROGRAM: Final = "tinsmith_workers.testing.program:Program"
NUM_WORKERS: Final = 2
_HANG_S: Final = 300.0
_LARGE: Final = 1 << 19  # float64: 4 MiB
_SHAPES: Final = {"square": (6, 4), "vector": (5,), "row": (1, 3)}  # of a state
_SHARD_BYTES: Final = 100  # more than one tensor, less than two

Group = WorkerGroup[Program]

BEFORE_THE_RANK_IS_KNOWN: Final = ("worker.join.before", "worker.join.after", "worker.make.before")
DURING_A_CALL: Final = (
    "worker.compute.before",
    "worker.compute.after",
    "worker.send_answer.before",
)


class WorkersContract:
    """Subclass it and override `launch_with`, or `workers_config` if the launcher has a name."""

    @pytest.fixture(scope="class")
    @classmethod
    def launch_with(cls) -> MakeLauncher | None:
        """Return the launcher. None: the one that the settings name."""
        return None

    @pytest.fixture(scope="class")
    @classmethod
    def workers_config(cls) -> WorkersConfig:
        return WorkersConfig(nproc_per_node=NUM_WORKERS, start_timeout_s=_HANG_S)

    @pytest.fixture(scope="class")
    @classmethod
    def group(cls, workers_config: WorkersConfig, launch_with: MakeLauncher | None) -> Iterator[Group]:
        """A group that no test breaks."""
        group: Group = WorkerGroup(PROGRAM, workers_config, no_progress, launch_with=launch_with)
        yield group
        group.close()

    @pytest.fixture
    def make_group(
        self, workers_config: WorkersConfig, launch_with: MakeLauncher | None
    ) -> Iterator[Callable[..., Group]]:
        made: list[Group] = []

        def make(program: str = PROGRAM, **environment: str) -> Group:
            group: Group = WorkerGroup(
                program, workers_config, no_progress, environment=environment, launch_with=launch_with
            )
            made.append(group)
            return group

        yield make
        for group in made:
            group.close()

    # calls

    def test_each_worker_has_a_rank_of_its_own(self, group: Group) -> None:
        places = group.call(Program.place)
        assert [place["rank"] for place in places] == list(range(NUM_WORKERS))
        assert {place["num_workers"] for place in places} == {NUM_WORKERS}
        assert sorted(place["local_rank"] for place in places) == list(range(NUM_WORKERS)), "one host"
        assert {place["local_size"] for place in places} == {NUM_WORKERS}
        assert len(set(group.pids)) == NUM_WORKERS

    def test_the_first_keeps_a_port_at_which_all_can_meet(self, group: Group) -> None:
        first, *others = group.call(Program.place)
        assert first["keeps_port"] == first["meeting"][1]
        assert all(other["meeting"] == first["meeting"] and not other["keeps_port"] for other in others)
        with socket.socket() as framework:
            framework.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            framework.bind(first["meeting"])
            framework.listen()

    @pytest.mark.parametrize("size", [0, 1, 1000, _LARGE])
    def test_values_arrive_as_they_are(self, group: Group, size: int) -> None:
        values = np.random.default_rng(0).normal(size=size)
        sent = {"array": values, "reversed": values[::-1], "text": "zwölf", "nested": [np.arange(3), None]}
        for (received,) in group.call(Program.echo, sent):
            np.testing.assert_array_equal(received["array"], values)
            np.testing.assert_array_equal(received["reversed"], values[::-1])
            np.testing.assert_array_equal(received["nested"][0], np.arange(3))
            assert received["text"] == "zwölf"

    def test_each_worker_gets_its_own_arguments(self, group: Group) -> None:
        own = [(rank, np.full(4, rank)) for rank in range(NUM_WORKERS)]
        for (rank, array), (same, received) in zip(own, group.call_each(Program.echo, own), strict=True):
            assert rank == same
            np.testing.assert_array_equal(received, array)

    @pytest.mark.parametrize("size", [10, _LARGE])
    def test_what_a_worker_writes_into_an_array_is_seen_by_none_else(self, group: Group, size: int) -> None:
        sent = np.ones(size)
        for rank, (total, array) in enumerate(group.call(Program.scribble, sent)):
            assert total == size
            assert set(array) == {rank}
        assert set(sent) == {1.0}

    def test_progress_is_reported(self, workers_config: WorkersConfig, launch_with: MakeLauncher | None) -> None:
        found: list[tuple[str, float | None]] = []
        group: Group = WorkerGroup(PROGRAM, workers_config, lambda *what: found.append(what), launch_with=launch_with)
        assert found[-1] == ("starting workers", 1.0)
        group.call(Program.work, 4)
        assert found.count(("working", 0.75)) == NUM_WORKERS
        group.close()

    # failures

    def test_a_program_that_cannot_be_made_is_the_operators_business(self, make_group: Callable[..., Group]) -> None:
        with pytest.raises(ConfigError, match=r"^this program cannot be made$"):
            make_group("tinsmith_workers.testing.program:Misconfigured")

    def test_a_wrong_setting_found_in_a_call_is_too(self, make_group: Callable[..., Group]) -> None:
        group = make_group()
        with pytest.raises(ConfigError, match=r"^the value of rank 1 is wrong$"):
            group.call(Program.misconfigured, 1)
        all_end(group)

    def test_a_bug_ends_the_group_and_is_shown_with_its_traceback(self, make_group: Callable[..., Group]) -> None:
        group = make_group()
        with pytest.raises(WorkerDiedError, match=r"(?s)worker 1 of 2 .* failed in broken:.*ZeroDivisionError: a bug"):
            group.call(Program.broken, 1)
        with pytest.raises(WorkerDiedError, match="ZeroDivisionError"):
            group.call(Program.echo)
        all_end(group)

    def test_only_public_methods_of_the_program_are_called(self, make_group: Callable[..., Group]) -> None:
        group = make_group()
        with pytest.raises(WorkerDiedError, match="the program Program has no public method '__setattr__'"):
            group.call(Program.__setattr__, "place", None)
        all_end(group)

    def test_a_call_that_a_worker_cannot_read_is_told(self, make_group: Callable[..., Group]) -> None:
        """A package may be missing on its machine."""
        group = make_group()
        with pytest.raises(
            WorkerDiedError, match=r"(?s)failed in echo:.*cannot be read on this machine.*no_such_package"
        ):
            group.call(Program.echo, OfAMissingPackage())
        all_end(group)

    @pytest.mark.parametrize("point", BEFORE_THE_RANK_IS_KNOWN)
    def test_workers_that_die_while_they_start(self, make_group: Callable[..., Group], point: str) -> None:
        with pytest.raises(WorkerDiedError, match=r"did not start|died before it had answered its start"):
            make_group(**{failpoints.VARIABLE: f"{point}=kill"})

    @pytest.mark.parametrize("rank", range(NUM_WORKERS))
    @pytest.mark.parametrize("point", DURING_A_CALL)
    def test_a_death_ends_the_call_and_all_others(
        self, make_group: Callable[..., Group], point: str, rank: int
    ) -> None:
        """Also while the others wait for the dead one, as in a collective."""
        group = make_group(**{failpoints.VARIABLE: "", FAILURE: f"{rank}:{point}=kill"})
        with pytest.raises(WorkerDiedError, match=rf"worker {rank} of 2 \(process \d+ on .*\) died before"):
            group.call(Program.hang, rank)
        with pytest.raises(WorkerDiedError, match=f"worker {rank} of 2"):
            group.call(Program.echo)
        all_end(group)

    @pytest.mark.parametrize("rank", range(NUM_WORKERS))
    def test_a_death_between_calls_ends_the_next_one(self, make_group: Callable[..., Group], rank: int) -> None:
        group = make_group()
        os.kill(group.pids[rank], signal.SIGKILL)
        with pytest.raises(WorkerDiedError, match=rf"worker {rank} of 2"):
            group.call(Program.hang, rank)
        all_end(group)

    def test_a_new_group_starts_after_a_death(self, make_group: Callable[..., Group]) -> None:
        group = make_group()
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises(WorkerDiedError):
            group.call(Program.echo)
        group.close()
        assert make_group().call(Program.echo, 1) == [(1,)] * NUM_WORKERS

    # a state that the workers write themselves

    def test_workers_write_a_state_while_it_changes(self, group: Group, tmp_path: Path) -> None:
        files = StateFiles(group, tmp_path / "state", shard_bytes=_SHARD_BYTES)
        files.check()
        capture = files.capture("m", _SHAPES, ("weights", "adam_m", "adam_v"))
        group.call(Program.train, "m")
        later = files.capture("m", _SHAPES, ("weights",))
        group.call(Program.train, "m")
        for kind, prefix in (("weights", ""), ("adam_m", "adam_m."), ("adam_v", "adam_v.")):
            found = capture.tensors(kind)  # type: ignore[arg-type]  # one of the literals
            for name, shape in _SHAPES.items():
                np.testing.assert_array_equal(found[name], state_tensor(prefix + name, shape))
        for name, shape in _SHAPES.items():
            np.testing.assert_array_equal(later.tensors("weights")[name], state_tensor(name, shape) + np.float32(1))

    def test_a_state_that_nobody_needs_leaves_nothing(self, group: Group, tmp_path: Path) -> None:
        (tmp_path / "state" / "killed").mkdir(parents=True)
        (tmp_path / "state" / "killed.lock").touch()
        replay = StateFiles(group, tmp_path / "state", shard_bytes=_SHARD_BYTES)
        (beside,) = (path for path in (tmp_path / "state").iterdir() if path.is_dir())
        files = StateFiles(group, tmp_path / "state", shard_bytes=_SHARD_BYTES)
        (own,) = (path for path in (tmp_path / "state").iterdir() if path.is_dir() and path != beside)
        replay.check()
        tensors = files.capture("m", _SHAPES, ("weights",)).tensors("weights")
        dict(tensors)  # who holds tensors holds the files
        assert [each.name for each in own.rglob("*.json")] == ["model.safetensors.index.json"]
        del tensors
        files.capture("m", _SHAPES, ("weights",))
        assert not list(own.iterdir())

    def test_a_disk_that_refuses_is_told_to_the_reader(self, group: Group, tmp_path: Path) -> None:
        files = StateFiles(group, tmp_path / "state", shard_bytes=_SHARD_BYTES)
        rmtree(tmp_path / "state")
        with pytest.raises(ServerError, match=r"could not be written to disk: No such file or directory"):
            files.capture("m", _SHAPES, ("weights",))

    @pytest.mark.parametrize("rank", range(NUM_WORKERS))
    @pytest.mark.parametrize("point", ["worker.write_state.before", "worker.write_state.after"])
    def test_a_death_while_a_state_is_written_is_told_to_the_reader(
        self, make_group: Callable[..., Group], point: str, rank: int, tmp_path: Path
    ) -> None:
        group = make_group(**{failpoints.VARIABLE: "", FAILURE: f"{rank}:{point}=kill"})
        files = StateFiles(group, tmp_path / "state", shard_bytes=_SHARD_BYTES)
        with pytest.raises(WorkerDiedError, match=f"worker {rank} of 2"):
            files.capture("m", _SHAPES, ("weights",)).wait()  # it may die before it has answered the first call
        all_end(group)

    # the end

    def test_closing_ends_all_workers(self, make_group: Callable[..., Group]) -> None:
        group = make_group()
        all_end(group)
        with pytest.raises(WorkerDiedError, match="have been ended"):
            group.call(Program.echo)
        group.close()


class OfAMissingPackage:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return import_module, ("no_such_package",)


def no_progress(stage: str, fraction: float | None) -> None:
    del stage, fraction


def all_end(group: Group) -> None:
    """Close the group and wait for its workers' end."""
    pids = group.pids
    group.close()
    wait_until_ended(pids)


def wait_until_ended(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + _HANG_S
    while any(map(alive, pids)):
        assert time.monotonic() < deadline, "workers are left"
        time.sleep(0.01)


def alive(pid: int) -> bool:
    """Return whether a process of this machine runs; one that nobody has waited for yet does not."""
    with suppress(FileNotFoundError, ProcessLookupError):  # the latter if it ends between opening and reading
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    return False
