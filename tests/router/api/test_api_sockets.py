"""Over a real socket: a client that hangs up is noticed, and a finished answer is not mistaken for that."""

import asyncio
import json
import time

import pytest
import uvicorn

CHAT = "/v1/chat/completions"


@pytest.fixture
async def served(fleet):
    """A fleet behind uvicorn, and the port it listens on."""
    server = uvicorn.Server(uvicorn.Config(fleet.app, port=0, log_level="error", lifespan="off"))
    task = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.005)
    yield fleet, server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    await task


async def send(port, body):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(body).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n"
    writer.write(head.encode() + content)
    return reader, writer


@pytest.mark.parametrize(("stream", "at"), [(False, None), (False, 1), (True, None), (True, 1)])
async def test_hanging_up_frees_everything_within_a_second(served, make_play, chat_body, stream, at):
    fleet, port = served
    fleet.transport.play = lambda *_: make_play(at=at, hangs=True)
    reader, writer = await send(port, {**chat_body, "stream": stream})
    if stream and at:
        await reader.readuntil(b"Hello")
    await fleet.transport.hanging.wait()
    left_at = time.monotonic()
    writer.close()
    await writer.wait_closed()
    while fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 0:
        await asyncio.sleep(0.005)
    await fleet.settled()
    assert time.monotonic() - left_at < 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_finished_answer_counts_as_one(served, chat_body, stream):
    fleet, port = served
    for _ in range(3):
        reader, writer = await send(port, {**chat_body, "stream": stream})
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        await reader.readuntil(b"[DONE]\n\n\r\n0\r\n\r\n" if stream else b"}}}")
        writer.close()
    while fleet.metric("warmroute_requests_total", endpoint=CHAT, status="200") < 3:
        await asyncio.sleep(0.005)
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="499") == 0
    await fleet.settled()


async def test_a_body_over_the_limit_in_chunks(served):
    fleet, port = served
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n".encode())
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(2 + fleet.config.max_body_bytes // 0x10000):
        writer.write(piece)
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10)
    writer.close()
    assert head.startswith(b"HTTP/1.1 413 ")
