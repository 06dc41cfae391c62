"""Every exception tinsmith raises on purpose.

    TinsmithError                 base; never raised itself
    |-- UserError                 the request is at fault               400, category "user"
    |   |-- NotFoundError         no such thing, or not yours           404
    |   |   `-- RevokedError      what it rested on is gone             404
    |   |-- ConflictError         same key, other content               400 (the SDK retries a 409 for minutes)
    |   |-- AuthenticationError   missing or wrong key                  401
    |   |   `-- InvalidTokenError an expired, forged or foreign token   401, and the SDK gets another one
    |   |-- CapacityError         try again later                       429
    |   |-- OutOfMemoryError      does not fit on the device            400
    |   `-- UnsupportedError      a field or value this server refuses  400
    |-- ServerError               we are at fault                       500, category "server"
    |   |-- StoreError            the request store cannot be used now  503
    |   |   `-- StoreFullError    its disk is full                      503
    |   |-- DiskError             the disk is full, or fails            503
    |   |-- ModelLostError        the training state is gone            500
    |   |-- LeaseLostError        another engine serves the base model  500
    |   `-- ResultExpiredError    the result is past its retention      410
    |-- ConfigError               the configuration is at fault         (start-up only)
    `-- PluginError               a plugin is broken or misused         (start-up only)

Messages are lower case, without a full stop, and name the thing, the value, what is allowed and the remedy.
"""

from typing import ClassVar, Literal

from tinsmith_checkpoints.errors import Category as Category
from tinsmith_checkpoints.errors import ConfigError as ConfigError
from tinsmith_checkpoints.errors import NotFoundError as NotFoundError
from tinsmith_checkpoints.errors import ServerError as ServerError
from tinsmith_checkpoints.errors import TinsmithError as TinsmithError
from tinsmith_checkpoints.errors import UnsupportedError as UnsupportedError
from tinsmith_checkpoints.errors import UserError as UserError


class RevokedError(NotFoundError):
    """A sampling session or download link whose checkpoint may no longer be used. The SDK does not retry a 404."""


class ConflictError(UserError):
    """The same idempotency key came with other content."""


class AuthenticationError(UserError):
    """No key, or one that the server does not know."""

    http_status: ClassVar[int] = 401


class InvalidTokenError(AuthenticationError):
    """A token that is not, or no longer, good; the API key it was made for may be."""


class CapacityError(UserError):
    """A limit is reached for now; the client may try again."""

    http_status: ClassVar[int] = 429

    def __init__(
        self,
        message: str = "",
        *,
        retry_after_s: float = 1.0,
        queue_state: Literal["paused_rate_limit", "paused_capacity"] = "paused_rate_limit",
    ) -> None:
        """`queue_state` tells whether the limit is the caller's own or the server's."""
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.queue_state = queue_state


class OutOfMemoryError(UserError):
    """A request needs more memory than the device has left. A backend that raises it has changed nothing."""


class StoreError(ServerError):
    """The request store could not be read or written; once it can be, the same call may succeed."""

    http_status: ClassVar[int] = 503
    public: ClassVar[bool] = False


class StoreFullError(StoreError):
    """The disk of the request store is full: nothing was recorded, and once there is space, the same call succeeds."""

    public: ClassVar[bool] = True


class DiskError(ServerError):
    """The disk of the data directory is full, or fails; once it works, the same call may succeed."""

    http_status: ClassVar[int] = 503


class ModelLostError(ServerError):
    """The training state of a model is gone; a new model can be created from a checkpoint."""


class LeaseLostError(ServerError):
    """Another engine serves the base model now: what this one does any more must not count, so it ends."""

    public: ClassVar[bool] = False


class ResultExpiredError(ServerError):
    """The result existed, and is past its retention."""

    http_status: ClassVar[int] = 410


class PluginError(TinsmithError):
    """A plugin is missing, broken, or offers what another one offers."""
