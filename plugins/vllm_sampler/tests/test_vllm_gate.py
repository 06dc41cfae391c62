"""Who may draw on a replica: many together, or a suspect alone."""

import asyncio

from tinsmith_vllm.gate import Gate


class Visitors:
    def __init__(self) -> None:
        self.gate = Gate()
        self.inside: list[str] = []
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._leave: dict[str, asyncio.Event] = {}

    async def come(self, name: str, *, alone: bool = False) -> None:
        self._leave[name] = asyncio.Event()
        self._tasks[name] = asyncio.create_task(self._visit(name, alone=alone))
        await self.settle()

    async def leave(self, name: str) -> None:
        self._leave[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self._tasks[name].cancel()
        await asyncio.wait([self._tasks[name]])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _visit(self, name: str, *, alone: bool) -> None:
        async with self.gate.entered(alone=alone):
            self.inside.append(name)
            try:
                await self._leave[name].wait()
            finally:
                self.inside.remove(name)


async def test_a_suspect_is_alone_and_goes_before_those_who_come_later() -> None:
    visitors = Visitors()
    await visitors.come("a")
    await visitors.come("b")
    assert visitors.inside == ["a", "b"]
    await visitors.come("suspect", alone=True)
    await visitors.come("second suspect", alone=True)
    await visitors.come("c")
    await visitors.leave("a")
    assert visitors.inside == ["b"]
    await visitors.leave("b")
    assert visitors.inside == ["suspect"]
    await visitors.leave("suspect")
    assert visitors.inside == ["second suspect"]
    await visitors.come("d")
    await visitors.leave("second suspect")
    assert visitors.inside == ["c", "d"]


async def test_who_gives_up_waiting_lets_the_others_in() -> None:
    visitors = Visitors()
    await visitors.come("a")
    await visitors.come("suspect", alone=True)
    await visitors.come("b")
    await visitors.cancel("suspect")
    assert visitors.inside == ["a", "b"]
    await visitors.come("suspect", alone=True)
    await visitors.come("c")
    await visitors.cancel("c")
    await visitors.cancel("a")
    await visitors.leave("b")
    assert visitors.inside == ["suspect"]


async def test_who_is_cancelled_as_it_is_let_in_leaves_no_trace() -> None:
    """Of both: one that was told to enter, and one whose turn comes between its cancelling and its leaving."""
    visitors = Visitors()
    await visitors.come("suspect", alone=True)
    await visitors.come("next", alone=True)
    await visitors.come("shared")
    visitors._tasks["next"].cancel()
    visitors._leave["suspect"].set()
    await visitors.settle()
    assert visitors.inside == ["shared"]
    await visitors.come("last", alone=True)
    visitors._leave["shared"].set()
    await asyncio.sleep(0)  # it leaves in this turn of the loop, and lets the last one in
    visitors._tasks["last"].cancel()
    await visitors.settle()
    await visitors.come("after", alone=True)
    assert visitors.inside == ["after"]
