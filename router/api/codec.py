"""Tokenizing for the API: the codec's contract, and a pool that keeps long texts off the event loop."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from router.api.errors import invalid
from router.errors import QueueFull

T = TypeVar("T")
TokenIds = npt.NDArray[np.int32]


class Codec(Protocol):
    """Text to token ids and back. Thread-safe. A `ValueError` means that the input cannot be encoded."""

    vocab_size: int
    context_length: int

    def encode_text(self, text: str, add_bos: bool | None = None) -> TokenIds:
        """int32[n]; add_bos None: as the model says."""
        ...

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        template_kwargs: dict[str, Any] | None = None,
    ) -> TokenIds:
        """int32[n] of the conversation, rendered by the model's chat template."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What one id stands for."""
        ...

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids."""
        ...


class CodecPool:
    """Runs codec calls: short ones at once, long ones in a few threads (the tokenizer releases the GIL).

    A thread hop costs about 100 us, as much as encoding a few hundred characters. At most `max_pending` long
    calls wait; more raise `QueueFull`, so that memory stays bounded.
    """

    def __init__(self, codec: Codec, threads: int, inline_chars: int, max_pending: int) -> None:
        self.codec = codec
        self._inline_chars = inline_chars
        self._max_pending = max_pending
        self._pending = 0
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._longest = max((len(codec.token_bytes(k)) for k in range(codec.vocab_size)), default=1)

    def least_tokens(self, size: int) -> int:
        """How many tokens a text of `size` characters has at least, as no token stands for more of them."""
        return size // max(1, self._longest)

    async def run(self, call: Callable[[], T], size: int, param: str) -> T:
        """`call`'s result; `size` in characters decides where it runs.

        Raises:
            ApiError: 400 on `param` when the codec refuses the input.
            QueueFull: too many long calls are waiting.
        """
        try:
            if size <= self._inline_chars:
                return call()
            return await self._offload(call)
        except ValueError as error:
            raise invalid(str(error), param) from error

    async def _offload(self, call: Callable[[], T]) -> T:
        if self._pending >= self._max_pending:
            raise QueueFull(1.0)
        future = self._threads.submit(call)
        self._pending += 1
        # Counted until the thread is done, even when the request that waits for it has been cancelled.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_in(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._pending -= 1


def _call_in(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(call)
