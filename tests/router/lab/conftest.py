"""A small OpenAI-compatible server on a real socket, with faults on demand."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, StreamingResponse

from router.lab.ideal import InfiniteCache

OPENING = "<system>"  # what the "chat template" puts before everything


def tokenize(body: dict) -> list[int]:
    """One token a byte; token prompts as they are."""
    if isinstance(body.get("prompt"), list):
        return body["prompt"]
    if "prompt" in body:
        text = body["prompt"]
    else:
        text = OPENING + "".join(f"<{m['role']}>{m['content']}" for m in body["messages"])
    return list(text.encode())


@dataclass
class Endpoint:
    """What the server does, and what it saw. `fault` says, by body and arrival number, how to misbehave."""

    url: str = ""
    fault: Callable[[dict, int], str] = lambda body, number: ""
    tokenizes: bool = True
    tokens_answer: object = None
    models_status: int = 200
    models: object = field(default_factory=lambda: {"data": [{"id": "tiny", "max_model_len": 1000}]})
    api_key: str | None = None
    usage: bool = True
    report_cached: bool = True
    bodies: list = field(default_factory=list)
    paths: list = field(default_factory=list)
    tokenized: list = field(default_factory=list)
    in_flight: set = field(default_factory=set)
    most_in_flight: int = 0
    hanging: threading.Event = field(default_factory=threading.Event)
    cache: InfiniteCache = field(default_factory=InfiniteCache)

    def reset(self) -> None:
        self.__dict__.update(Endpoint(self.url).__dict__)


def build_app(state: Endpoint) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models(request: Request):
        wanted = f"Bearer {state.api_key}" if state.api_key else None
        if wanted and request.headers.get("authorization", "").encode("latin-1").decode() != wanted:
            return JSONResponse({"error": {"message": "bad key"}}, 401)
        return JSONResponse(state.models, state.models_status)

    @app.post("/tokenize")
    async def tokens(body: dict):
        if not state.tokenizes:
            return JSONResponse({"detail": "Not Found"}, 404)
        state.tokenized.append(body)
        return state.tokens_answer or {"tokens": tokenize(body)}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request):
        body = await request.json()
        number = len(state.bodies)
        state.bodies.append(body)
        state.paths.append(request.url.path)
        fault = state.fault(body, number)
        if fault.isdigit():
            return JSONResponse({"error": {"message": f"answered {fault}"}}, int(fault))
        headers = {
            "x-warmroute-replica": f"replica-{number % 2}",
            "x-warmroute-reason": ("age", "prefix")[number % 2],
        }
        return StreamingResponse(stream(body, number, fault), headers=headers, media_type="text/event-stream")

    async def stream(body: dict, number: int, fault: str):
        state.in_flight.add(number)
        state.most_in_flight = max(state.most_in_flight, len(state.in_flight))
        try:
            async for event in answer(body, fault):
                if event == "[DONE]":  # before the client can know, and send the next one
                    state.in_flight.discard(number)
                yield f"data: {event}\n\n"
        finally:
            state.in_flight.discard(number)

    async def answer(body: dict, fault: str):
        chat = "messages" in body
        tokens = tokenize(body)
        cached = state.cache.add(np.array(tokens, np.int32))
        if chat:
            yield json.dumps({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
        if fault == "hang":
            state.hanging.set()
            await asyncio.Event().wait()
        for word in range(body["max_tokens"]):
            piece = f"word\u2028{word} "  # a raw line separator: JSON allows it, line readers cut there
            choice = {"index": 0, "delta": {"content": piece}} if chat else {"index": 0, "text": piece}
            yield json.dumps({"choices": [choice]}, ensure_ascii=False)
            await asyncio.sleep(0)
            if fault == "break":  # the stream just ends, as when a proxy drops it
                return
            if fault == "error_event":
                yield json.dumps({"error": {"message": "the replica died", "code": 503}})
                return
            if fault == "garbage":
                yield "{not json"
                return
        end = {"index": 0, "delta": {}, "text": "", "finish_reason": "length"}
        yield json.dumps({"choices": [end]})
        if state.usage:
            usage = {"prompt_tokens": len(tokens), "completion_tokens": body["max_tokens"]}
            if state.report_cached:
                usage["prompt_tokens_details"] = {"cached_tokens": cached}
            yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"

    return app


@pytest.fixture(scope="session")
def served_endpoint():
    state = Endpoint()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        state.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(build_app(state), log_level="error"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        yield state
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture
def endpoint(served_endpoint):
    served_endpoint.reset()
    return served_endpoint
