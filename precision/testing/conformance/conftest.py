"""``PRECISION_BACKEND=NAME pytest --pyargs precision.testing.conformance``: the backend to test.

An environment variable, because pytest does not read the options of a package that is named with ``--pyargs``.
"""

from __future__ import annotations

import os

import pytest

from precision.registry import register_backend
from precision.testing.conformance.kit import Kit, make_kit

VARIABLE = "PRECISION_BACKEND"


@pytest.fixture(scope="session")
def kit() -> Kit:
    """The kit for the backend that was asked for: a name, or module:Class of one that is not registered."""
    name = os.environ.get(VARIABLE, "")
    if not name:
        raise pytest.UsageError(f"name the backend: {VARIABLE}=NAME pytest --pyargs precision.testing.conformance")
    if ":" in name:
        register_backend(VARIABLE, name, replace=True)
        name = VARIABLE
    return make_kit(name)
