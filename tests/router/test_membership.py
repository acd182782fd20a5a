"""Membership: what Serve's request router publishes reaches the watchers, on their loop, in their context."""

import asyncio
import contextvars
import threading

from router.membership import Membership, membership


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


async def test_a_watcher_hears_the_present_set_and_each_change() -> None:
    members, heard = Membership(), []
    members.publish(frozenset({"a"}))
    stop = members.watch(heard.append)
    await settle()
    members.publish(frozenset({"a", "b"}))
    members.publish(frozenset({"a", "b"}))  # no change, no call
    members.publish(frozenset())
    await settle()
    assert heard == [{"a"}, {"a", "b"}, set()]
    stop()
    stop()
    members.publish(frozenset({"c"}))
    await settle()
    assert len(heard) == 3


async def test_a_publication_from_another_thread_is_heard_on_the_watchers_loop() -> None:
    members, heard = Membership(), []
    done = asyncio.Event()

    def hear(ids: frozenset[str]) -> None:
        heard.append((ids, threading.current_thread()))
        if ids:
            done.set()

    members.watch(hear)
    thread = threading.Thread(target=members.publish, args=(frozenset({"a"}),))
    thread.start()
    await asyncio.wait_for(done.wait(), 5)
    thread.join()
    assert heard[-1] == ({"a"}, threading.main_thread())


async def test_watchers_run_in_their_own_context_not_the_publishers() -> None:
    """Otherwise Serve would take their calls for children of the publisher's request."""
    request = contextvars.ContextVar("request", default="none")
    members, heard = Membership(), []
    members.watch(lambda ids: heard.append((set(ids), request.get())))
    await settle()
    request.set("somebody's")
    members.publish(frozenset({"a"}))
    await settle()
    assert heard == [(set(), "none"), ({"a"}, "none")]


def test_one_membership_per_deployment() -> None:
    assert membership("app/x") is membership("app/x")
    assert membership("app/x") is not membership("app/y")
