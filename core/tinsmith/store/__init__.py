"""The request store's interface: the records that it holds, and the class that a store implements."""

from tinsmith.store.records import *  # noqa: F403 - a name stands where it is defined, and nowhere again
from tinsmith.store.request_store import *  # noqa: F403
from tinsmith.store.shares import *  # noqa: F403
