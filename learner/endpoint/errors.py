"""What the endpoint does not do for a client, as OpenAI's clients read it. Pure."""

from __future__ import annotations

from typing import Any

from p2p.errors import ShoalError


class ApiError(ShoalError):
    """A request that is not answered. `status` is HTTP's; `retry_after`: seconds after which it may be, 0 where it will not."""

    def __init__(self, status: int, message: str, *, code: str, param: str = "", retry_after: int = 0) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.retry_after = status, message, code, param, retry_after

    def body(self) -> dict[str, Any]:
        """OpenAI's form of an error."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param or None, "code": self.code}}


def bad_request(message: str, param: str = "", *, code: str = "invalid_value") -> ApiError:
    """The client asked for what there is not."""
    return ApiError(400, message, code=code, param=param)
