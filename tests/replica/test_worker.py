"""The engine thread seen from asyncio: streams, cancelling, long polls, failures, the end."""

import asyncio
import contextlib
import threading

import pytest

from kvcore.fingerprint import FingerprintUpdate
from replica.errors import EngineDead
from replica.worker import EngineWorker

PROMPT = list(range(10, 40))


class Gate:
    """The real model behind a gate: each forward pass waits until it may go, or fails when told to."""

    def __init__(self, model):
        self._model, self.config = model, model.config
        self.open, self.entered = threading.Event(), threading.Event()
        self.open.set()
        self.failures = 0

    def copy_blocks(self, copies):
        self._model.copy_blocks(copies)

    def forward(self, batch, drawn=None):
        self.entered.set()
        assert self.open.wait(30)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("boom")
        return self._model.forward(batch, drawn)

    async def shut(self, *streams):
        """Close the gate, and wait until the engine stands before it with the streams' requests."""
        self.open.clear()
        self.entered.clear()
        tasks = [asyncio.ensure_future(anext_chunk(stream)) for stream in streams]
        await asyncio.sleep(0)  # the streams hand in their requests
        await asyncio.get_running_loop().run_in_executor(None, self.entered.wait, 30)
        return tasks


async def anext_chunk(stream):
    return await stream.__anext__()


@pytest.fixture
async def start(tiny_engine):
    """Starts a worker on a gated tiny engine: (worker, gate, engine)."""
    workers = []

    def build(**settings):
        engine = tiny_engine(poll_interval_s=0.001, replica_id="rep", **settings)
        gate = engine._runner._model = Gate(engine._runner._model)
        worker = EngineWorker(engine)
        worker.start()
        workers.append((worker, gate))
        return worker, gate, engine

    yield build
    for worker, gate in workers:
        gate.open.set()
        worker.stop()


async def collect(stream):
    return [chunk async for chunk in stream]


def joined(chunks, index=0):
    deltas = [c for c in chunks if c["type"] == "delta" and c["index"] == index]
    return (
        [t for d in deltas for t in d["tokens"]],
        "".join(d["text"] for d in deltas),
        deltas[-1]["finish_reason"],
    )


def idle(engine):
    engine.cache.check()
    stats = engine.cache.stats()
    return stats.held == 0 and stats.free + stats.cached == stats.num_blocks and not engine.has_work()


async def test_a_stream_has_start_deltas_and_end(start, tiny_engine, ask, run_all):
    worker, _, engine = start()
    chunks = await collect(worker.generate(ask("r", PROMPT)))
    expected = run_all(tiny_engine(), [ask("r", PROMPT)])["r"]
    assert chunks[0] == {
        "type": "start",
        "replica": "rep",
        "prompt_tokens": 30,
        "cached_tokens": 0,
        "epoch": engine.cache.epoch,
        "seq": 1,
    }
    assert joined(chunks) == (expected.tokens[0], expected.text[0], "length")
    assert chunks[-1] == {"type": "end", "prompt_tokens": 30, "completion_tokens": 8, "cached_tokens": 0}
    assert worker.health()


async def test_many_streams_at_once_get_their_own_answers(start, tiny_engine, ask, run_all):
    worker, _, engine = start()
    requests = [ask("same id", [*PROMPT[: i + 1], i], max_tokens=5 + i) for i in range(16)]
    chunks = await asyncio.gather(*(collect(worker.generate(request)) for request in requests))
    for request, own in zip(requests, chunks, strict=True):
        expected = run_all(tiny_engine(), [request])["same id"]
        assert joined(own) == (expected.tokens[0], expected.text[0], "length")
    worker.stop()
    assert idle(engine)


