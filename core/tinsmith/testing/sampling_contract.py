"""What every sampling backend must do.

Subclass `SamplingBackendContract` and give it a `backend` fixture; one that does not train also needs
`adapter_shapes`. With `detokenize` and `eos_token` stop strings and the end of sequence are tested too:

    class TestMySampler(SamplingBackendContract):
        @pytest.fixture
        def backend(self, tmp_path):
            return MySampler(MyConfig(), backend_context(tmp_path))

One that is slow to make is made once: `backend` returns what a fixture of the whole module made.

Tests of what its capabilities do not claim are skipped.
"""

from tinsmith.testing.sampling_drawing import DrawingContract
from tinsmith.testing.sampling_logprobs import LogprobsContract
from tinsmith.testing.sampling_snapshots import CompanyContract, SnapshotsContract


class SamplingBackendContract(DrawingContract, LogprobsContract, SnapshotsContract, CompanyContract):
    """Everything about sampling."""
