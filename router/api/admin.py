"""`/admin/...`: what an operator may do, behind a key of its own.

Statuses: 200 when every replica answered, 207 when some did, 502 when none did; the body has what each one
answered, or its error. Salts come in and never go out: not into answers, logs or metrics.
"""

import json
import logging
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

from starlette.requests import Request
from starlette.responses import Response

from router.administration import Administration, Report
from router.api.body import read_body
from router.api.codec import TokenIds
from router.api.errors import ApiError, invalid
from router.api.exchange import exchange_of
from router.api.generate import Service
from router.api.schemas import ClearBody, ExplainBody, parse, validated
from router.errors import NoReplica

logger = logging.getLogger(__name__)

_MAX_QUERY_FIELDS = 16
_TOKEN = re.compile(r"[0-9]{1,10}")


async def clear(service: Service, request: Request) -> Response:
    """`POST /admin/cache/clear`."""
    administration = service.administration(request)
    body = await service.pool.run(lambda raw: parse(ClearBody, raw), await _read(service, request))
    if body.all and body.namespace is not None:
        raise invalid("Give either 'all' or 'namespace', not both.", "namespace")
    if not body.all and body.namespace is None:
        message = "Say what to clear: 'all': true, or a 'namespace'."
        raise invalid(message, "all", "missing_required_parameter")
    namespace = None if body.namespace is None else _namespace(body.namespace.tenant, body.namespace.salt)
    replicas = _chosen(administration, body.replicas, "replicas")
    reports = await administration.clear(namespace, replicas)
    logger.info(
        "request %s cleared %s: %d of %d replicas did",
        exchange_of(request.scope).request_id,
        "all caches" if namespace is None else "one namespace",
        sum(report.error is None for report in reports),
        len(reports),
    )
    return _answer({"object": "cache.clear"}, reports)


async def explain(service: Service, request: Request) -> Response:
    """`GET` or `POST /admin/cache/explain`."""
    administration = service.administration(request)
    from_query = request.method != "POST"

    def prepare(raw: bytes) -> tuple[ExplainBody, TokenIds]:
        body = validated(ExplainBody, _query(raw)) if from_query else parse(ExplainBody, raw)
        return body, service.preparer.explained(body)

    raw = request.scope["query_string"] if from_query else await _read(service, request)
    body, tokens = await service.pool.run(prepare, raw)
    wanted = None if body.replica is None else [body.replica]
    replicas = _chosen(administration, wanted, "replica")
    reports = await administration.explain(tokens, _namespace(body.tenant, body.salt), replicas)
    return _answer({"object": "cache.explain", "num_tokens": len(tokens)}, reports)


async def _read(service: Service, request: Request) -> bytes:
    return await read_body(request, service.config.max_body_bytes, service.config.body_timeout_s)


def _namespace(tenant: str | None, salt: str | None) -> dict[str, str | None]:
    """The wire's form."""
    return {"tenant": tenant, "salt": salt, "adapter": None}


def _chosen(administration: Administration, wanted: Iterable[str] | None, param: str) -> list[str]:
    """The replicas to ask: the wanted ones, each once, or all."""
    there = administration.replica_ids
    if not there:
        raise NoReplica("no replica is known")
    if wanted is None:
        return there
    unknown = sorted(set(wanted) - set(there))
    if unknown:
        message = f"There is no replica of this name; known are {', '.join(there[:20])}."
        raise ApiError(404, message, param=param, code="replica_not_found")
    return list(dict.fromkeys(wanted))


def _query(query: bytes) -> dict[str, Any]:
    """The fields of a query string; `tokens` as a list."""
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=_MAX_QUERY_FIELDS
        )
    except ValueError:  # UnicodeDecodeError is one
        message = "The query string is malformed: not UTF-8, or too many fields."
        raise invalid(message, code="invalid_query") from None
    fields: dict[str, Any] = dict(pairs)
    if len(fields) < len(pairs):
        raise invalid("A field is given twice.", code="invalid_query")
    if "tokens" in fields:
        fields["tokens"] = _token_ids(fields["tokens"])
    if "messages" in fields or "tools" in fields:
        raise invalid("Send 'messages' by POST.", "messages")
    return fields


def _token_ids(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(_TOKEN.fullmatch(part) for part in parts):
        raise invalid("'tokens' must be token ids with commas between.", "tokens")
    return list(map(int, parts))


def _answer(head: dict[str, Any], reports: list[Report]) -> Response:
    answered = sum(report.error is None for report in reports)
    status = 200 if answered == len(reports) else 207 if answered else 502
    content = json.dumps({**head, "replicas": list(map(_entry, reports))}, separators=(",", ":"))
    return Response(content, status, media_type="application/json")


def _entry(report: Report) -> dict[str, Any]:
    if report.error is None:
        return {"replica": report.replica_id, **(report.figures or {})}
    code, message = report.error
    return {"replica": report.replica_id, "error": {"code": code, "message": message}}
