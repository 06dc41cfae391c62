"""What every training backend must do.

Subclass `TrainingBackendContract` and give it a `backend` fixture:

    class TestMyBackend(TrainingBackendContract):
        @pytest.fixture
        def backend(self, tmp_path):
            return MyBackend(MyConfig(), backend_context(tmp_path))

One that is slow to make is made once: `backend` returns what a fixture of the whole module made.

The backend needs a vocabulary of 32 tokens, a context of 64, float32, and at best a model of a few thousand weights.
Tests of what its capabilities do not claim are skipped.
"""

from tinsmith.testing.training_isolation import IsolationContract
from tinsmith.testing.training_numerics import AdapterContract, NumericsContract
from tinsmith.testing.training_optimizer import OptimizerContract
from tinsmith.testing.training_state import StateContract


class TrainingBackendContract(AdapterContract, NumericsContract, OptimizerContract, IsolationContract, StateContract):
    """Everything about training."""
