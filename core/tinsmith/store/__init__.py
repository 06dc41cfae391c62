"""The request store's interface: the records that it holds, and the class that a store implements."""

from tinsmith.store.records.access import *  # noqa: F403 - a name stands where it is defined, and nowhere again
from tinsmith.store.records.checkpoints import *  # noqa: F403
from tinsmith.store.records.completions import *  # noqa: F403
from tinsmith.store.records.curves import *  # noqa: F403
from tinsmith.store.records.engines import *  # noqa: F403
from tinsmith.store.records.operations import *  # noqa: F403
from tinsmith.store.records.places import *  # noqa: F403
from tinsmith.store.records.runs import *  # noqa: F403
from tinsmith.store.records.sampling import *  # noqa: F403
from tinsmith.store.records.sessions import *  # noqa: F403
from tinsmith.store.records.usage import *  # noqa: F403
from tinsmith.store.request_store import *  # noqa: F403
from tinsmith.store.shares import *  # noqa: F403
from tinsmith.store.tables import *  # noqa: F403
