import asyncio
import threading

from pydantic import RootModel

from tinsmith.server.limits.heavy_work import LargeAnswers


async def test_a_tenant_has_one_large_answer_built_at_a_time_off_the_event_loop() -> None:
    answers = LargeAnswers()
    reading: list[str] = []
    threads: list[int] = []
    others_read = asyncio.Event()

    async def read(tenant: str) -> str:
        reading.append(tenant)
        if tenant == "bob":
            others_read.set()
        await others_read.wait()  # ann's first waits for bob, who need not wait for her
        assert reading.count(tenant) == 1
        return tenant

    def to_answer(found: str) -> RootModel[str]:
        threads.append(threading.get_ident())
        reading.remove(found)
        return RootModel[str](found)

    async def ask(tenant: str) -> bytes:
        return bytes((await answers.build(tenant, lambda: read(tenant), to_answer)).body)

    assert await asyncio.gather(*map(ask, ("ann", "ann", "bob", "ann"))) == [b'"ann"', b'"ann"', b'"bob"', b'"ann"']
    assert threading.get_ident() not in threads
