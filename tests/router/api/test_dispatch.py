"""The dispatcher against replicas that die, fill up, hang, and break the protocol."""

import asyncio

import numpy as np
import pytest

from kvcore.namespace import Namespace
from router.dispatch import PreparedRequest
from router.errors import BadRequest, NoReplica, QueueFull, ReplicaLost, RequestTimeout, UpstreamError

SAMPLING = {"n": 1, "max_tokens": 8, "logprobs": None}


def prepared(length=40, **fields):
    return PreparedRequest("id", np.arange(length, dtype=np.int32), SAMPLING, **fields)


def first_then(*plays):
    """The k-th request sent gets the k-th play, the last one repeats."""
    rest = list(plays)
    return lambda replica_id, request: rest.pop(0) if len(rest) > 1 else rest[0]


async def test_a_request_on_the_wire(fleet):
    request = prepared(tenant="acme", salt="pepper")
    stream = await fleet.dispatcher.open(request)
    texts = [delta["text"] async for delta in stream]
    replica_id, wire = fleet.transport.sent[0]
    root = fleet.hasher.root(Namespace("digest", "layout", tenant="acme", salt="pepper"))
    assert texts == ["Hello", " there", "!"]
    assert wire == {
        "v": 1,
        "id": "id-1",
        "target": None,
        "tokens": np.arange(40, dtype="<i4").tobytes(),
        "hashes": fleet.hasher.block_hashes(request.tokens, 16, root).tobytes(),
        "namespace": {"tenant": "acme", "salt": "pepper", "adapter": None},
        "sampling": SAMPLING,
        "cache": {"read": True, "publish": True},
    }
    assert len(wire["hashes"]) == 2 * 8
    assert (stream.replica_id, stream.prompt_tokens, stream.completion_tokens) == (replica_id, 40, 3)
    assert (stream.predicted_tokens, stream.cached_tokens, stream.attempts) == (0, 0, 1)
    await fleet.settled()


async def test_secrets_are_not_in_the_repr():
    assert "pepper" not in repr(prepared(salt="pepper"))


async def test_reserved_while_running_and_returned_at_the_end(fleet):
    stream = await fleet.dispatcher.open(prepared())
    stats = fleet.placement.stats()[stream.replica_id]
    assert (stats["running_requests"], stats["running_tokens"]) == (1, 40)
    assert [d["text"] async for d in stream] == ["Hello", " there", "!"]
    assert set(fleet.placement.stats()[stream.replica_id].values()) == {0}
    stream.close()
    await fleet.settled()


@pytest.mark.parametrize(
    "fault", [{"dies": True}, {"ends_early": True}, {"error": ("unavailable", "stopping")}]
)
async def test_a_replica_lost_before_the_start_is_replaced_unseen(fleet, make_play, fault):
    fleet.transport.play = first_then(make_play(**fault), make_play())
    stream = await fleet.dispatcher.open(prepared())
    assert [d["text"] async for d in stream] == ["Hello", " there", "!"]
    targets = [target for target, _ in fleet.transport.sent]
    assert (len(set(targets)), stream.replica_id, stream.attempts) == (2, targets[1], 2)
    assert [wire["id"] for _, wire in fleet.transport.sent] == ["id-1", "id-2"]
    assert fleet.metric("warmroute_retries_total", reason="lost") == 1
    await fleet.settled()


async def test_attempts_are_bounded(make_fleet, make_play):
    fleet = make_fleet(replicas=8)
    fleet.transport.play = first_then(make_play(dies=True))
    with pytest.raises(ReplicaLost, match="3 replicas were lost"):
        await fleet.dispatcher.open(prepared())
    assert len({target for target, _ in fleet.transport.sent}) == 3
    await fleet.settled()


async def test_no_replica_is_left(fleet, make_play):
    fleet.transport.play = first_then(make_play(dies=True))
    with pytest.raises(ReplicaLost, match="no replica is left after 2 lost"):
        await fleet.dispatcher.open(prepared())
    await fleet.settled()


async def test_no_replica_is_known(make_fleet):
    fleet = make_fleet(replicas=0)
    with pytest.raises(NoReplica):
        await fleet.dispatcher.open(prepared())


async def test_nothing_is_sent_before_the_model_is_known(fleet):
    fleet.info = None
    with pytest.raises(NoReplica):
        await fleet.dispatcher.open(prepared())
    assert fleet.transport.sent == []


