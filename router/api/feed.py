"""One client request, one or more prompts: their answers, merged as they come or collected."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

from router.dispatch import Dispatcher, PreparedRequest, Result
from router.stream import Chunk, Stream

_QUEUE = 64
"""Deltas that may wait for a slow client before the replicas' streams are read no further."""

_Item = tuple[int, Chunk | None] | BaseException | None


class Feed:
    """The deltas of a request's prompts, at most `window` of them in flight. Close it, whatever happens."""

    def __init__(self, dispatcher: Dispatcher, requests: Sequence[PreparedRequest], window: int) -> None:
        self.streams: list[Stream] = []
        self._dispatcher = dispatcher
        self._requests = requests
        self._window = window
        self._workers: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[_Item] = asyncio.Queue(_QUEUE)

    async def open(self) -> Stream:
        """Wait for the first token of any prompt. Raises as `Dispatcher.open`."""
        if len(self._requests) == 1:
            self.streams.append(await self._dispatcher.open(self._requests[0]))
            return self.streams[0]
        todo = iter(enumerate(self._requests))
        loop = asyncio.get_running_loop()
        count = min(self._window, len(self._requests))
        self._workers = [loop.create_task(self._work(todo)) for _ in range(count)]
        first = await self._queue.get()
        if isinstance(first, BaseException):
            raise first
        return self.streams[0]

    async def deltas(self) -> AsyncIterator[tuple[int, Chunk]]:
        """(prompt's number, delta) pairs until all are done. Raises as `Stream`, at the first that fails."""
        if not self._workers:
            async for delta in self.streams[0]:
                yield 0, delta
            return
        running = len(self._workers)
        while running:
            item = await self._queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            elif item[1] is not None:
                yield item[0], item[1]

    def close(self) -> None:
        """Abort what still runs and give everything back. Idempotent, never waits."""
        for worker in self._workers:
            worker.cancel()
        for stream in self.streams:
            stream.close()

    async def _work(self, todo: Iterator[tuple[int, PreparedRequest]]) -> None:
        try:
            for number, request in todo:
                stream = await self._dispatcher.open(request)
                self.streams.append(stream)
                await self._queue.put((number, None))
                async for delta in stream:
                    await self._queue.put((number, delta))
            await self._queue.put(None)
        except Exception as error:  # handed to whoever reads the feed
            await self._queue.put(error)


async def collect(dispatcher: Dispatcher, requests: Sequence[PreparedRequest], window: int) -> list[Result]:
    """Whole answers, in the order of `requests`, at most `window` in flight. Raises as `Dispatcher.run`."""
    if len(requests) == 1:
        return [await dispatcher.run(requests[0])]
    results: dict[int, Result] = {}
    todo = iter(enumerate(requests))

    async def work() -> None:
        for number, request in todo:
            results[number] = await dispatcher.run(request)

    loop = asyncio.get_running_loop()
    workers = [loop.create_task(work()) for _ in range(min(window, len(requests)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.wait(workers)
    return [results[number] for number in range(len(requests))]
