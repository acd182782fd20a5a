"""Clearing a replica's cache, and asking it why a prompt hits as far as it does."""

import threading

import numpy as np
import pytest

from replica.deployment import Replica
from replica.errors import InvalidRequest
from replica.worker import EngineWorker

PROMPT = np.arange(10, 40, dtype=np.int32)


@pytest.fixture
async def worker(tiny_engine):
    worker = EngineWorker(tiny_engine(replica_id="rep", poll_interval_s=0.001))
    worker.start()
    yield worker
    worker.stop()


async def answer(worker, request):
    return [chunk async for chunk in worker.generate(request)][-1]


async def test_everything_is_forgotten_or_one_namespace(worker, ask):
    for tenant in (None, "a", "b"):
        await answer(worker, ask("r", PROMPT, tenant=tenant, max_tokens=1))
    head = {"v": 1, "replica": "rep"}
    assert worker.clear_cache({"tenant": "a"}) == {**head, "cleared": 7, "held": 0}
    assert worker.clear_cache({"tenant": "a"}) == {**head, "cleared": 0, "held": 0}
    assert worker.clear_cache({"tenant": "b", "salt": "s"}) == {**head, "cleared": 0, "held": 0}
    hits = [(await answer(worker, ask("r", PROMPT, tenant=t, max_tokens=1)))["cached_tokens"] for t in "ab"]
    assert hits == [0, 28]
    assert worker.clear_cache() == {**head, "cleared": 21, "held": 0}
    assert (await answer(worker, ask("r", PROMPT, max_tokens=1)))["cached_tokens"] == 0


async def test_the_parts_of_a_namespace_that_are_not_named_are_none(worker, ask):
    await answer(worker, ask("r", PROMPT, max_tokens=1))
    assert worker.clear_cache({})["cleared"] == 7


async def test_what_running_sequences_hold_dies_with_them(tiny_engine, ask, run_all):
    engine = tiny_engine()
    engine.add(ask("r", PROMPT, max_tokens=9))
    engine.step()
    assert engine.clear_cache() == {"cleared": 7, "held": 7}
    assert len(run_all(engine)["r"].tokens[0]) == 8
    assert (engine.cache.stats().cached, engine.cache.stats().free) == (0, 512)
    engine.cache.check()


async def test_routers_hear_of_it_at_once(worker, ask):
    await answer(worker, ask("r", PROMPT, max_tokens=1))
    first = await worker.poll(None, 0, 30.0)
    seq = worker._engine.cache.seq
    clearing = threading.Thread(target=worker.clear_cache)
    clearing.start()
    update = (await worker.poll(worker._engine.cache.epoch, seq, 30.0))["update"]
    clearing.join()
    assert first["update"] is not None
    assert update is not None


async def test_why_a_prompt_hits_so_far(worker, ask):
    def why(tokens, **namespace):
        found = worker.explain(np.array(tokens, dtype=np.int32), namespace)
        assert (found["v"], found["replica"], found["evicted_s_ago"]) == (1, "rep", None)
        return found["num_tokens"], found["hit_tokens"], found["reason"]

    assert why(PROMPT) == (30, 0, "unseen")
    await answer(worker, ask("r", PROMPT, max_tokens=1))
    assert why(PROMPT) == (30, 28, "short")
    assert why(PROMPT[:20]) == (20, 19, "complete")
    assert why([*PROMPT[:18], *range(90, 100)]) == (28, 18, "differs")
    assert why(PROMPT, tenant="a") == (30, 0, "namespace")


@pytest.mark.parametrize("namespace", [{"model": "x"}, {"tenant": 5}, {"salt": True}])
async def test_namespaces_that_cannot_be_are_refused(worker, namespace):
    with pytest.raises(InvalidRequest):
        worker.clear_cache(namespace)
    with pytest.raises(InvalidRequest):
        worker.explain(PROMPT, namespace)
    with pytest.raises(InvalidRequest, match="empty"):
        worker.explain(PROMPT[:0], {})


# --- On Ray's side: plain dicts, and never another replica's work. ---


@pytest.fixture
def replica(worker):
    """The deployment around a worker, without Serve, which is what constructs it otherwise."""
    replica = Replica.__new__(Replica)
    replica.id, replica._worker = "rep", worker
    return replica


async def test_the_deployment_speaks_dicts(replica, worker, ask):
    await answer(worker, ask("r", PROMPT, tenant="a", max_tokens=1))
    asked = {"v": 1, "target": "rep", "tokens": PROMPT.astype("<i4").tobytes(), "namespace": {"tenant": "a"}}
    assert await replica.explain(asked) == {
        "v": 1,
        "replica": "rep",
        "num_tokens": 30,
        "hit_tokens": 28,
        "reason": "short",
        "evicted_s_ago": None,
    }
    cleared = await replica.clear_cache({"v": 1, "target": "rep", "namespace": None})
    assert cleared == {"v": 1, "replica": "rep", "cleared": 7, "held": 0}


async def test_what_was_meant_for_another_replica_changes_nothing(replica, worker, ask):
    await answer(worker, ask("r", PROMPT, max_tokens=1))
    assert await replica.clear_cache({"target": "gone", "namespace": None}) == {"v": 1, "replica": "rep"}
    assert await replica.explain({"target": "gone"}) == {"v": 1, "replica": "rep"}
    assert worker._engine.cache.stats().cached == 7


async def test_a_callers_mistake_comes_back_as_an_error(replica):
    asked = {"target": None, "tokens": b"abc", "namespace": None}
    found = await replica.explain(asked)
    assert (found["replica"], found["error"]["code"]) == ("rep", "invalid")
    assert "malformed tokens" in found["error"]["message"]
    found = await replica.clear_cache({"target": None, "namespace": {"tenant": 5}})
    assert found["error"]["type"] == "error"
