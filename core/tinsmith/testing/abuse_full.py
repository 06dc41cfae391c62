"""The contract of abuse in full fine-tuning: as of adapters, whose steps may take another way."""

from collections.abc import Callable

import pytest

from tinsmith.testing.abuse_tally import Tally
from tinsmith.testing.abuse_training import attack
from tinsmith.testing.abuse_training_cases import cases_of
from tinsmith.testing.full_suite import FullSuite
from tinsmith.testing.model_driver import ModelDriver

_GROUPS = ("steps", "ruined weights", "random")
_ROOM = 6  # for models


class FullAbuseContract(FullSuite):
    long_form = False
    """Set this in a test that may take minutes: more values are tried, and each case alone as well."""
    random_cases = 16
    """How many random combinations are tried. Raise this there, too."""
    every = 3
    """The short form tries one of this many cases of "steps": they take longer than adapters' steps."""

    @pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of numbers that have become infinite or NaN
    @pytest.mark.parametrize("group", _GROUPS)
    def test_abuse_of_full_models_hurts_nobody(
        self, driver: ModelDriver, group: str, record_property: Callable[[str, object], None]
    ) -> None:
        cases = list(cases_of(driver.capabilities, group, self.random_cases, long_form=self.long_form))
        if group == "steps" and not self.long_form:
            cases = cases[:: self.every]
        tally = Tally(group=f"full models: {group}", cases=len(cases))
        attack(driver, cases, tally, most_models=_ROOM)
        if self.long_form:
            attack(driver, cases, tally, alone=True)
        tally.report(self, record_property)
