"""The JSON bodies of the API: Tinker's, field for field as SDK 0.38.0 sends and reads them, and our own.

In a body that changes numbers (`ExactBody`), a field that no SDK has is refused: `unknown_fields.py`. In all others it
is ignored, so that a newer SDK still works. `docs/field_status.py` has the status of each known one, `bounds.py` its
bounds. Protobuf bodies are in `tinsmith.protocol.proto`. Models of answers leave out what is None.

Our own are for the page and for `tinsmith runs` and `status`: `rollouts`, `engines`, and all of `runs` except
`TrainingRun`.
"""

from tinsmith.protocol.wire.accounts import *  # noqa: F403
from tinsmith.protocol.wire.engines import *  # noqa: F403
from tinsmith.protocol.wire.fields import *  # noqa: F403
from tinsmith.protocol.wire.futures import *  # noqa: F403
from tinsmith.protocol.wire.passes import *  # noqa: F403
from tinsmith.protocol.wire.rollouts import *  # noqa: F403
from tinsmith.protocol.wire.runs import *  # noqa: F403
from tinsmith.protocol.wire.sampling import *  # noqa: F403
from tinsmith.protocol.wire.searches import *  # noqa: F403
from tinsmith.protocol.wire.service import *  # noqa: F403
from tinsmith.protocol.wire.sessions import *  # noqa: F403
from tinsmith.protocol.wire.training import *  # noqa: F403
from tinsmith.protocol.wire.weights import *  # noqa: F403
