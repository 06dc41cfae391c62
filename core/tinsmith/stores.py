"""For plugins that bring a request store, or that read the server's.

A store over SQL subclasses `SqlStore`. Any other implements `RequestStore`, with everything in the package
`tinsmith.store`. Its records and methods grow with each feature, so they are not among the public names: such a store
is written for one release. Both pass `tinsmith.testing.RequestStoreContract`.
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
