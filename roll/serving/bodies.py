"""Request bodies as far as nothing is known of them but that they are JSON: their size, depth and text are bounded."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from starlette.requests import Request

from roll.serving.requests import BadRequest

MAX_BODY = 32 * 2**20
"""Bytes; a million token ids take about seven."""
MAX_DEPTH = 32
"""Lists and objects inside each other."""


class TooLong(BadRequest):
    """A body beyond :data:`MAX_BODY`."""


async def read_json(request: Request) -> Any:
    """The body of a request, read no further than it may be long.

    Raises:
        TooLong: it is longer.
        BadRequest: no JSON, nested too deep, or with text that is no Unicode.
    """
    content = bytearray()
    async for piece in request.stream():
        content += piece
        if len(content) > MAX_BODY:
            raise TooLong(f"the body is longer than {MAX_BODY} bytes")
    try:
        body = json.loads(bytes(content), parse_constant=_no_number)
    except RecursionError as error:
        raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep") from error
    except ValueError as error:  # also what is no UTF-8, and integers of thousands of digits
        raise BadRequest(f"the body is not JSON: {error}") from error
    check_tree(body)
    return body


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def check_tree(body: Any) -> None:
    """
    Raises:
        BadRequest: nested too deep, or a text with half a surrogate pair, which no tokenizer takes.
    """
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise BadRequest(f"the body is nested more than {MAX_DEPTH} deep")
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                below += node.keys()
                below += node.values()
            elif isinstance(node, list):
                below += [item for item in node if not isinstance(item, int)]
            elif isinstance(node, str) and not _is_unicode(node):
                raise BadRequest("the body has a text with half a surrogate pair, which is no Unicode")
        level = below


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
