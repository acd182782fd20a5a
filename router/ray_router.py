"""The Ray Serve adapter: requests go to the replica that placement chose.

Placement happens before Serve is involved (`router.placement`), because choosing and reserving must be one
synchronous step. What is left for Serve's request router is to obey: `choose_replicas` reads the target out
of the request, takes no locks, awaits nothing and never raises (an exception there would leave its request
hanging for ever). If the target has gone, it degrades to the replica with the shortest queue; the replica
that really answered names itself in its first chunk, and the ledger moves the reservation there.

Serve's FIFO mixin is deliberately not used: it may hand a chosen replica to another waiting request.

Ray Serve pickles `TargetRouter` by value: keep module state out of this file (see `router.membership`).
"""

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc
from ray.exceptions import RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router import membership
from router.errors import ReplicaLost, UpstreamError

logger = logging.getLogger(__name__)

_FAILURES = (RayError, RayServeException, grpc.RpcError)
"""What a call through a handle may raise; which of them depends on Serve's transport."""


def deployment_key(app_name: str, deployment_name: str) -> str:
    """The name under which a deployment's replicas are published in `router.membership`."""
    return f"{app_name}/{deployment_name}"


class TargetRouter(RequestRouter):
    """Sends each request to `request["target"]`, the first positional argument's field."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """The target alone; without one, or when it has gone, all (Serve takes the shortest queue)."""
        if pending_request is not None:
            # Otherwise Serve would spin without a pause when the target does not accept.
            pending_request.routing_context.should_backoff = True
            args = pending_request.args
            target = args[0].get("target") if args and isinstance(args[0], dict) else None
            if target is not None:
                for replica in candidate_replicas:
                    if replica.replica_id.unique_id == target:
                        return [[replica]]
        return [list(candidate_replicas)]

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Serve's callback: the set of running replicas changed."""
        super().update_replicas(replicas)
        self._publish()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """Serve's callback: a call found the replica's actor dead, before the controller noticed."""
        super().on_replica_actor_died(replica_id)
        self._publish()

    def _publish(self) -> None:
        key = f"{self._deployment_id.app_name}/{self._deployment_id.name}"
        ids = frozenset(r.unique_id for r in self.curr_replicas)
        membership.membership(key).publish(ids)


class ServeTransport:
    """Calls replicas through a Serve deployment handle. Implements `router.dispatch.Transport` and
    `router.administration.AdminTransport`.

    A dead or unreachable replica raises `ReplicaLost`; an exception out of its code, `UpstreamError`.
    """

    def __init__(self, handle: DeploymentHandle) -> None:
        self._generate = handle.options(method_name="generate", stream=True)
        self._poll = handle.options(method_name="poll")
        self._clear_cache = handle.options(method_name="clear_cache")
        self._explain = handle.options(method_name="explain")

    async def generate(self, replica_id: str, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Stream the chunks of one request. Closing the iterator cancels the request on the replica."""
        response: Any = _call(self._generate, {**request, "target": replica_id})
        try:
            async for chunk in response:
                yield chunk
        except _FAILURES as error:
            raise _upstream(replica_id, error) from error
        finally:
            response.cancel()

    async def poll(self, replica_id: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """One long poll; at most `timeout_s` seconds, whatever the replica does.

        Raises:
            ReplicaLost: the replica died, did not answer in time, or another one answered for it.
        """
        return await _ask(self._poll, replica_id, request, timeout_s)

    async def clear_cache(self, replica_id: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Make a replica forget what it cached; see `router.administration`. Raises as `poll`."""
        return await _ask(self._clear_cache, replica_id, request, timeout_s)

    async def explain(self, replica_id: str, request: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Why a prompt would hit as far as it does there; see `router.administration`. Raises as `poll`."""
        return await _ask(self._explain, replica_id, request, timeout_s)

    async def connect(self, timeout_s: float) -> None:
        """Make Serve build its request router, which then publishes the replicas. Waits for one replica.

        Raises:
            ReplicaLost: no replica answered within `timeout_s` seconds.
        """
        request = {"v": 1, "target": None, "epoch": None, "seq": 0, "timeout_s": 0.0}
        response = _call(self._poll, request)
        try:
            await asyncio.wait_for(_result(response), timeout_s)
        except (*_FAILURES, asyncio.TimeoutError) as error:
            response.cancel()
            raise ReplicaLost("any", describe(error)) from error


async def _ask(
    handle: DeploymentHandle, replica_id: str, request: dict[str, Any], timeout_s: float
) -> dict[str, Any]:
    """The answer of one replica and no other, to a call that is no stream."""
    response = _call(handle, {**request, "target": replica_id})
    try:
        answer = await asyncio.wait_for(_result(response), timeout_s)
    except (*_FAILURES, asyncio.TimeoutError) as error:
        response.cancel()
        raise _upstream(replica_id, error) from error
    name = answer.get("replica") if isinstance(answer, dict) else None
    if name != replica_id:
        raise ReplicaLost(replica_id, f"{name} answered in its place")
    return answer


def _call(handle: DeploymentHandle, request: dict[str, Any]) -> Any:
    """A call through a handle that belongs to no HTTP request.

    Serve gives all calls that one HTTP request makes the same id, and its request router knows only the first
    of those that wait at the same time; the others would wait for ever, and with them its routing tasks.
    """
    return contextvars.Context().run(handle.remote, request)


def _upstream(replica_id: str, error: BaseException) -> UpstreamError:
    """What the rest of the router knows of a failed call."""
    if isinstance(error, TaskCancelledError):
        # Not by us, for whoever cancels here reads no more. It tells nothing about the replica.
        return UpstreamError("Serve cancelled the call", "internal", replica_id)
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        return UpstreamError(describe(error), "internal", replica_id)
    return ReplicaLost(replica_id, describe(error))


async def _result(response: Any) -> dict[str, Any]:
    return await response


def describe(error: BaseException) -> str:
    """One line for logs and clients; Ray's messages carry whole worker reports."""
    if isinstance(error, asyncio.TimeoutError):
        return "no answer in time"
    if isinstance(error, RayActorError):
        return "the replica's process died"
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[-1][:200]
