"""For tests of families: the suite, and the same training in torch. Needs pytest, torch and transformers."""

import pytest

pytest.register_assert_rewrite("tinsmith_jax.testing.family_contract")

from tinsmith_jax.testing.family_contract import FamilyContract  # noqa: E402 - after that

__all__ = ["FamilyContract"]
