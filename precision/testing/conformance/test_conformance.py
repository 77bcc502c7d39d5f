"""The kit's checks as tests, for ``PRECISION_BACKEND=NAME pytest --pyargs precision.testing.conformance``."""

from __future__ import annotations

import pytest

from precision.testing.conformance.kit import CHECKS, Check, Kit, run_check


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_conforms(check: Check, kit: Kit) -> None:
    """The backend does what the check's name says; an optional part it does not have is skipped, by name."""
    result = run_check(check, kit)
    if result.outcome == "not offered":
        pytest.skip(result.message)
    if result.outcome == "failed":
        pytest.fail(result.message, pytrace=False)
