"""Every step that is possible in a state: of clients, engines, housekeeping and faults, in any order."""

from collections.abc import Iterator
from typing import NamedTuple

from exactly_once.store import Ended, Store
from exactly_once.values import (
    ALONE,
    COPIED,
    DOWN,
    POISON,
    READY,
    RECOVERING,
    REGISTERED,
    SAMPLE,
    STEP,
    SUCCEEDED,
    WRITTEN,
    Bounds,
    Content,
    Engine,
    Faults,
    RecoveryPoints,
    State,
    Subject,
    Taking,
    after,
    holds_failed_pass,
    is_discarded,
    is_finite,
    replaced,
)


class Step(NamedTuple):
    """One step. A run without faults takes no step with `fault`."""

    what: str
    where: tuple[int, ...]  # engine, subject and seq_id, as far as they apply
    state: State
    fault: bool = False


class Steps:
    def __init__(self, bounds: Bounds, mutations: frozenset[str] = frozenset()) -> None:
        self._bounds = bounds
        self._programs = bounds.programs
        self._mutations = mutations
        self._store = Store(bounds, mutations)

    def of(self, state: State) -> Iterator[Step]:
        yield from self._clients(state)
        yield from self._housekeeping(state)
        for number, engine in enumerate(state.engines):
            if engine.phase != DOWN:
                yield from self._engine(state, number, engine)
                yield from self._ends(state, number, engine)
        yield from self._starts(state)

    # clients and housekeeping

    def _clients(self, state: State) -> Iterator[Step]:
        for number, subject in enumerate(state.subjects):
            for seq_id, kind in enumerate(self._programs[number]):
                if self._bounds.in_order and seq_id and subject.rows[seq_id - 1] is None:
                    break
                if (changed := self._store.submit(subject, kind, seq_id)) is not None:
                    yield Step("a client submits", (number, seq_id), _with_subject(state, number, changed))
                if kind == SAMPLE and (changed := self._store.cancel(subject, seq_id)) is not None:
                    yield Step("a client cancels", (number, seq_id), _with_subject(state, number, changed), fault=True)

    def _housekeeping(self, state: State) -> Iterator[Step]:
        for number, subject in enumerate(state.subjects):
            for seq_id, pruned in self._store.prune(subject, self._programs[number]):
                yield Step("prune", (number, seq_id), _with_subject(state, number, pruned), fault=True)
            if state.left.damages and len(subject.recovery_points) > 1:
                newest = subject.recovery_points[0][1]
                files = tuple(each for each in subject.files if each[0] != newest)
                if len(files) < len(subject.files):
                    damaged = _with_subject(state, number, subject._replace(files=files))
                    left = state.left._replace(damages=state.left.damages - 1)
                    yield Step(
                        "damage to the newest recovery point", (number,), damaged._replace(left=left), fault=True
                    )

    # the life of an engine

    def _starts(self, state: State) -> Iterator[Step]:
        """The lease is free or has expired. Only the first engine that is down starts: they are interchangeable."""
        number = next((n for n, engine in enumerate(state.engines) if engine.phase == DOWN), None)
        if number is None:
            return
        held = any(engine.current for engine in state.engines)
        if held and not state.left.takeovers:
            return
        engines = tuple(engine._replace(current=False) for engine in state.engines)
        seen = tuple((subject.recovery_points, subject.applied_seq_id) for subject in state.subjects)
        fresh = Engine(phase=RECOVERING, current=True, seen=seen, name=_fresh_name(state))
        left = state.left._replace(takeovers=state.left.takeovers - held)
        yield Step(
            "an engine takes over" if held else "an engine starts",
            (number,),
            State(state.subjects, replaced(engines, number, fresh), left, held or state.interrupted),
            fault=held,
        )

    def _ends(self, state: State, number: int, engine: Engine) -> Iterator[Step]:
        if state.left.crashes:
            left = state.left._replace(crashes=state.left.crashes - 1)
            killed = _with_engine(state, number, Engine(), left)
            killed = killed._replace(interrupted=engine.current or state.interrupted)
            yield Step("the engine is killed", (number,), killed, fault=True)
        if state.left.stops and engine.phase == READY and not engine.ran:
            left = state.left._replace(stops=state.left.stops - 1)
            stopped = _with_engine(state, number, Engine(), left)
            if engine.current or "requeue_unfenced" in self._mutations:
                stopped = self._requeued(stopped, "stopped")
            yield Step("the engine stops in order", (number,), stopped, fault=True)

    def _requeued(self, state: State, ended: Ended) -> State:
        both = zip(state.subjects, self._programs, strict=True)
        return state._replace(subjects=tuple(self._store.requeue(subject, program, ended) for subject, program in both))

    def _engine(self, state: State, number: int, engine: Engine) -> Iterator[Step]:
        if engine.phase == RECOVERING:
            yield self._recover(state, number, engine)
            return
        yield from self._claims(state, number, engine)
        yield from self._runs(state, number, engine)
        yield from self._records(state, number, engine)
        yield from self._gaps(state, number)
        if engine.phase == READY and self._bounds.keep:
            yield from self._recovery_points(state, number, engine)

    # recovery

    def _recover(self, state: State, number: int, engine: Engine) -> Step:
        model = len(engine.backend)
        if model < len(state.subjects):
            points, applied_seq_id = engine.seen[model]
            rebuilt = engine._replace(
                backend=(*engine.backend, self._rebuilt(state.subjects[model], self._programs[model], points)),
                positions=(*engine.positions, applied_seq_id),
            )
            if "windows_forgotten" in self._mutations:
                rebuilt = rebuilt._replace(started=rebuilt.positions)
            return Step("the engine rebuilds", (number, model), _with_engine(state, number, rebuilt))
        if not engine.current and "requeue_unfenced" not in self._mutations:
            return self._refused(state, number)
        ready = engine._replace(phase=ALONE, seen=(), taking=(None,) * len(state.subjects))
        state = _with_engine(state, number, ready)
        if "no_requeue" in self._mutations:
            return Step("the engine is ready", (number,), state)
        return Step("requeue", (number,), self._requeued(state, "interrupted" if state.interrupted else "crashed"))

    def _rebuilt(self, subject: Subject, program: str, points: RecoveryPoints) -> Content:
        """Restore the newest good recovery point of those seen at the start, and replay what succeeded after it.

        A step that was discarded drops the pending passes again.
        """
        files = {directory: (seq_id, content) for directory, seq_id, content in subject.files}
        good = next((files[directory] for _, directory in points if directory in files), (-1, ()))
        seq_id, content = good
        start = -1 if "replay_from_start" in self._mutations else seq_id
        for n, row in enumerate(subject.rows):
            if n > start and row and row.state == SUCCEEDED and row.kept:
                discarded = is_discarded(row, n) and "discards_not_replayed" not in self._mutations
                content = after(content, program, n, discarded=discarded)
        return content

    @staticmethod
    def _refused(state: State, number: int) -> Step:
        """The store has told the engine that another one holds its lease, so it ends."""
        return Step("superseded: the engine ends", (number,), _with_engine(state, number, Engine()))

    # operations

    def _claims(self, state: State, number: int, engine: Engine) -> Iterator[Step]:
        if engine.looked is not None:  # the second half of a claim that is not atomic
            subject, seq_id = engine.looked
            yield self._claimed(state, number, engine._replace(looked=None), subject, seq_id)
            return
        if not engine.current and "claim_unfenced" not in self._mutations:
            yield self._refused(state, number)
            return
        alone = engine.phase == ALONE
        if alone and (engine.claimed or engine.ran):
            return
        found = False
        for subject, program in enumerate(self._programs):
            for seq_id in self._store.claimable(state.subjects[subject], program, alone=alone):
                found = True
                if "claim_not_atomic" in self._mutations:
                    looked = engine._replace(looked=(subject, seq_id))
                    yield Step("claim looks", (number, subject, seq_id), _with_engine(state, number, looked))
                    continue
                yield self._claimed(state, number, engine, subject, seq_id)
                if state.left.lost_answers:
                    yield self._claim_unanswered(state, number, engine, subject, seq_id)
        if alone and not found:
            ready = engine._replace(phase=READY)
            yield Step("nothing is left to retry alone", (number,), _with_engine(state, number, ready))

    def _claimed(self, state: State, number: int, engine: Engine, subject: int, seq_id: int) -> Step:
        changed = self._store.claim(state.subjects[subject], self._programs[subject], seq_id)
        claimed = engine._replace(claimed=tuple(sorted([*engine.claimed, (subject, seq_id)])))
        after = _with_engine(_with_subject(state, subject, changed), number, claimed)
        return Step("claim", (number, subject, seq_id), after)

    def _claim_unanswered(self, state: State, number: int, engine: Engine, subject: int, seq_id: int) -> Step:
        """The engine asks what it was given, and continues with that. If it did not, nobody would run it."""
        step = self._claimed(state, number, engine, subject, seq_id)
        after = step.state
        if "claim_answer_lost" in self._mutations:
            after = _with_engine(after, number, engine)
        return Step("claim, its answer lost", step.where, _one_answer_less(after), fault=True)

    def _runs(self, state: State, number: int, engine: Engine) -> Iterator[Step]:
        started: set[int] = set()
        for subject, seq_id in engine.claimed:
            kind = self._programs[subject][seq_id]
            if kind != SAMPLE and subject in started:
                continue  # in order
            started.add(subject)
            where = (number, subject, seq_id)
            if kind == POISON:
                dead = _with_engine(state, number, Engine())
                dead = dead._replace(interrupted=state.interrupted and not engine.current)
                yield Step("poison kills the engine", where, dead)
                continue
            rest = tuple(each for each in engine.claimed if each != (subject, seq_id))
            content = self._content(state.subjects[subject], subject, seq_id, engine)
            ran = engine._replace(
                claimed=rest,
                backend=replaced(engine.backend, subject, content),
                positions=replaced(engine.positions, subject, seq_id),
                ran=(*engine.ran, (subject, seq_id, () if kind == SAMPLE else content)),
            )
            yield Step("the backend runs", where, _with_engine(state, number, ran))

    def _content(self, subject: Subject, number: int, seq_id: int, engine: Engine) -> Content:
        """Return the training state after an operation."""
        content, program = engine.backend[number], self._programs[number]
        if program[seq_id] == SAMPLE:
            return content
        since = engine.started[number] if engine.started else -1
        ran = [done for of, done, _ in engine.ran if of == number]
        failed = holds_failed_pass(subject, program, seq_id, since=since, ran=ran)
        if "windows_ignored" in self._mutations:
            failed = False
        discarded = program[seq_id] == STEP and (failed or not is_finite(content, program))
        return after(content, program, seq_id, discarded=discarded)

    def _records(self, state: State, number: int, engine: Engine) -> Iterator[Step]:
        if not engine.ran:
            return
        if not engine.current and "complete_unfenced" not in self._mutations:
            yield self._refused(state, number)
            return
        (subject, seq_id, content), rest = engine.ran[0], engine.ran[1:]
        changed = self._store.complete(state.subjects[subject], self._programs[subject], seq_id, content)
        after = _with_subject(state, subject, changed)
        where = (number, subject, seq_id)
        yield Step("complete", where, _with_engine(after, number, engine._replace(ran=rest)))
        if state.left.lost_answers:  # the engine repeats the call
            yield Step("complete, its answer lost", where, _one_answer_less(after), fault=True)

    def _gaps(self, state: State, number: int) -> Iterator[Step]:
        """A superseded engine may do it too."""
        if self._bounds.in_order:
            return
        for model, subject in enumerate(state.subjects):
            if self._programs[model][0] != SAMPLE:
                for failed in self._store.fail_gaps(subject):
                    where = (number, model, failed.applied_seq_id)
                    yield Step("fail_gaps", where, _with_subject(state, model, failed))

    # recovery points

    def _recovery_points(self, state: State, number: int, engine: Engine) -> Iterator[Step]:
        for model, taking in enumerate(engine.taking):
            if self._programs[model][0] == SAMPLE:
                continue
            subject, where = state.subjects[model], (number, model)
            match taking:
                case None:
                    seq_id = engine.positions[model]
                    if seq_id > max((each[0] for each in subject.recovery_points), default=-1):
                        copied = Taking(COPIED, seq_id, engine.backend[model])
                        yield Step("copy for a recovery point", where, _taking(state, number, model, copied))
                case Taking(stage="copied"):
                    directory = self._directory(engine, taking)
                    others = [each for each in subject.files if each[0] != directory]
                    files = tuple(sorted([*others, (directory, taking.seq_id, taking.content)]))
                    written = _with_subject(state, model, subject._replace(files=files))
                    after = _taking(written, number, model, taking._replace(stage=WRITTEN))
                    yield Step("write a recovery point", where, after, fault=True)
                case Taking(stage="written"):
                    yield from self._register(state, number, model, taking)
                case _:
                    files = tuple(each for each in subject.files if not self._untidy(each, taking))
                    tidied = _with_subject(state, model, subject._replace(files=files))
                    yield Step("tidy", where, _taking(tidied, number, model, None))

    def _register(self, state: State, number: int, model: int, taking: Taking) -> Iterator[Step]:
        engine = state.engines[number]
        waits = any(subject == model and seq_id <= taking.seq_id for subject, seq_id, _ in engine.ran)
        if waits and "point_early" not in self._mutations:
            return
        if not engine.current and "point_unfenced" not in self._mutations:
            yield self._refused(state, number)
            return
        directory = self._directory(engine, taking)
        changed = self._store.add_recovery_point(state.subjects[model], taking.seq_id, directory)
        if changed is None:
            yield Step("add_recovery_point is refused", (number, model), _taking(state, number, model, None))
            return
        after = _taking(state, number, model, taking._replace(stage=REGISTERED, listed=changed.recovery_points))
        yield Step("add_recovery_point", (number, model, taking.seq_id), _with_subject(after, model, changed))

    def _directory(self, engine: Engine, taking: Taking) -> str:
        return f"{taking.seq_id}" if "point_shared_names" in self._mutations else f"{taking.seq_id}{engine.name}"

    def _untidy(self, file: tuple[str, int, Content], taking: Taking) -> bool:
        directory, seq_id, _ = file
        listed = [name for _, name in taking.listed]
        newer = seq_id > taking.listed[0][0] and "tidy_removes_newer" not in self._mutations
        return directory not in listed and not newer


def _with_subject(state: State, number: int, subject: Subject) -> State:
    return state._replace(subjects=replaced(state.subjects, number, subject))


def _with_engine(state: State, number: int, engine: Engine, left: Faults | None = None) -> State:
    return state._replace(engines=replaced(state.engines, number, engine), left=left or state.left)


def _taking(state: State, number: int, model: int, taking: Taking | None) -> State:
    engine = state.engines[number]
    return _with_engine(state, number, engine._replace(taking=replaced(engine.taking, model, taking)))


def _one_answer_less(state: State) -> State:
    return state._replace(left=state.left._replace(lost_answers=state.left.lost_answers - 1))


def _fresh_name(state: State) -> str:
    """Return a name that is no longer in use. Real names are random, so none occurs twice."""
    used = {engine.name for engine in state.engines}
    for subject in state.subjects:
        used |= {name[-1] for name, _, _ in subject.files} | {name[-1] for _, name in subject.recovery_points}
    return next(letter for letter in "abcdefghijkl" if letter not in used)
