"""For plugins that bring a request store, or that read the server's.

A store subclasses `SqlStore`, and passes `tinsmith.testing.RequestStoreContract`. The records and methods of
`RequestStore` grow with each feature, so they are not among the public names.
"""

from tinsmith.sql_store.config import SqlStoreConfig
from tinsmith.sql_store.store import SqlStore
from tinsmith.store import CheckpointRecord, RequestStore, SamplingSessionRecord, StoreContext, StoreSpec

__all__ = [
    "CheckpointRecord",
    "RequestStore",
    "SamplingSessionRecord",
    "SqlStore",
    "SqlStoreConfig",
    "StoreContext",
    "StoreSpec",
]
