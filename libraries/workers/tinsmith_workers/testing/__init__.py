"""The contract suite of the workers' launchers, and workers that start at once, for a backend's tests.

Needs the extra `tinsmith-workers[testing]`. `WorkersContract` is a base class: subclass, override, run pytest.
"""

import pytest

pytest.register_assert_rewrite("tinsmith_workers.testing.contract")  # or a failure would read "assert False"

from tinsmith_workers.testing.contract import WorkersContract  # noqa: E402 - see above
from tinsmith_workers.testing.forked_workers import Nursery  # noqa: E402

__all__ = ["Nursery", "WorkersContract"]
