from __future__ import annotations

import asyncio

from rollout_testing import run

from ppo_lib.rollout.placing import Placer


def test_samples_go_where_least_is_unfinished_and_siblings_stay_together():
    async def scene() -> list[int]:
        placer = Placer(3, in_flight=100)
        done = asyncio.Event()
        places: dict[str, int] = {}

        async def sample(name: str, conversation: str) -> None:
            async with placer.place(conversation) as replica:
                places[name] = replica
                await done.wait()

        samples = [("a0", "a"), ("a1", "a"), ("b0", "b"), ("c0", "c"), ("d0", "d"), ("a2", "a"), ("e0", "e")]
        tasks = [asyncio.create_task(sample(*one)) for one in samples]
        await asyncio.sleep(0)
        assert placer.unfinished == [3, 2, 2]
        done.set()
        await asyncio.gather(*tasks)
        assert placer.unfinished == [0, 0, 0]
        return [places[name] for name, _ in samples]

    assert run(scene()) == [0, 0, 1, 2, 1, 0, 2]


def test_no_more_than_so_many_are_in_flight_on_one_replica_and_the_rest_come_in_order():
    async def scene() -> None:
        placer = Placer(1, in_flight=2)
        running: list[int] = []
        order: list[int] = []

        async def sample(index: int) -> None:
            async with placer.place(index):
                order.append(index)
                running.append(index)
                assert len(running) <= 2
                await asyncio.sleep(0)
                running.remove(index)

        await asyncio.gather(*(sample(index) for index in range(9)))
        assert order == list(range(9))

    run(scene())
