"""The shares of tenants in what an engine holds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tinsmith.store import Claimable, ClaimRoom, Holding


def waiting(**sizes: list[int]) -> dict[str, list[Claimable[str]]]:
    """Let each tenant have operations of these sizes, the later tenants after the earlier ones."""
    turns = iter(range(1000))
    return {
        tenant: [Claimable(key=f"{tenant}{n}", num_bytes=size, arrival=next(turns)) for n, size in enumerate(each)]
        for tenant, each in sizes.items()
    }


def test_tenants_share_the_places() -> None:
    room = ClaimRoom(operations=6, num_bytes=100)
    assert room.choose(waiting(hog=[1] * 9)) == [f"hog{n}" for n in range(6)]
    assert room.choose(waiting(hog=[1] * 9, ann=[1] * 9)) == ["hog0", "ann0", "hog1", "ann1", "hog2", "ann2"]
    assert room.choose(waiting(hog=[1] * 9, ann=[1])) == ["hog0", "ann0", *(f"hog{n}" for n in range(1, 5))]


def test_whoever_comes_later_finds_places() -> None:
    full = ClaimRoom(operations=6, num_bytes=100, held={"hog": Holding(operations=6, num_bytes=6)})
    assert full.choose(waiting(hog=[1] * 9)) == []
    assert full.choose(waiting(hog=[1] * 9, ann=[1] * 9)) == ["ann0", "ann1", "ann2"]
    crowd = waiting(**{f"t{n}": [1, 1] for n in range(20)})
    assert full.choose(crowd) == [f"t{n}0" for n in range(20)]


def test_tenants_share_the_bytes() -> None:
    room = ClaimRoom(operations=100, num_bytes=40)
    assert room.choose(waiting(hog=[10] * 9)) == ["hog0", "hog1", "hog2", "hog3"]
    assert room.choose(waiting(hog=[10] * 9, ann=[10] * 9)) == ["hog0", "ann0", "hog1", "ann1"]
    assert room.choose(waiting(hog=[10] * 9, ann=[])) == ["hog0", "hog1"]
    assert room.choose(waiting(hog=[5, 30, 1])) == ["hog0", "hog1", "hog2"]
    assert room.choose(waiting(hog=[5, 36, 1])) == ["hog0"]  # nothing passes what does not fit


def test_one_larger_operation_passes_alone() -> None:
    room = ClaimRoom(operations=100, num_bytes=40)
    assert room.choose(waiting(hog=[500, 1], ann=[1])) == ["hog0"]
    held = {"hog": Holding(operations=1, num_bytes=500)}
    assert ClaimRoom(operations=100, num_bytes=40, held=held).choose(waiting(hog=[1], ann=[1])) == []
    larger_than_a_share = waiting(hog=[30], ann=[10])
    assert room.choose(larger_than_a_share) == ["hog0", "ann0"]


def test_a_reserve_is_free_whatever_others_hold() -> None:
    held = {"hog": Holding(operations=1, num_bytes=500)}
    room = ClaimRoom(operations=100, num_bytes=40, reserved_bytes=2, held=held)
    assert room.choose(waiting(hog=[1], ann=[1, 1, 1], bob=[3])) == ["ann0", "ann1"]


def test_nobody_grows_while_a_first_operation_waits_for_room() -> None:
    held = {"ann": Holding(operations=1, num_bytes=10), "bob": Holding(operations=1, num_bytes=10)}
    room = ClaimRoom(operations=100, num_bytes=40, reserved_bytes=1, held=held)
    assert room.choose(waiting(ann=[2], bob=[2])) == ["ann0", "bob0"]
    assert room.choose(waiting(ann=[2], bob=[2], eve=[30])) == []
    assert room.choose(waiting(ann=[2], bob=[2], eve=[30], fay=[1, 1])) == ["fay0"]


SIZES = st.lists(st.integers(0, 60), max_size=12)


@settings(deadline=None, derandomize=True)
@given(
    tenants=st.lists(SIZES, min_size=1, max_size=6),
    operations=st.integers(1, 20),
    num_bytes=st.integers(10, 80),
    reserved=st.integers(0, 4),
)
def test_everybody_is_served_in_the_end_and_memory_is_bounded(
    tenants: list[list[int]], operations: int, num_bytes: int, reserved: int
) -> None:
    left = {f"t{number}": sizes for number, sizes in enumerate(tenants) if sizes}
    held: list[tuple[str, int]] = []
    while left or held:
        of = {tenant: [size for owner, size in held if owner == tenant] for tenant, _ in held}
        holds = {tenant: Holding(operations=len(each), num_bytes=sum(each)) for tenant, each in of.items()}
        room = ClaimRoom(operations=operations, num_bytes=num_bytes, reserved_bytes=reserved, held=holds)
        chosen = room.choose(waiting(**left))
        for tenant in list(left):
            taken = [key for key in chosen if key.startswith(tenant)]
            assert taken == [f"{tenant}{number}" for number in range(len(taken))]
            held += [(tenant, size) for size in left[tenant][: len(taken)]]
            left[tenant] = left[tenant][len(taken) :]
            if not left[tenant]:
                del left[tenant]
        sizes = [size for _, size in held]
        assert sum(sizes) - max(sizes) <= num_bytes + reserved * len(tenants)
        held.pop(0)  # nothing waits for ever: whatever is held ends
