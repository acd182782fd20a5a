"""The router's errors: one tree, every boundary raises only these.

```
RouterError
├── ConfigError            a setting that cannot work
│   └── UnknownPolicy      no policy of that name (lists the names)
├── BadRequest             the client's request cannot be served, whatever the load
├── PlacementError         no replica may take the request now
│   ├── NoReplica          none is known, or all were excluded
│   └── QueueFull          all are at their limit (carries retry_after_s)
├── RequestTimeout         the request's time is over
└── UpstreamError          a replica answered with an error (carries its code)
    └── ReplicaLost        the replica died or cannot be reached (carries its id)
```
"""

from collections.abc import Iterable


class RouterError(Exception):
    """Root of everything the router raises on purpose."""


class ConfigError(RouterError):
    """A setting that cannot work, found when it is read."""


class UnknownPolicy(ConfigError):
    """No routing policy has this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(sorted(known))
        super().__init__(f"unknown policy {name!r}; known policies: {', '.join(self.known)}")


class BadRequest(RouterError):
    """The request itself is wrong; `param` names the offending field when there is one."""

    def __init__(self, message: str, param: str | None = None) -> None:
        self.message = message
        self.param = param
        super().__init__(message)


class PlacementError(RouterError):
    """No replica may take the request now; another time it might be placed."""


class NoReplica(PlacementError):
    """No replica is known, or every known one was excluded by earlier attempts."""


class QueueFull(PlacementError):
    """Every replica is at its limit of requests in flight.

    `retry_after_s` (seconds) estimates when the first of them will have room.
    """

    def __init__(self, retry_after_s: float) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(f"every replica is at its limit; retry in {retry_after_s:.1f} s")


class RequestTimeout(RouterError):
    """The request was not done in its time, `seconds`: waiting for its first token, or as a whole."""

    def __init__(self, what: str, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"{what} took longer than {seconds:g} s")


class UpstreamError(RouterError):
    """A replica answered with an error: `code` is one of invalid, queue_full, internal, unavailable."""

    def __init__(self, message: str, code: str = "internal", replica_id: str | None = None) -> None:
        self.message = message
        self.code = code
        self.replica_id = replica_id
        super().__init__(message)


class ReplicaLost(UpstreamError):
    """The replica died, was removed, or cannot be reached; the request may be tried elsewhere."""

    def __init__(self, replica_id: str | None, message: str = "") -> None:
        super().__init__(message or f"replica {replica_id} is lost", "unavailable", replica_id)