async def test_a_full_replica_is_left_for_another(fleet, make_play):
    fleet.transport.play = first_then(make_play(error=("queue_full", "")), make_play())
    stream = await fleet.dispatcher.open(prepared())
    await stream.aclose()
    assert stream.attempts == 2
    assert fleet.metric("warmroute_retries_total", reason="full") == 1
    await fleet.settled()


async def test_all_replicas_are_full(make_fleet, make_play):
    fleet = make_fleet(replicas=5)
    fleet.transport.play = first_then(make_play(error=("queue_full", "")))
    with pytest.raises(QueueFull):
        await fleet.dispatcher.open(prepared())
    assert len(fleet.transport.sent) == 5
    await fleet.settled()


async def test_one_is_lost_and_the_other_full(fleet, make_play):
    fleet.transport.play = first_then(make_play(dies=True), make_play(error=("queue_full", "")))
    with pytest.raises(QueueFull):
        await fleet.dispatcher.open(prepared())
    await fleet.settled()


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        ({"error": ("invalid", "n is odd")}, BadRequest),
        ({"error": ("internal", "boom")}, UpstreamError),
        ({"error": ("new_code", "boom")}, UpstreamError),
        ({"raises": UpstreamError("boom")}, UpstreamError),
        ({"raises": KeyError("bug")}, KeyError),
    ],
)
async def test_other_errors_are_not_tried_again(fleet, make_play, play, expected):
    fleet.transport.play = first_then(make_play(**play))
    with pytest.raises(expected):
        await fleet.dispatcher.open(prepared())
    assert len(fleet.transport.sent) == 1
    await fleet.settled()


@pytest.mark.parametrize(
    ("play", "expected"),
    [
        ({"dies": True}, ReplicaLost),
        ({"ends_early": True}, ReplicaLost),
        ({"error": ("unavailable", "")}, ReplicaLost),
        ({"error": ("internal", "")}, UpstreamError),
        ({"raises": KeyError("bug")}, KeyError),
    ],
)
async def test_faults_after_the_start_end_the_stream(fleet, make_play, play, expected):
    fleet.transport.play = first_then(make_play(at=1, **play))
    stream = await fleet.dispatcher.open(prepared())
    seen = []
    with pytest.raises(expected):
        async for delta in stream:
            seen.append(delta["text"])
    assert (seen, len(fleet.transport.sent)) == (["Hello"], 1)
    await fleet.settled()


async def test_a_whole_answer_starts_over_when_its_replica_dies(fleet, make_play):
    fleet.transport.play = first_then(make_play(at=2, dies=True), make_play())
    result = await fleet.dispatcher.run(prepared())
    assert [d["text"] for d in result.deltas] == ["Hello", " there", "!"]
    assert result.stream.attempts == 2
    await fleet.settled()


async def test_a_whole_answer_starts_over_a_bounded_number_of_times(make_fleet, make_play):
    fleet = make_fleet(replicas=8)
    fleet.transport.play = first_then(
        make_play(at=1, dies=True), make_play(dies=True), make_play(at=2, dies=True)
    )
    with pytest.raises(ReplicaLost, match="3 replicas were lost"):
        await fleet.dispatcher.run(prepared())
    assert len(fleet.transport.sent) == 3
    await fleet.settled()


async def test_the_replica_that_answers_counts_not_the_target(fleet, make_play):
    other = {"r0": "r1", "r1": "r0"}
    fleet.transport.play = lambda target, request: make_play(name=other[target], at=1, dies=True)
    stream = await fleet.dispatcher.open(prepared())
    target = fleet.transport.sent[0][0]
    assert stream.replica_id == other[target]
    assert fleet.placement.stats()[target]["running_requests"] == 0
    assert fleet.placement.stats()[other[target]]["running_requests"] == 1
    await stream.aclose()
    await fleet.settled()


async def test_the_first_token_takes_too_long(make_fleet, make_play):
    fleet = make_fleet(limits={"start_timeout_s": 0.02})
    fleet.transport.play = first_then(make_play(hangs=True))
    with pytest.raises(RequestTimeout, match=r"the first token took longer than 0\.02 s"):
        await fleet.dispatcher.open(prepared())
    assert len(fleet.transport.sent) == 1
    assert fleet.metric("warmroute_aborts_total") == 1
    await fleet.settled()


@pytest.mark.parametrize("at", [None, 0, 2])
async def test_the_request_takes_too_long(make_fleet, make_play, at):
    fleet = make_fleet(limits={"request_timeout_s": 0.02})
    fleet.transport.play = first_then(make_play(hangs=True, at=at))
    with pytest.raises(RequestTimeout, match=r"the request took longer than 0\.02 s"):
        await fleet.dispatcher.run(prepared())
    await fleet.settled()


