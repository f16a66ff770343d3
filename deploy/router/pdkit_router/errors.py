"""What a client is told when it gets no answer, in the shape that OpenAI's clients read."""

from __future__ import annotations

import json


class Refused(Exception):
    """A request that is answered here with an error.

    Attributes:
        retry_after_s: when it is worth trying again; None if it is not.
        final: clients must not try again, as OpenAI's do after other errors of a server.
    """

    def __init__(
        self, status: int, message: str, *, retry_after_s: int | None = None, final: bool = False
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s
        self.final = final

    @property
    def headers(self) -> tuple[tuple[str, str], ...]:
        """Headers of the answer, beside those that every answer has."""
        if self.final:
            return (("x-should-retry", "false"),)
        return () if self.retry_after_s is None else (("retry-after", str(self.retry_after_s)),)

    def body(self) -> bytes:
        """Return the body of the answer."""
        return error_body(self.status, self.message)


def error_body(status: int, message: str) -> bytes:
    """Return an error as JSON."""
    error = {"message": message, "type": _type(status), "param": None, "code": status}
    return json.dumps({"error": error}).encode()


def _type(status: int) -> str:
    named = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    return named.get(status, "server_error" if status >= 500 else "invalid_request_error")
