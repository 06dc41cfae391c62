"""The contract suite of schedulers: subclass `SchedulerContract` and override `make_scheduler`.

    class TestMyScheduler(SchedulerContract):
        def make_scheduler(self):
            return MyScheduler(MyConfig())

Needs the `testing` extra (pytest, hypothesis).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinsmith.scheduler import Batch, Limits, Pending, Scheduler

PASSES = ("forward", "forward_backward")
KINDS = (
    *PASSES,
    "optim_step",
    "save_state",
    "load_state",
    "save_for_sampler",
    "create_model",
    "unload_model",
    "sample",
)


@st.composite
def queues(draw: st.DrawFn) -> list[Pending]:
    """Draw operations of a few tenants with a few models each, interleaved as they may arrive."""
    num_models = draw(st.integers(1, 6))
    tenants = [draw(st.integers(0, 3)) for _ in range(num_models)]
    kinds = st.sampled_from((*["forward_backward"] * len(KINDS), *KINDS))
    arrivals = draw(st.lists(st.tuples(st.integers(0, num_models - 1), kinds), max_size=24))
    tokens = st.one_of(st.integers(0, 40), st.integers(0, 300))
    next_seq_id = [draw(st.integers(0, 5)) for _ in range(num_models)]
    operations = []
    for number, (model, kind) in enumerate(arrivals):
        operations.append(
            Pending(
                request_id=f"r{number}",
                model_id=f"m{model}",
                tenant=f"t{tenants[model]}",
                kind=kind,
                seq_id=next_seq_id[model],
                num_tokens=draw(tokens) if kind in PASSES else 0,
                enqueued_at_s=float(number),
            )
        )
        next_seq_id[model] += 1
    return operations


LIMITS = st.integers(1, 120).map(lambda tokens: Limits(max_batch_tokens=tokens))

# A suite is run by several subclasses: that one test has several executors is the point. Speed is not under test.
_for_every_subclass = settings(
    suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow], deadline=None, derandomize=True
)


class SchedulerContract:
    """The contract of `Scheduler.plan`, for any queue."""

    def make_scheduler(self) -> Scheduler:
        raise NotImplementedError

    def drain(self, pending: Sequence[Pending], limits: Limits) -> list[tuple[Batch, list[Pending]]]:
        """Plan until nothing is pending; return each batch with the pending operations before it."""
        scheduler, left = self.make_scheduler(), list(pending)
        memory: Mapping[str, float] = {}
        plans: list[tuple[Batch, list[Pending]]] = []
        while left:
            assert len(plans) < 50 * (len(pending) + 1), "what is pending must be chosen after finitely many calls"
            batch = scheduler.plan(left, limits=limits, now_s=float(len(plans)), memory=memory)
            plans.append((batch, left))
            memory = batch.memory
            left = [each for each in left if each.request_id not in batch.request_ids]
        return plans

    @_for_every_subclass
    @given(pending=queues(), limits=LIMITS)
    def test_everything_is_chosen_once_and_never_reordered(self, pending: list[Pending], limits: Limits) -> None:
        chosen = [request_id for batch, _ in self.drain(pending, limits) for request_id in batch.request_ids]
        assert sorted(chosen) == sorted(each.request_id for each in pending)
        place = {request_id: number for number, request_id in enumerate(chosen)}
        for earlier in pending:
            for later in pending:
                if earlier.model_id == later.model_id and earlier.seq_id < later.seq_id:
                    assert place[earlier.request_id] < place[later.request_id]

    @_for_every_subclass
    @given(pending=queues(), limits=LIMITS)
    def test_batches_are_lawful(self, pending: list[Pending], limits: Limits) -> None:
        for batch, left in self.drain(pending, limits):
            known = {each.request_id: each for each in left}
            chosen = [known[request_id] for request_id in batch.request_ids]
            assert {each.kind for each in chosen} <= {batch.kind}
            assert len(chosen) == 1 or sum(each.num_tokens for each in chosen) <= limits.max_batch_tokens
            if batch.kind not in PASSES:
                assert len({each.model_id for each in chosen}) == len(chosen)
            for each in chosen:
                before = [one for one in left if one.model_id == each.model_id and one.seq_id < each.seq_id]
                assert {one.request_id for one in before} <= set(batch.request_ids)

    @_for_every_subclass
    @given(pending=queues(), limits=LIMITS, random=st.randoms(use_true_random=False))
    def test_the_plan_is_a_function_of_its_arguments(
        self, pending: list[Pending], limits: Limits, random: Random
    ) -> None:
        shuffled = random.sample(pending, len(pending))
        first = self.make_scheduler().plan(pending, limits=limits, now_s=1.0, memory={})
        assert self.make_scheduler().plan(shuffled, limits=limits, now_s=1.0, memory={}) == first
        assert self.make_scheduler().plan(pending, limits=limits, now_s=1.0, memory={}) == first

    def test_nothing_passes_what_does_not_fit(self) -> None:
        sizes = (60, 60, 10)
        queue = [
            Pending(
                request_id=str(number),
                model_id="m",
                tenant="t",
                kind="forward_backward",
                seq_id=number,
                num_tokens=size,
                enqueued_at_s=0.0,
            )
            for number, size in enumerate(sizes)
        ]
        batch = self.make_scheduler().plan(queue, limits=Limits(max_batch_tokens=100), now_s=1.0, memory={})
        assert batch.request_ids == ("0",)

    def test_nothing_pending_is_an_empty_batch(self) -> None:
        batch = self.make_scheduler().plan([], limits=Limits(max_batch_tokens=8), now_s=0.0, memory={"t": 1.0})
        assert (batch.kind, batch.request_ids) == (None, ())

    @_for_every_subclass
    @given(limits=LIMITS, num_rounds=st.integers(5, 30))
    def test_an_endless_neighbour_does_not_starve_anyone(self, limits: Limits, num_rounds: int) -> None:
        """A tenant whose queue never shrinks must not keep another's older operation from running."""
        scheduler = self.make_scheduler()
        mouse = Pending(
            request_id="mouse",
            model_id="mouse",
            tenant="mouse",
            kind="optim_step",
            seq_id=0,
            num_tokens=0,
            enqueued_at_s=num_rounds / 2,
        )
        hog = [
            replace(mouse, request_id=f"h{n}", model_id=f"h{n % 3}", tenant="hog", kind="forward_backward", seq_id=n)
            for n in range(num_rounds)
        ]
        hog = [replace(each, num_tokens=limits.max_batch_tokens, enqueued_at_s=float(each.seq_id)) for each in hog]
        left, memory = [*hog, mouse], dict[str, float]()
        for n in range(num_rounds):
            batch = scheduler.plan(left, limits=limits, now_s=float(n), memory=memory)
            if "mouse" in batch.request_ids:
                return
            memory = dict(batch.memory)
            late = [replace(hog[0], request_id=f"l{n}", model_id=f"l{n}", enqueued_at_s=1000.0 + n)]
            left = [each for each in left if each.request_id not in batch.request_ids] + late
        raise AssertionError(f"not chosen in {num_rounds} batches")
