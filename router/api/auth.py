"""Who asks: the tenant behind an API key, or, where no keys are configured, anyone on this machine."""

import hashlib
import hmac
import ipaddress
import logging
from collections.abc import Mapping

from starlette.requests import Request

from router.api.errors import ApiError, ClientGone

logger = logging.getLogger(__name__)


class Authenticator:
    """Names the tenant of each request.

    With keys, every request must carry one (`Authorization: Bearer KEY`). Without, the API is open, but only
    to loopback peers, whose tenant is None. Only SHA-256 digests of keys are held.
    """

    def __init__(self, api_keys: Mapping[str, str]) -> None:
        """`api_keys`: SHA-256 of each key in lower-case hex, and its tenant's name."""
        self._keys = [(digest.encode(), tenant) for digest, tenant in api_keys.items()]
        if not self._keys:
            logger.warning("no API keys are configured: the API is open to every client on this machine")

    def tenant(self, request: Request) -> str | None:
        """The caller's tenant.

        Raises:
            ApiError: 401 for a missing or unknown key, 403 for a remote peer of an open API.
            ClientGone: an open API's peer left before it could be seen who it was.
        """
        if not self._keys:
            _require_loopback(request)
            return None
        return self._tenant_of(_bearer(request))

    def _tenant_of(self, key: str) -> str:
        digest = hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode()
        found: str | None = None
        # Every entry is compared, so that the time tells nothing about which one matched.
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _unauthorized("Incorrect API key provided.")
        return found


def _bearer(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized("You didn't provide an API key: send it as `Authorization: Bearer YOUR_KEY`.")
    # Header bytes arrive as Latin-1; the client meant UTF-8.
    return key.strip().encode("latin-1").decode("utf-8", "surrogateescape")


def _unauthorized(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _require_loopback(request: Request) -> None:
    if request.client is None:  # its socket is closed already
        raise ClientGone
    # Behind a proxy on this machine the peer is always local; what the proxy says about the client counts.
    forwarded = request.headers.getlist("x-forwarded-for")
    hosts = [host.strip() for line in forwarded for host in line.split(",")]
    hosts.append(request.client.host)
    if not all(map(_is_loopback, hosts)) or "forwarded" in request.headers:
        raise ApiError(
            403,
            "No API keys are configured, so only clients on the same machine may use this API.",
            kind="permission_error",
            code="loopback_only",
        )


def _is_loopback(host: str) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