async def test_what_a_slow_consumer_missed_is_one_delta_a_choice(start, ask):
    worker, _, _ = start()
    slow = worker.generate(ask("slow", PROMPT, n=2, logprobs=1, max_tokens=6))
    first = await anext_chunk(slow)
    await collect(worker.generate(ask("longer", PROMPT, max_tokens=20)))  # the slow one ends meanwhile
    rest = await collect(slow)
    assert first["type"] == "start"
    # Two fetches, so at most two deltas a choice for its six tokens.
    assert [c["type"] for c in rest][-1] == "end"
    assert len(rest) <= 5
    for index in (0, 1):
        tokens, _, reason = joined(rest, index)
        logprobs = [
            e["id"] for c in rest if c["type"] == "delta" and c["index"] == index for e in c["logprobs"]
        ]
        assert (len(tokens), logprobs, reason) == (6, tokens, "length")


async def test_closing_a_stream_frees_its_blocks_after_the_running_step(start, ask):
    worker, _gate, engine = start()
    stream = worker.generate(ask("r", PROMPT, max_tokens=1000))
    assert (await anext_chunk(stream))["type"] == "start"
    await stream.aclose()
    worker.stop()
    assert idle(engine)
    assert engine.cache.stats().evictions == 0


async def test_cancelling_a_task_while_the_model_computes_aborts_its_request(start, ask):
    worker, gate, engine = start()
    [task] = await gate.shut(worker.generate(ask("r", PROMPT)))
    assert engine.load()["held"] == 8
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open.set()
    # Commands are taken in order: when this one is served, the abort before it is done.
    await collect(worker.generate(ask("next", [1, 2, 3], max_tokens=1)))
    worker.stop()
    assert idle(engine)
    assert engine.cache.stats().hit_tokens == 0


async def test_a_request_cancelled_before_the_engine_saw_it_never_runs(start, ask):
    worker, gate, engine = start()
    [running] = await gate.shut(worker.generate(ask("r", PROMPT, max_tokens=1)))
    unseen = asyncio.ensure_future(anext_chunk(worker.generate(ask("unseen", range(100, 120)))))
    await asyncio.sleep(0)
    unseen.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await unseen
    gate.open.set()
    await running
    worker.stop()
    assert engine.cache.stats().missed_tokens == 30


async def test_refusals_are_one_error_chunk(start, ask):
    worker, _, _ = start()
    [chunk] = await collect(worker.generate(ask("r", [])))
    assert chunk == {"type": "error", "code": "invalid", "message": "the prompt is empty"}


async def test_a_full_queue_refuses_even_while_the_model_computes(start, ask):
    worker, gate, _ = start(max_queue=2, max_num_seqs=1)
    [running] = await gate.shut(worker.generate(ask("running", PROMPT, max_tokens=1)))
    waiting = [asyncio.ensure_future(collect(worker.generate(ask(str(i), [i])))) for i in range(2)]
    await asyncio.sleep(0)
    [refused] = await collect(worker.generate(ask("too many", PROMPT)))
    assert (refused["type"], refused["code"]) == ("error", "queue_full")
    gate.open.set()
    assert (await running)["type"] == "start"
    assert [chunks[-1]["type"] for chunks in await asyncio.gather(*waiting)] == ["end", "end"]


# --- Long polls. ---


async def test_a_newcomer_gets_a_snapshot_at_once(start, ask):
    worker, _, engine = start()
    answer = await worker.poll(None, 0, 30.0)
    update = FingerprintUpdate.decode(answer["update"])
    assert (answer["v"], answer["replica"], update.snapshot, update.seq) == (1, "rep", True, 0)
    assert answer["model"] == {
        "digest": engine.facts.digest,
        "layout": "float32-b4",
        "block_size": 4,
        "context_length": 2048,
    }
    assert (answer["load"]["waiting"], answer["load"]["num_blocks"]) == (0, 512)


async def test_a_poll_with_nothing_new_ends_without_an_update(start):
    worker, _, engine = start()
    answer = await worker.poll(engine.cache.epoch, 0, 0.0)
    assert answer["update"] is None


