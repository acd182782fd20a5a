"""Errors of a replica, one tree.

    ReplicaError
    ├── ModelError              the model cannot be had or read
    │   ├── ModelNotFound       no such name or path
    │   ├── OfflineError        it must be fetched, and nothing that serves it could be reached
    │   ├── HashMismatch        what was fetched or found is not the file that was meant
    │   ├── CorruptModel        truncated, unreadable or inconsistent files
    │   └── UnsupportedModel    a readable model of a kind this engine does not run
    ├── ConfigError             settings that cannot work (also a ValueError)
    ├── QueueFull               too many requests wait; try later or elsewhere
    ├── EngineDead              the engine has stopped or cannot go on
    └── RequestError            the caller's fault (also a ValueError)
        ├── InvalidRequest      a request that can never be served as asked
        └── ChatTemplateError   messages the model's chat template cannot render

The messages are written for the person who reads them at a terminal or in an HTTP error body.
"""


class ReplicaError(Exception):
    """Root of everything a replica raises on purpose."""


class ModelError(ReplicaError):
    """The model cannot be found, fetched, read or run."""


class ModelNotFound(ModelError):
    """Neither a known name nor a path that exists."""


class OfflineError(ModelError):
    """The model must be downloaded and no source answered."""


class HashMismatch(ModelError):
    """A file's SHA-256 is not the one that was promised."""


class CorruptModel(ModelError):
    """The files are truncated, unreadable or contradict each other."""


class UnsupportedModel(ModelError):
    """The files are fine, but ask for something the engine does not implement."""


class ConfigError(ReplicaError, ValueError):
    """The engine cannot be built from these settings."""


class QueueFull(ReplicaError):
    """The engine's queue is full; the request was not taken."""


class EngineDead(ReplicaError):
    """The engine has stopped, or an error has made it unable to go on."""


class RequestError(ReplicaError, ValueError):
    """The request is at fault, not the replica."""


class InvalidRequest(RequestError):
    """The request can never be served as asked."""


class ChatTemplateError(RequestError):
    """The chat messages cannot be rendered by the model's template."""
