from collections import Counter
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.builtin.fair_scheduler import MERGED, PASSES, FairConfig, FairScheduler
from tinsmith.scheduler import Batch, Limits, Pending
from tinsmith.testing.scheduler_contract import LIMITS, queues

FAIR = FairScheduler(FairConfig())


def pending(request_id: str, kind: str = "forward_backward", *, tokens: int = 10, at: float = 0.0) -> Pending:
    """`t1/m1/3`: tenant, model, seq_id."""
    tenant, model, seq_id = request_id.split("/")
    return Pending(
        request_id=request_id,
        model_id=f"{tenant}/{model}",
        tenant=tenant,
        kind=kind,
        seq_id=int(seq_id),
        num_tokens=tokens if kind in PASSES else 0,
        enqueued_at_s=at,
    )


def plan(*operations: Pending, tokens: int = 100, memory: dict[str, float] | None = None) -> Batch:
    return FAIR.plan(operations, limits=Limits(max_batch_tokens=tokens), now_s=0.0, memory=memory or {})


def test_passes_of_models_and_consecutive_passes_of_one_merge() -> None:
    batch = plan(
        pending("a/m/1"),
        pending("a/m/2"),
        pending("a/m/3", "optim_step"),
        pending("a/m/4"),
        pending("b/m/7"),
        pending("c/m/1", "forward"),
    )
    assert batch.kind == "forward_backward"
    assert set(batch.request_ids) == {"a/m/1", "a/m/2", "b/m/7"}


def test_optimizer_steps_of_models_merge() -> None:
    batch = plan(pending("a/m/1", "optim_step"), pending("a/n/1", "optim_step"), pending("b/m/5", "optim_step"))
    assert set(batch.request_ids) == {"a/m/1", "a/n/1", "b/m/5"}


def test_anything_else_runs_alone() -> None:
    batch = plan(pending("a/m/1", "save_state"), pending("b/m/1", "save_state"))
    assert batch.request_ids == ("a/m/1",)


def test_a_barrier_of_one_model_does_not_delay_another() -> None:
    first = plan(pending("a/m/1", "save_state"), pending("b/m/1", at=1.0), pending("b/m/2", at=2.0))
    assert first.request_ids == ("a/m/1",)
    second = plan(
        pending("a/m/2", at=3.0), pending("b/m/1", at=1.0), pending("b/m/2", at=2.0), memory=dict(first.memory)
    )
    assert set(second.request_ids) == {"a/m/2", "b/m/1", "b/m/2"}


def test_an_operation_larger_than_the_budget_runs_alone() -> None:
    batch = plan(pending("a/m/1", tokens=500), pending("b/m/1", tokens=1, at=1.0))
    assert batch.request_ids == ("a/m/1",)


def test_small_operations_do_not_pass_a_large_one_for_ever() -> None:
    memory: dict[str, float] = {}
    for round_number in range(10):
        mice = [pending(f"t{n}/m/{round_number}", tokens=30, at=1.0 + round_number) for n in range(4)]
        batch = plan(pending("large/m/1", tokens=95, at=2.0), *mice, memory=memory)
        if "large/m/1" in batch.request_ids:
            return
        memory = dict(batch.memory)
    raise AssertionError


@settings(deadline=None, derandomize=True, max_examples=40)
@given(queue=queues(), limits=LIMITS)
def test_a_batch_leaves_out_nothing_that_fits(queue: list[Pending], limits: Limits) -> None:
    batch = FAIR.plan(queue, limits=limits, now_s=0.0, memory={})
    assert bool(batch.request_ids) == bool(queue)
    if batch.kind not in MERGED:
        return
    used = sum(each.num_tokens for each in queue if each.request_id in batch.request_ids)
    left = sorted((each for each in queue if each.request_id not in batch.request_ids), key=lambda each: each.seq_id)
    heads = {each.model_id: each for each in reversed(left)}
    chosen_models = {each.model_id for each in queue if each.request_id in batch.request_ids}
    for head in heads.values():
        if head.kind != batch.kind or (batch.kind not in PASSES and head.model_id in chosen_models):
            continue
        assert used + head.num_tokens > limits.max_batch_tokens


