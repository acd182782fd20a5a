"""What happens to a fleet while it runs: replicas die, leave in good order, and join."""

from collections.abc import Iterable
from dataclasses import dataclass

from router.lab.errors import OptionError

KINDS = ("fail", "leave", "join")


@dataclass(frozen=True)
class Change:
    """At `at_s`, replica number `replica` fails or leaves; or a new one joins (`replica` is -1).

    Replicas are numbered from 0 in the order in which they joined; numbers are never used again.
    """

    at_s: float
    kind: str
    replica: int = -1

    @classmethod
    def parse(cls, text: str) -> "Change":
        """From "fail:3@600", "leave:0@900" or "join@1200". Raises `OptionError`."""
        what, _, at = text.strip().partition("@")
        kind, _, replica = what.partition(":")
        try:
            change = cls(float(at), kind, int(replica) if kind != "join" else -1)
        except ValueError:
            change = cls(-1.0, "")
        if kind not in KINDS or (kind == "join") == bool(replica) or not 0 <= change.at_s < float("inf"):
            raise OptionError(f"a change is fail:3@600, leave:0@900 or join@1200 (seconds), not {text!r}")
        return change


def check_changes(changes: Iterable[Change], replicas: int) -> None:
    """Raises `OptionError` when one of `replicas` is to go that is not there (any more)."""
    there, joined = set(range(replicas)), replicas
    for change in sorted(changes, key=lambda change: change.at_s):
        if change.kind == "join":
            there.add(joined)
            joined += 1
        elif change.replica not in there:
            raise OptionError(f"no replica {change.replica} is there at {change.at_s:g} s to {change.kind}")
        else:
            there.remove(change.replica)
