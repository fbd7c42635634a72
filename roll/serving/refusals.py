"""Responses other than 200, as clients of OpenAI's and Anthropic's interfaces read them."""

from __future__ import annotations

from typing import Any


class Refusal(Exception):
    """A request that gets an error for a response.

    Args:
        kind: type of the error, by the names of OpenAI and Anthropic.
        code: identifies the error to programs, where the type does not.
        field: the field of the request that is wrong.
        retry_after: seconds after which the client may try again; None: it need not.
    """

    def __init__(
        self,
        status: int,
        message: str,
        kind: str = "invalid_request_error",
        code: str | None = None,
        field: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.field = status, message, kind, code, field
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    @property
    def openai(self) -> dict[str, Any]:
        """The error in OpenAI's form."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.field, "code": self.code}}

    @property
    def anthropic(self) -> dict[str, Any]:
        """The error in Anthropic's form."""
        kind = "api_error" if self.kind == "server_error" else self.kind
        return {"type": "error", "error": {"type": kind, "message": self.message}}


class BadRequest(Refusal):
    """A body, or a part of it (``field``), that cannot be served, now or later."""

    def __init__(self, message: str, field: str | None = None, status: int = 400) -> None:
        super().__init__(status, message, field=field)


class Overloaded(Refusal):
    """The limit on open requests is reached; the client may try again later."""

    def __init__(self, message: str) -> None:
        super().__init__(429, message, "rate_limit_error", retry_after=1)


class Unavailable(Refusal):
    """The engines have failed, or have dropped their requests for a pause."""

    def __init__(self, message: str) -> None:
        super().__init__(503, message, "server_error", retry_after=1)


def wrong_key(of: str = "the API key") -> Refusal:
    """The refusal of a request without a valid key; ``of``: noun for the key."""
    return Refusal(401, f"{of} is missing or wrong", "authentication_error", "invalid_api_key")
