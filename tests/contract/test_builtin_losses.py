import pytest

from tinsmith.losses import BUILTIN_LOSSES, LossSpec
from tinsmith.testing import LossContract


class TestBuiltinLosses(LossContract):
    @pytest.fixture(params=BUILTIN_LOSSES, ids=lambda loss: loss.name)
    def loss(self, request: pytest.FixtureRequest) -> LossSpec:
        spec: LossSpec = request.param
        return spec
