"""The contract suites for backends, stores and schedulers, and other tools for a plugin author's tests.

Needs the extra `tinsmith[testing]`. Suites are base classes: subclass, override the fixtures, run pytest.
"""

import pytest

pytest.register_assert_rewrite(  # before they are imported, or a failure would read "assert False"
    "tinsmith.testing.abuse_sampling",
    "tinsmith.testing.abuse_tally",
    "tinsmith.testing.abuse_training",
    "tinsmith.testing.contract",
    "tinsmith.testing.model_driver",
    "tinsmith.testing.full_fine_tuning_contract",
    "tinsmith.testing.training_isolation",
    "tinsmith.testing.training_numerics",
    "tinsmith.testing.training_optimizer",
    "tinsmith.testing.training_routing",
    "tinsmith.testing.training_state",
    "tinsmith.testing.sampling_drawing",
    "tinsmith.testing.sampling_logprobs",
    "tinsmith.testing.sampling_snapshots",
    "tinsmith.testing.sampling_suite",
    "tinsmith.testing.checkpoint_contract",
    "tinsmith.testing.consistency_contract",
    "tinsmith.testing.store_records",
    "tinsmith.testing.store_suite",
    "tinsmith.testing.store_log",
    "tinsmith.testing.store_recovery",
    "tinsmith.testing.store_leases",
    "tinsmith.testing.store_contract",
    "tinsmith.testing.scheduler_contract",
    "tinsmith.testing.loss_contract",
)

from tinsmith.testing.abuse_full import FullAbuseContract  # noqa: E402
from tinsmith.testing.abuse_sampling import SamplingAbuseContract  # noqa: E402
from tinsmith.testing.abuse_training import TrainingAbuseContract  # noqa: E402
from tinsmith.testing.backend_context import backend_context  # noqa: E402
from tinsmith.testing.checkpoint_contract import CheckpointContract  # noqa: E402
from tinsmith.testing.consistency_contract import ConsistencyContract  # noqa: E402
from tinsmith.testing.contract import assert_close_arrays, assert_same_arrays, assert_same_state  # noqa: E402
from tinsmith.testing.engine_driver import EngineDriver  # noqa: E402
from tinsmith.testing.full_fine_tuning_contract import FullFineTuningContract  # noqa: E402
from tinsmith.testing.full_suite import FullDriver  # noqa: E402
from tinsmith.testing.harness import running_server  # noqa: E402
from tinsmith.testing.loss_contract import LossContract  # noqa: E402
from tinsmith.testing.model_driver import ModelDriver, logprobs_of, ragged_data, succeeded  # noqa: E402
from tinsmith.testing.sampling_contract import SamplingBackendContract  # noqa: E402
from tinsmith.testing.sampling_suite import in_one_loop  # noqa: E402
from tinsmith.testing.scheduler_contract import SchedulerContract  # noqa: E402
from tinsmith.testing.store_contract import RequestStoreContract  # noqa: E402
from tinsmith.testing.training_contract import TrainingBackendContract  # noqa: E402
from tinsmith.testing.training_routing import RoutingReplayContract, random_experts  # noqa: E402
from tinsmith_checkpoints.huggingface.tiny_model import TinyShape, write_tiny_model  # noqa: E402 - see above

__all__ = [
    "CheckpointContract",
    "ConsistencyContract",
    "EngineDriver",
    "FullAbuseContract",
    "FullDriver",
    "FullFineTuningContract",
    "LossContract",
    "ModelDriver",
    "RequestStoreContract",
    "RoutingReplayContract",
    "SamplingAbuseContract",
    "SamplingBackendContract",
    "SchedulerContract",
    "TinyShape",
    "TrainingAbuseContract",
    "TrainingBackendContract",
    "assert_close_arrays",
    "assert_same_arrays",
    "assert_same_state",
    "backend_context",
    "in_one_loop",
    "logprobs_of",
    "ragged_data",
    "random_experts",
    "running_server",
    "succeeded",
    "write_tiny_model",
]