@pytest.mark.parametrize("at", [None, 1])
async def test_cancelling_the_caller_aborts(fleet, make_play, at):
    fleet.transport.play = first_then(make_play(hangs=True, at=at))
    task = asyncio.create_task(fleet.dispatcher.run(prepared()))
    await fleet.transport.hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert fleet.metric("warmroute_aborts_total") == 1
    await fleet.settled()


async def test_closing_while_somebody_reads(fleet, make_play):
    fleet.transport.play = first_then(make_play(hangs=True, at=0))
    stream = await fleet.dispatcher.open(prepared())
    reader = asyncio.create_task(anext(stream))
    await fleet.transport.hanging.wait()
    stream.close()
    assert set(fleet.placement.stats()[stream.replica_id].values()) == {0}
    with pytest.raises(asyncio.CancelledError):
        await reader
    await fleet.settled()


async def test_closing_before_reading_aborts_once(fleet):
    stream = await fleet.dispatcher.open(prepared())
    await stream.aclose()
    await stream.aclose()
    assert fleet.transport.active == 0
    assert [d async for d in stream] == []
    assert fleet.metric("warmroute_aborts_total") == 1
    await fleet.settled()


@pytest.mark.parametrize(
    "chunks",
    [
        [{"type": "delta", "index": 0, "text": "x"}],
        [{"type": "end"}],
        [{"type": "start"}],
        [{"type": "start", "replica": "r0", "prompt_tokens": "many", "cached_tokens": 0}],
        [{"type": "start", "replica": "r0", "prompt_tokens": 1, "cached_tokens": -1}],
        [{"type": "surprise"}],
        [{}],
        ["start"],
    ],
)
async def test_a_replica_that_breaks_the_protocol(fleet, chunks):
    async def generate(replica_id, request):
        for chunk in chunks:
            yield chunk

    fleet.transport.generate = generate
    with pytest.raises(UpstreamError, match="sent"):
        await fleet.dispatcher.open(prepared())
    await fleet.settled()


async def test_a_transport_that_fails_to_close(fleet, caplog):
    async def generate(replica_id, request):
        try:
            yield {"type": "start", "replica": replica_id, "prompt_tokens": 1, "cached_tokens": 0}
            yield {}
        finally:
            raise RuntimeError("cannot close")

    fleet.transport.generate = generate
    stream = await fleet.dispatcher.open(prepared())
    await stream.aclose()
    assert "closing a transport failed" in caplog.text
    assert fleet.metric("warmroute_close_failures_total") == 1
    await fleet.settled()


async def test_a_transport_that_does_not_close_in_time(make_fleet, caplog):
    async def generate(replica_id, request):
        try:
            yield {"type": "start", "replica": replica_id, "prompt_tokens": 1, "cached_tokens": 0}
            yield {}
        finally:
            await asyncio.Event().wait()

    fleet = make_fleet(limits={"close_timeout_s": 0.01})
    fleet.transport.generate = generate
    stream = await fleet.dispatcher.open(prepared())
    stream.close()
    await stream._closing
    assert "did not close within 0.01 s" in caplog.text
    assert fleet.metric("warmroute_close_failures_total") == 1
    await fleet.settled()


async def test_a_transport_that_raises_at_once(fleet):
    def generate(replica_id, request):
        raise ReplicaLost(replica_id)

    fleet.transport.generate = generate
    with pytest.raises(ReplicaLost):
        await fleet.dispatcher.open(prepared())
    await fleet.settled()


async def test_every_replica_is_at_its_limit(make_fleet, make_play):
    fleet = make_fleet(max_inflight=1)
    fleet.transport.play = first_then(make_play(hangs=True, at=0))
    streams = [await fleet.dispatcher.open(prepared()) for _ in range(2)]
    with pytest.raises(QueueFull):
        await fleet.dispatcher.open(prepared())
    for stream in streams:
        await stream.aclose()
    await fleet.settled()


async def test_a_request_without_cache_has_no_affinity(fleet):
    seen = []
    place = fleet.placement.place

    def spy(hashes, num_tokens, **options):
        seen.append((len(hashes), num_tokens, options["publish"]))
        return place(hashes, num_tokens, **options)

    fleet.placement.place = spy
    await fleet.dispatcher.run(prepared(use_cache=False))
    await fleet.dispatcher.run(prepared())
    assert seen == [(0, 40, False), (2, 40, True)]
    assert fleet.transport.sent[0][1]["cache"] == {"read": False, "publish": False}
    await fleet.settled()
