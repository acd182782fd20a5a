"""Who asks: the tenant behind an API key, or, where no keys are configured, anyone on this machine.

What is for operators has a key of its own, and is not there without one.
"""

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
        return self._tenant_of(_bearer(request, "API"))

    def _tenant_of(self, key: str) -> str:
        digest = _digest(key)
        found: str | None = None
        # Every entry is compared, so that the time tells nothing about which one matched.
        for known, tenant in self._keys:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None:
            raise _unauthorized("Incorrect API key provided.")
        return found


class AdminGate:
    """Lets those in who send the admin key. API keys open nothing here, nor the admin key anything else."""

    def __init__(self, admin_key: str | None) -> None:
        """`admin_key`: SHA-256 of the key in lower-case hex; None: there is none."""
        self._digest = admin_key

    def check(self, request: Request) -> None:
        """Raise `ApiError`: 404 where no admin key is configured, 401 for another key or none."""
        if self._digest is None:
            message = (
                "The administration endpoints are off. To turn them on, set `admin_key` in serve.yaml to the "
                "SHA-256 of a key."
            )
            raise ApiError(404, message, code="admin_disabled")
        if not hmac.compare_digest(self._digest.encode(), _digest(_bearer(request, "admin"))):
            raise _unauthorized("Incorrect admin key provided.")


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest().encode()


def _bearer(request: Request, what: str) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthorized(f"You didn't provide an {what} key: send it as `Authorization: Bearer YOUR_KEY`.")
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
