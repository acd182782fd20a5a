"""What one can set: the arguments of the application, from serve.yaml or the command line."""

import re
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Addresses that only this machine reaches."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class AppConfig(BaseModel):
    """Arguments of `router.app:build`. Unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "smollm2-135m"
    """A named model, a .gguf file, a Hugging Face folder, or random:tiny."""
    served_model_name: str | None = None
    """The id clients send; `model` when not given."""
    policy: Literal["cache_aware", "least_load", "round_robin"] = "cache_aware"
    replicas: int = Field(2, ge=1)
    """Model replicas at start (serve.yaml's `deployments` may override it, or autoscale)."""
    routers: int = Field(1, ge=1)
    """Router replicas, each with its own fingerprints and ledger."""
    replica_cpus: float = Field(1.0, ge=0, allow_inf_nan=False)
    """CPUs that Ray reserves for a replica; also its torch threads when `engine.threads` is not given.

    With `engine.tensor_parallel`, its ranks share them equally."""
    replica_gpus: float = Field(0.0, ge=0, allow_inf_nan=False)
    """GPUs for a replica: with `engine.tensor_parallel` as many as ranks, or none, which means CPUs. A part
    of one is shared with other replicas, and needs `engine.num_blocks`."""
    engine: dict[str, Any] = Field(default_factory=dict)
    """Fields of `replica.config.EngineConfig`: dtype, num_blocks, block_size, max_num_seqs, threads, ..."""
    api_keys: dict[str, str] = Field(default_factory=dict)
    """SHA-256 (hex) of each API key, and its tenant's name. None: open, on loopback only."""
    admin_key: str | None = None
    """SHA-256 (hex) of the key for `/admin/...`; no API key will do there. None: there are no such routes."""
    cluster_secret: str | None = None
    """Hex key of the prefix hashes, the same for every router and replica. None: a random one per deploy."""
    max_inflight_per_replica: int = Field(256, ge=1)
    """Choices a router lets one replica draw at a time; beyond that on all of them, clients get 429."""
    max_body_bytes: int = Field(2 << 20, ge=1024)
    """Longest request body. The longest ones are checked in threads, but parsing JSON holds up the router."""
    request_timeout_s: float = Field(600.0, gt=0)

    @field_validator("api_keys")
    @classmethod
    def _keys_are_hashed(cls, keys: dict[str, str]) -> dict[str, str]:
        for digest in keys:
            if not _DIGEST.fullmatch(digest):
                raise ValueError(
                    "give each API key as its SHA-256 in lower-case hex (64 digits), not in plain"
                )
        return keys

    @field_validator("admin_key")
    @classmethod
    def _admin_key_is_hashed(cls, digest: str | None) -> str | None:
        if digest is not None and not _DIGEST.fullmatch(digest):
            raise ValueError("give the admin key as its SHA-256 in lower-case hex (64 digits), not in plain")
        return digest

    @model_validator(mode="after")
    def _admin_key_is_no_api_key(self) -> "AppConfig":
        if self.admin_key in self.api_keys:
            raise ValueError("admin_key must not be one of the api_keys")
        return self

    @field_validator("cluster_secret")
    @classmethod
    def _secret_is_hex(cls, secret: str | None) -> str | None:
        if secret is not None and not re.fullmatch(r"(?:[0-9a-f]{2}){16,}", secret):
            raise ValueError("cluster_secret is at least 16 bytes in lower-case hex")
        return secret

    @property
    def public_name(self) -> str:
        """The model id that clients send."""
        return self.served_model_name or self.model
