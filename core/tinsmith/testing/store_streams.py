"""The part of the store contract about tokens that are told while they are drawn."""

import asyncio

import pytest

from tinsmith.store import MOST_TOKENS, DrawnTokens, RequestStore
from tinsmith.testing.store_records import LONG_S
from tinsmith.testing.store_suite import StoreSuite


def _piece(first: int, *tokens: int, seq_id: int = 7, sequence: int = 0) -> DrawnTokens:
    return DrawnTokens(
        sampling_session_id="s1:sample:0", seq_id=seq_id, sequence=sequence, first=first, tokens=list(tokens)
    )


class StreamsContract(StoreSuite):
    async def test_tokens_reach_who_listens_in_any_process(self, store: RequestStore, other: RequestStore) -> None:
        """Those of two samples and two sequences, the largest pieces, and a piece that is told twice."""
        if type(store).tell_drawn is RequestStore.tell_drawn:
            pytest.skip("the store passes no tokens on")
        told = [
            _piece(0, 5),
            _piece(1, 6, 0),
            _piece(0, *[2**31 - 1] * MOST_TOKENS, sequence=1),
            _piece(0, 5),
            _piece(3, 9),
        ]
        last, heard = _piece(0, 1, seq_id=8), dict[str, list[DrawnTokens]](own=[], other=[], nothing=[])
        done = {"own": asyncio.Event(), "other": asyncio.Event()}
        with (
            store.drawn("s1:sample:0", 7, heard["own"].append),
            other.drawn("s1:sample:0", 7, heard["other"].append),
            other.drawn("s2:sample:0", 7, heard["nothing"].append),
            store.drawn("s1:sample:0", 8, lambda _: done["own"].set()),
            other.drawn("s1:sample:0", 8, lambda _: done["other"].set()),
        ):
            await store.tell_drawn(told[:2])
            await store.tell_drawn([*told[2:], last])
            async with asyncio.timeout(LONG_S):
                await asyncio.gather(*(each.wait() for each in done.values()))
        assert heard == {"own": told, "other": told, "nothing": []}

    async def test_nobody_has_to_listen(self, store: RequestStore) -> None:
        heard: list[DrawnTokens] = []
        with store.drawn("s1:sample:0", 7, heard.append):
            pass
        await store.tell_drawn([_piece(0, 5)])
        await store.tell_drawn([])
        assert heard == []
