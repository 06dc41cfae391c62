"""The contract of training backends.

Subclass `TrainingBackendContract` and give it a `backend` fixture:

    class TestMyBackend(TrainingBackendContract):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(MyConfig(), backend_context(tmp_path))

If the backend is slow to create, create it in a module-scoped fixture that `backend` returns.

The backend needs a vocabulary of 32 tokens, a context of 64 and float32, and ideally has a few thousand weights.
Tests of capabilities that the backend does not claim are skipped.
"""

from tinsmith.testing.abuse_training import TrainingAbuseContract
from tinsmith.testing.training_divergence import TrainingDivergenceContract
from tinsmith.testing.training_isolation import IsolationContract
from tinsmith.testing.training_numerics import AdapterContract, NumericsContract
from tinsmith.testing.training_optimizer import OptimizerContract
from tinsmith.testing.training_routing import RoutingReplayContract
from tinsmith.testing.training_sleep import TrainerSleepContract
from tinsmith.testing.training_state import StateContract


class TrainingBackendContract(
    AdapterContract,
    NumericsContract,
    OptimizerContract,
    TrainingDivergenceContract,
    IsolationContract,
    StateContract,
    RoutingReplayContract,
    TrainerSleepContract,
    TrainingAbuseContract,
):
    """Everything about training."""