async def test_a_waiting_poll_is_answered_by_the_next_change(start, ask):
    worker, _, engine = start()
    polls = [asyncio.ensure_future(worker.poll(engine.cache.epoch, 0, 30.0)) for _ in range(3)]
    await asyncio.sleep(0)
    await collect(worker.generate(ask("r", PROMPT)))
    for answer in await asyncio.gather(*polls):
        update = FingerprintUpdate.decode(answer["update"])
        assert (update.snapshot, update.base_seq, len(update.set_rows) > 0) == (False, 0, True)
    assert worker._watchers == set()


async def test_polls_and_health_are_answered_while_the_model_computes(start, ask):
    worker, gate, engine = start()
    [task] = await gate.shut(worker.generate(ask("r", PROMPT)))
    answer = await worker.poll(engine.cache.epoch, 0, 0.0)
    assert (answer["load"]["running"], answer["load"]["waiting_tokens"]) == (1, 30)
    assert worker.health()
    gate.open.set()
    await task


async def test_a_cancelled_poll_is_forgotten(start):
    worker, _, engine = start()
    poll = asyncio.ensure_future(worker.poll(engine.cache.epoch, 0, 30.0))
    await asyncio.sleep(0)
    assert len(worker._watchers) == 1
    poll.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await poll
    assert worker._watchers == set()


# --- Failures and the end. ---


async def test_a_failed_step_is_told_to_its_requests_and_the_engine_goes_on(start, ask):
    worker, gate, _engine = start()
    gate.failures = 1
    [chunk] = await collect(worker.generate(ask("r", PROMPT)))
    assert (chunk["type"], chunk["code"]) == ("error", "internal")
    assert "boom" in chunk["message"]
    assert worker.health()
    assert (await collect(worker.generate(ask("r", PROMPT))))[-1]["type"] == "end"


async def test_an_engine_that_gives_up_tells_everybody(start, ask):
    worker, gate, engine = start(max_failed_steps=1, max_num_seqs=1)
    poll = asyncio.ensure_future(worker.poll(engine.cache.epoch, 0, 30.0))
    [task] = await gate.shut(worker.generate(ask("running", PROMPT)))
    waiting = asyncio.ensure_future(collect(worker.generate(ask("waiting", PROMPT))))
    await asyncio.sleep(0)
    gate.failures = 1
    gate.open.set()
    assert (await task)["code"] == "unavailable"
    assert [chunk["code"] for chunk in await waiting] == ["unavailable"]
    with pytest.raises(EngineDead, match="boom"):
        await poll
    worker._thread.join()
    assert not worker.health()
    [chunk] = await collect(worker.generate(ask("late", PROMPT)))
    assert (chunk["code"], "boom" in chunk["message"]) == ("unavailable", True)
    with pytest.raises(EngineDead):
        await worker.poll(None, 0, 0.0)


async def test_an_engine_that_breaks_outside_the_model_tells_everybody(start, ask, caplog):
    worker, _gate, engine = start()
    engine.scheduler.complete = None
    [chunk] = await collect(worker.generate(ask("r", PROMPT)))
    assert chunk["code"] == "unavailable"
    assert "the engine died: TypeError" in chunk["message"]
    worker._thread.join()
    assert not worker.health()
    assert "the engine died" in caplog.text


async def test_stopping_ends_streams_and_polls_and_is_idempotent(start, ask):
    worker, gate, engine = start()
    poll = asyncio.ensure_future(worker.poll(engine.cache.epoch, 0, 30.0))
    [task] = await gate.shut(worker.generate(ask("r", PROMPT)))
    stopping = asyncio.get_running_loop().run_in_executor(None, worker.stop)
    gate.open.set()
    await stopping
    worker.stop()
    assert (await task)["type"] in ("start", "error")
    with pytest.raises(EngineDead, match="stopped"):
        await poll
    assert not worker.health()


async def test_a_worker_that_was_never_started_refuses(tiny_engine, ask):
    worker = EngineWorker(tiny_engine())
    assert not worker.health()
    [chunk] = await collect(worker.generate(ask("r", PROMPT)))
    assert chunk == {"type": "error", "code": "unavailable", "message": "the engine is not running"}
    worker.stop()
