"""One thing to time two ways: by hand with the framework's own tools, and through precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Case(NamedTuple):
    """A training step, twice.

    Attributes:
        name: ``"mlp"``, ``"cnn"`` or ``"transformer"``.
        native: does one whole training step hand-written with the framework's own mixed precision, and waits for it.
        precision: does the same step through precision, and waits for it.
    """

    name: str
    native: Callable[[], object]
    precision: Callable[[], object]
