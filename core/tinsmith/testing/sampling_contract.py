"""The contract of sampling backends.

Subclass `SamplingBackendContract` and give it a `backend` fixture; one that does not train also needs
`adapter_shapes`. With `detokenize` and `eos_token` stop strings and the end of sequence are tested too:

    class TestMySampler(SamplingBackendContract):
        @pytest.fixture
        def backend(self, tmp_path):
            return MySampler(MyConfig(), backend_context(tmp_path))

If the backend is slow to create, create it in a module-scoped fixture that `backend` returns.

Tests of capabilities that the backend does not claim are skipped.
"""

from tinsmith.testing.abuse_sampling import SamplingAbuseContract
from tinsmith.testing.sampling_divergence import DivergenceContract
from tinsmith.testing.sampling_drawing import DrawingContract
from tinsmith.testing.sampling_inflight import InflightContract
from tinsmith.testing.sampling_logprobs import LogprobsContract
from tinsmith.testing.sampling_sleep import SamplerSleepContract
from tinsmith.testing.sampling_snapshots import CompanyContract, SnapshotsContract


class SamplingBackendContract(
    DrawingContract,
    LogprobsContract,
    SnapshotsContract,
    CompanyContract,
    DivergenceContract,
    InflightContract,
    SamplerSleepContract,
    SamplingAbuseContract,
):
    """Everything about sampling."""