def serve(
    tenants: list[tuple[list[int], int]], *, batches: int, budget: int = 100, **weights: float
) -> Iterator[Counter[str]]:
    """Yield what has been served to each tenant after every batch.

    Each has the sizes of its operations, in turn, and a number of models, which always have more waiting than fits.
    """
    served: Counter[str] = Counter()
    memory: dict[str, float] = {}
    done: Counter[str] = Counter()
    scheduler = FairScheduler(FairConfig(min_cost_tokens=1, weights=weights))
    for _ in range(batches):
        queue = [
            pending(f"t{t}/m{m}/{seq_id}", tokens=sizes[seq_id % len(sizes)])
            for t, (sizes, num_models) in enumerate(tenants)
            for m in range(num_models)
            for seq_id in range(done[f"t{t}/m{m}"], done[f"t{t}/m{m}"] + budget // min(sizes) + 1)
        ]
        batch = scheduler.plan(queue, limits=Limits(max_batch_tokens=budget), now_s=0.0, memory=memory)
        memory = dict(batch.memory)
        tokens = {each.request_id: each.num_tokens for each in queue}
        for request_id in batch.request_ids:
            tenant, model, _ = request_id.split("/")
            served[tenant] += tokens[request_id]
            done[f"{tenant}/{model}"] += 1
        yield served


TENANTS = st.lists(
    st.tuples(st.lists(st.integers(4, 100), min_size=1, max_size=3), st.integers(1, 3)), min_size=2, max_size=5
)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(tenants=TENANTS)
def test_no_backlogged_tenant_gets_ahead_by_more_than_one_operation(tenants: list[tuple[list[int], int]]) -> None:
    """The bound that the module derives, after every batch: neither size nor number of models brings more."""
    for served in serve(tenants, batches=25):
        for one, (sizes, _) in enumerate(tenants):
            for other, (other_sizes, _) in enumerate(tenants):
                if max(other_sizes) <= min(sizes):
                    assert served[f"t{one}"] - served[f"t{other}"] <= max(sizes)


def test_weights_divide_what_is_served() -> None:
    for served in serve([([10], 1), ([10], 2), ([7], 1)], batches=40, t0=3.0, t1=0.5):
        for one, weight in (("t0", 3.0), ("t1", 0.5), ("t2", 1.0)):
            for other, other_weight in (("t0", 3.0), ("t1", 0.5)):
                assert served[other] / other_weight - served[one] / weight <= 10 / other_weight + 1e-9


def test_the_bound_is_reached() -> None:
    after = [dict(served) for served in serve([([60], 1), ([60], 1)], batches=2)]
    assert after[0] == {"t0": 60}
    assert after[1] == {"t0": 60, "t1": 60}


def test_equal_tenants_stay_equal_beside_one_that_wants_little() -> None:
    memory: dict[str, float] = {}
    served: Counter[str] = Counter()
    for seq_id in range(200):
        heavy = [pending(f"{name}/m/{served[name] // 33 + n}", tokens=33) for name in ("ann", "bob") for n in range(4)]
        batch = plan(*heavy, pending(f"mouse/m/{seq_id}", tokens=1), memory=memory)
        memory = dict(batch.memory)
        for request_id in batch.request_ids:
            served[request_id.split("/")[0]] += 1 if request_id.startswith("mouse") else 33
        assert abs(served["ann"] - served["bob"]) <= 33
    assert max(memory.values()) <= 2 * 100 + 33


def test_a_newcomer_starts_level_and_an_idle_tenant_saves_nothing_up() -> None:
    memory: dict[str, float] = {}
    for seq_id in range(100):
        memory = dict(plan(pending(f"hog/m/{seq_id}", tokens=100), memory=memory).memory)
    assert memory == {}
    for seq_id in range(100):
        queue = [pending(f"hog/m/{seq_id}", tokens=99), pending(f"mouse/m/{seq_id}", tokens=1, at=1.0)]
        memory = dict(plan(*queue, memory=memory).memory)
    assert memory == {"hog": 2 * 100}


def test_one_who_comes_back_pays_what_it_owes() -> None:
    memory = {"hog": 150.0}
    queue = [pending("hog/m/1", tokens=100, at=0.0), pending("mouse/m/1", tokens=100, at=5.0)]
    batch = plan(*queue, memory=memory)
    assert batch.request_ids == ("mouse/m/1",)
