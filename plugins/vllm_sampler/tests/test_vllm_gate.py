"""Who may draw on a replica: many together, or a suspect alone."""

import asyncio

from tinsmith_vllm.gate import Gate


class Visitors:
    def __init__(self) -> None:
        self.gate = Gate()
        self.inside: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.leaves: dict[str, asyncio.Event] = {}

    async def come(self, name: str, *, alone: bool = False) -> None:
        self.leaves[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name, alone=alone))
        await self.settle()

    async def leave(self, name: str) -> None:
        self.leaves[name].set()
        await self.settle()

    async def cancel(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    async def _visit(self, name: str, *, alone: bool) -> None:
        async with self.gate.entered(alone=alone):
            self.inside.append(name)
            try:
                await self.leaves[name].wait()
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
    visitors.tasks["next"].cancel()
    visitors.leaves["suspect"].set()
    await visitors.settle()
    assert visitors.inside == ["shared"]
    await visitors.come("last", alone=True)
    visitors.leaves["shared"].set()
    await asyncio.sleep(0)  # it leaves in this turn of the loop, and lets the last one in
    visitors.tasks["last"].cancel()
    await visitors.settle()
    await visitors.come("after", alone=True)
    assert visitors.inside == ["after"]
