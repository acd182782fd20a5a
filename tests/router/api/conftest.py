"""A fleet whose replicas follow a script, behind the real placement, hasher, tokenizer and API."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import numpy as np
import pytest

from kvcore.hashing import PrefixHasher
from replica.models import load_tokenizer
from router.administration import Administration
from router.api.config import ApiConfig
from router.api.server import build_api
from router.dispatch import Dispatcher, DispatchLimits, ModelInfo
from router.errors import ReplicaLost
from router.placement import Placement

MODEL = "tiny"


@dataclass(frozen=True)
class Play:
    """How a replica treats one request."""

    text: tuple[str, ...] = ("Hello", " there", "!")
    cached: int = 0
    error: tuple[str, str] | None = None
    """An error chunk (code, message), `at` this many deltas."""
    dies: bool = False
    ends_early: bool = False
    hangs: bool = False
    raises: Exception | None = None
    at: int | None = None
    """None: before the start chunk."""
    name: str | None = None
    """Who the start chunk says it is, if not the target."""


@dataclass
class ScriptedTransport:
    """Replicas by script; counts what it carries."""

    play: Callable[[str, dict[str, Any]], Play] = lambda replica_id, request: Play()
    sent: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    orders: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)
    """Calls of the administration: method, replica, request."""
    answers: dict[str, Any] = field(default_factory=dict)
    """What replicas answer to those: a dict, an exception, or None for never."""
    active: int = 0
    hanging: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, replica_id: str, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        play = self.play(replica_id, request)
        self.sent.append((replica_id, request))
        self.active += 1
        try:
            async for chunk in self._chunks(replica_id, request, play):
                yield chunk
        finally:
            self.active -= 1

    async def clear_cache(self, replica_id: str, request: dict[str, Any], timeout_s: float) -> Any:
        return await self._order("clear_cache", replica_id, request, timeout_s)

    async def explain(self, replica_id: str, request: dict[str, Any], timeout_s: float) -> Any:
        return await self._order("explain", replica_id, request, timeout_s)

    async def _order(self, method: str, replica_id: str, request: dict[str, Any], timeout_s: float) -> Any:
        self.orders.append((method, replica_id, request))
        answer = self.answers[replica_id]
        if isinstance(answer, Exception):
            raise answer
        if answer is None:  # as `ServeTransport` after its time limit
            self.hanging.set()
            await asyncio.sleep(timeout_s)
            raise ReplicaLost(replica_id, "no answer in time")
        return answer

    async def _chunks(self, replica_id, request, play):
        prompt = len(request["tokens"]) // 4
        if play.at is None and await self._fault(replica_id, play):
            yield {"type": "error", "code": play.error[0], "message": play.error[1]}
            return
        if play.at is None and play.ends_early:
            return
        start = {"prompt_tokens": prompt, "cached_tokens": play.cached, "epoch": 1, "seq": 1}
        yield {"type": "start", "replica": play.name or replica_id, **start}
        count = 0
        logprobs = request["sampling"]["logprobs"]
        n = request["sampling"]["n"]
        for position, text in enumerate(play.text):
            if play.at == count:
                if await self._fault(replica_id, play):
                    yield {"type": "error", "code": play.error[0], "message": play.error[1]}
                    return
                if play.ends_early:
                    return
            last = position == len(play.text) - 1
            for index in range(n):
                yield {
                    "type": "delta",
                    "index": index,
                    "text": text,
                    "tokens": [position + 3],
                    "logprobs": None if logprobs is None else [entry(text, position, logprobs)],
                    "finish_reason": "stop" if last else None,
                }
            count += 1
            await asyncio.sleep(0)
        usage = {"prompt_tokens": prompt, "completion_tokens": count * n, "cached_tokens": play.cached}
        yield {"type": "end", **usage}

    async def _fault(self, replica_id: str, play: Play) -> bool:
        if play.dies:
            raise ReplicaLost(replica_id, "killed")
        if play.raises is not None:
            raise play.raises
        if play.hangs:
            self.hanging.set()
            await asyncio.Event().wait()
        return play.error is not None


def entry(text: str, position: int, top: int) -> dict[str, Any]:
    tops = [token(text if k == 0 else f"alt{k}", -0.5 - k) for k in range(top)]
    return {**token(text, -0.5), "id": position + 3, "top": tops}


def token(text: str, logprob: float) -> dict[str, Any]:
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob, "id": 3}


class Fleet:
    """Everything from HTTP down to the transport."""

    def __init__(
        self, replicas=2, limits=None, max_inflight: int = 256, context: int = 4096, **config: Any
    ) -> None:
        self.transport = ScriptedTransport()
        self.placement = Placement(
            "least_load", block_size=16, rng=random.Random(0), max_inflight_per_replica=max_inflight
        )
        self.names = [f"r{k}" for k in range(replicas)]
        for name in self.names:
            self.placement.join(name)
        self.info: ModelInfo | None = ModelInfo("digest", "layout", 16, context)
        limits = replace(DispatchLimits(), **(limits or {}))
        self.hasher = PrefixHasher(b"secret")
        self.dispatcher = Dispatcher(self.placement, self.hasher, self.transport, lambda: self.info, limits)
        self.codec = load_tokenizer("random:tiny")
        self.config = ApiConfig(model_names=(MODEL, "alias/of-tiny"), **config)
        self.administration = Administration(self.transport, lambda: self.names, timeout_s=0.01)
        self.app = build_api(self.config, self.codec, self.dispatcher, self.administration)

    def client(self, host: str = "127.0.0.1", **options: Any) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(app=self.app, client=(host, 4000))
        return httpx.AsyncClient(transport=transport, base_url="http://test", **options)

    async def settled(self) -> None:
        """Wait until nothing runs any more, then check that nothing is reserved."""
        for _ in range(1000):
            if not self.transport.active:
                break
            await asyncio.sleep(0.001)
        assert self.transport.active == 0
        figures = {name: set(stats.values()) for name, stats in self.placement.stats().items()}
        assert figures == {name: {0} for name in self.names}

    def metric(self, name: str, **labels: str) -> float:
        text = self.app_metrics()
        wanted = name + ("{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "}" if labels else "")
        found = [line.rsplit(" ", 1)[1] for line in text.splitlines() if line.rsplit(" ", 1)[0] == wanted]
        return float(found[0]) if found else 0.0

    def app_metrics(self) -> str:
        return self.dispatcher._channel.observer.render().decode()


class Call:
    """One HTTP exchange driven by hand, so that a test decides when the client leaves."""

    def __init__(self, app: Any, path: str, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.sent: list[dict[str, Any]] = []
        self.progress = asyncio.Condition()
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        lines = [(k.encode(), v.encode()) for k, v in (headers or {}).items()]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": lines,
            "client": ("127.0.0.1", 4000),
            "server": ("test", 80),
            "state": {},
        }
        self.blocked = False
        self.task = asyncio.create_task(app(scope, self._incoming.get, self._send))

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.append(message)
        async with self.progress:
            self.progress.notify_all()
        if self.blocked:
            await asyncio.Event().wait()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self.progress:
            await asyncio.wait_for(self.progress.wait_for(condition), 5)

    def leave(self) -> None:
        self._incoming.put_nowait({"type": "http.disconnect"})

    @property
    def body(self) -> bytes:
        return b"".join(m.get("body", b"") for m in self.sent if m["type"] == "http.response.body")


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def make_fleet() -> type[Fleet]:
    return Fleet


@pytest.fixture
def make_play() -> type[Play]:
    return Play


@pytest.fixture
def make_call() -> type[Call]:
    return Call


@pytest.fixture
def chat_body() -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Say hello."}]}


@pytest.fixture
def tokens_of() -> Callable[[bytes], list[int]]:
    return lambda data: np.frombuffer(data, dtype="<i4").tolist()


@pytest.fixture
def refused(fleet, chat_body):
    """Sends fields that must be refused, in a chat or a text completion, and returns the answer's text."""

    async def send(path, fields, param, code, message):
        body = chat_body if "chat" in path else {"model": "tiny", "prompt": "hi"}
        async with fleet.client() as client:
            response = await client.post(path, json={**body, **fields})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, param, code), error
        assert message in (None, error["message"])
        return response.text

    return send
