"""Replicas that fall silent while requests are there: nobody waits for them any longer."""

import asyncio
import json

import numpy as np
import pytest

from router.dispatch import PreparedRequest
from router.errors import ReplicaLost

CHAT = "/v1/chat/completions"


def prepared():
    return PreparedRequest("id", np.arange(40, dtype=np.int32), {"n": 1, "max_tokens": 8, "logprobs": None})


async def lose(fleet, replica_id):
    """The replica no longer answers polls; the rest of the fleet must then come to exact zeros."""
    await fleet.transport.hanging.wait()
    fleet.dispatcher.lose(replica_id)
    fleet.names.remove(replica_id)


def only_first_hangs(make_play, at):
    plays = [make_play(hangs=True, at=at)]
    return lambda replica_id, request: plays.pop() if plays else make_play()


async def test_a_request_without_a_token_goes_elsewhere(fleet, make_play):
    fleet.transport.play = only_first_hangs(make_play, None)
    opening = asyncio.create_task(fleet.dispatcher.open(prepared()))
    await fleet.transport.hanging.wait()
    lost = fleet.transport.sent[0][0]
    await lose(fleet, lost)
    stream = await opening
    assert [d["text"] async for d in stream] == ["Hello", " there", "!"]
    assert (stream.attempts, {lost, stream.replica_id}) == (2, {"r0", "r1"})
    assert fleet.metric("warmroute_retries_total", reason="lost") == 1
    assert fleet.metric("warmroute_aborts_total") == 0
    await fleet.settled()


async def test_a_whole_answer_starts_over(fleet, make_play):
    fleet.transport.play = only_first_hangs(make_play, 1)
    running = asyncio.create_task(fleet.dispatcher.run(prepared()))
    await fleet.transport.hanging.wait()
    await lose(fleet, fleet.transport.sent[0][0])
    result = await running
    assert [delta["text"] for delta in result.deltas] == ["Hello", " there", "!"]
    await fleet.settled()


async def test_a_stream_that_has_begun_ends_with_an_error_event(fleet, make_play, chat_body):
    fleet.transport.play = only_first_hangs(make_play, 1)
    async with fleet.client() as client:
        asking = asyncio.create_task(client.post(CHAT, json={**chat_body, "stream": True}))
        await fleet.transport.hanging.wait()
        await lose(fleet, fleet.transport.sent[0][0])
        answer = await asking
    last = json.loads(answer.text.split("\n\n")[-2].removeprefix("data: "))
    assert (last["error"]["code"], "[DONE]" in answer.text) == ("replica_lost", False)
    assert fleet.metric("warmroute_requests_total", endpoint=CHAT, status="503") == 1
    await fleet.settled()


async def test_a_stream_that_nobody_reads_just_now_fails_at_the_next_read(fleet, make_play):
    stream = await fleet.dispatcher.open(prepared())
    fleet.dispatcher.lose(stream.replica_id)
    fleet.names.remove(stream.replica_id)
    await fleet.settled()  # given back before anybody reads on
    for _ in range(2):
        with pytest.raises(ReplicaLost, match="no longer answers"):
            await anext(stream)


async def test_other_replicas_streams_go_on(fleet):
    streams = [await fleet.dispatcher.open(prepared()) for _ in range(2)]
    assert {s.replica_id for s in streams} == {"r0", "r1"}
    fleet.dispatcher.lose(streams[0].replica_id)
    fleet.names.remove(streams[0].replica_id)
    assert [d["text"] async for d in streams[1]] == ["Hello", " there", "!"]
    streams[0].close()
    await fleet.settled()


async def test_who_answers_counts_not_who_was_chosen(fleet, make_play):
    fleet.transport.play = lambda replica_id, request: make_play(name="r1" if replica_id == "r0" else "r0")
    stream = await fleet.dispatcher.open(prepared())
    chosen = fleet.transport.sent[0][0]
    assert stream.replica_id != chosen
    fleet.dispatcher.lose(chosen)
    fleet.names.remove(chosen)
    assert [d["text"] async for d in stream] == ["Hello", " there", "!"]
    await fleet.settled()


async def test_a_replica_that_leaves_in_good_order_finishes_its_streams(fleet):
    stream = await fleet.dispatcher.open(prepared())
    fleet.placement.leave(stream.replica_id)
    fleet.names.remove(stream.replica_id)
    assert [d["text"] async for d in stream] == ["Hello", " there", "!"]
    await fleet.settled()


async def test_no_stream_is_kept_after_its_end(fleet, make_play):
    streams = [await fleet.dispatcher.open(prepared()) for _ in range(3)]
    assert fleet.dispatcher._channel.open == set(streams)
    [d async for d in streams[0]]
    streams[1].close()
    fleet.dispatcher.lose(streams[2].replica_id)
    assert fleet.dispatcher._channel.open == set()
