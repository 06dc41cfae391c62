"""What goes wrong with files. `tinsmith.errors` has these and all others of the server in one tree.

Messages are lower case, without a full stop, and name the thing, the value, what is allowed and the remedy.
"""

from typing import ClassVar, Literal

Category = Literal["user", "server", "unknown"]


class TinsmithError(Exception):
    """Base of all; carries what an HTTP answer or a failed future needs."""

    http_status: ClassVar[int] = 500
    category: ClassVar[Category] = "unknown"
    public: ClassVar[bool] = False
    """Whether tenants may read the message. It then names neither a path of this machine nor another tenant's work, and
    quotes no exception. Instead of any other message they get a reference to the log."""
    code: ClassVar[str | None] = None
    """What programs know the error by, such as `context_length_exceeded`. Most errors have none."""
    field: str | None = None
    """The field of the request's body that is at fault, if one is."""


class UserError(TinsmithError, ValueError):
    """The request cannot be carried out as asked."""

    http_status: ClassVar[int] = 400
    category: ClassVar[Category] = "user"
    public: ClassVar[bool] = True


class NotFoundError(UserError):
    """No such session, model, sampler, checkpoint or request, or it belongs to another tenant."""

    http_status: ClassVar[int] = 404


class UnsupportedError(UserError):
    """A field or value is understood, and refused rather than ignored."""


class ServerError(TinsmithError):
    """Something on our side failed; the request may be fine."""

    category: ClassVar[Category] = "server"
    public: ClassVar[bool] = True


class ConfigError(TinsmithError, ValueError):
    """A setting is wrong; the message names source, key, value and remedy."""
