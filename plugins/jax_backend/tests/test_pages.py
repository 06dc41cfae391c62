"""Pages and rows on the host: sharing, eviction, exhaustion, and what a dropped adapter leaves behind."""

import numpy as np
import pytest

from tinsmith_jax.pages import AdapterRows, Pages, PrefixKey


def key(*tokens: int, serial: int = 0, session: str = "s") -> PrefixKey:
    """The key of a prefix of one token per page."""
    made = PrefixKey.first(serial, session)
    for token in tokens:
        made = made.then(np.array([token], np.int32))
    return made


def test_a_key_says_the_adapter_and_every_token_up_to_it() -> None:
    assert key(1, 2) == key(1, 2)
    assert len({key(1, 2), key(2, 1), key(2), key(1, 2, serial=1), key(1, 2, session="t"), key(1, 2, 2)}) == 6


def test_pages_are_shared_until_the_last_user_leaves() -> None:
    pages = Pages(4)
    page = pages.take()
    pages.name(page, key(1))
    assert pages.find(key(1)) == page
    assert pages.find(key(2)) is None
    pages.release(page)
    assert pages.num_used == 1
    pages.release(page)
    assert pages.num_used == 0
    assert pages.find(key(1)) == page, "a prefix stays when nobody uses it"


def test_page_zero_is_nobodys_and_no_page_has_two_owners() -> None:
    pages = Pages(5)
    taken = [pages.take() for _ in range(4)]
    assert sorted(taken) == [1, 2, 3, 4]
    with pytest.raises(KeyError):
        pages.take()


def test_the_prefix_that_went_unused_longest_is_evicted_and_none_in_use() -> None:
    pages = Pages(4)
    first, second, third = (pages.take() for _ in range(3))
    for page, token in ((first, 1), (second, 2), (third, 3)):
        pages.name(page, key(token))
    pages.release(second)
    pages.release(first)
    assert pages.take() == second
    assert pages.find(key(2)) is None
    assert pages.find(key(1)) == first
    assert pages.find(key(3)) == third


def test_using_a_prefix_again_keeps_it() -> None:
    pages = Pages(3)
    first, second = pages.take(), pages.take()
    for page, token in ((first, 1), (second, 2)):
        pages.name(page, key(token))
        pages.release(page)
    assert pages.find(key(1)) == first
    pages.release(first)
    assert pages.take() == second


def test_two_pages_with_one_content_are_both_freed() -> None:
    pages = Pages(3)
    first, second = pages.take(), pages.take()
    pages.name(first, key(1))
    pages.name(second, key(1))
    pages.release(second)
    assert pages.take() == second
    assert pages.find(key(1)) == first


def test_what_a_dropped_adapter_read_is_freed_at_once_or_with_its_last_user() -> None:
    pages = Pages(4)
    unused, used, other = (pages.take() for _ in range(3))
    pages.name(unused, key(1, serial=5))
    pages.name(used, key(2, serial=5))
    pages.name(other, key(1, serial=6))
    pages.release(unused)
    pages.forget(5)
    assert pages.find(key(1, serial=5)) is None
    assert pages.find(key(2, serial=5)) is None
    assert pages.find(key(1, serial=6)) == other
    assert pages.take() == unused
    pages.release(used)
    assert pages.take() == used


def test_many_random_steps_lose_no_page_and_share_only_equal_prefixes() -> None:
    rng, pages, size = np.random.default_rng(0), Pages(20), 19
    held: list[tuple[int, PrefixKey | None]] = []
    for _ in range(3000):
        if held and (len(held) == size or rng.random() < 0.5):
            page, _ = held.pop(int(rng.integers(len(held))))
            pages.release(page)
            continue
        wanted = key(int(rng.integers(30)), serial=int(rng.integers(3))) if rng.random() < 0.7 else None
        page = None if wanted is None else pages.find(wanted)
        if page is None:
            page = pages.take()
            assert page not in {other for other, _ in held}
            if wanted is not None:
                pages.name(page, wanted)
        else:
            assert all(content == wanted for other, content in held if other == page)
        held.append((page, wanted))
        if rng.random() < 0.01:
            pages.forget(int(rng.integers(3)))
        assert pages.num_used == len({page for page, _ in held})
    for page, _ in held:
        pages.release(page)
    assert pages.num_used == 0
    assert len({pages.take() for _ in range(size)}) == size


def test_a_row_keeps_its_adapter_until_its_place_is_needed() -> None:
    rows = AdapterRows(2)
    assert rows.find(7) is None
    rows.name(first := rows.take(), 7)
    rows.name(second := rows.take(), 8)
    assert {first, second} == {0, 1}
    rows.release(7)
    assert rows.find(7) == first, "still there"
    rows.release(7)
    rows.release(8)
    assert rows.take() == second, "8 was wanted before 7 was wanted again"
    assert rows.find(8) is None
    assert rows.find(7) == first


def test_a_row_is_free_for_an_adapter_that_is_there_or_may_take_the_place_of_an_unused_one() -> None:
    rows = AdapterRows(2)
    assert rows.has_room(7)
    rows.name(rows.take(), 7)
    rows.name(rows.take(), 8)
    assert rows.has_room(7)
    assert not rows.has_room(9), "both are in use"
    rows.release(8)
    assert rows.has_room(9)


def test_pages_in_use_lie_close_together_and_what_is_given_back_is_free_and_was_used() -> None:
    pages = Pages(9)
    first, second, third, fourth = (pages.take() for _ in range(4))
    pages.name(second, key(1))
    for page in (first, second, fourth):
        pages.release(page)
    assert pages.give_back() == [first, second, fourth], "prefixes as well; not the one in use, nor those never used"
    assert pages.find(key(1)) is None
    assert pages.give_back() == []
    assert pages.take() == first
    pages.release(first)
    pages.release(third)
    assert pages.give_back() == [first, third]


def test_only_so_many_pages_stay_for_prefixes_that_nobody_uses() -> None:
    pages = Pages(9, kept=2)
    taken = [pages.take() for _ in range(4)]
    for token, page in enumerate(taken):
        pages.name(page, key(token))
    for page in taken:
        pages.release(page)
    assert [pages.find(key(token)) for token in range(4)] == [None, None, *taken[2:]], "those used last"
    assert pages.num_known == 2


def test_no_row_takes_memory_as_long_as_another_one_holds_what_nobody_uses() -> None:
    rows = AdapterRows(3, grows=True)
    rows.name(first := rows.take(), 7)
    rows.name(second := rows.take(), 8)
    assert first != second, "7 is in use"
    rows.release(7)
    rows.name(again := rows.take(), 9)
    assert again == first
    rows.release(8)
    rows.release(9)
    rows.forget(9)
    assert rows.find(9) is None
    assert rows.give_back() == [first, second]
    assert rows.find(8) is None
    assert rows.give_back() == []
    assert rows.take() in {first, second, 2}


def test_an_adapter_that_is_gone_frees_its_row_once_nobody_uses_it() -> None:
    rows = AdapterRows(2)
    rows.name(row := rows.take(), 7)
    rows.forget(7)
    assert rows.find(7) == row
    rows.release(7)
    rows.release(7)
    rows.forget(7)
    assert rows.find(7) is None
    assert rows.take() == row
