"""How ``mp.island`` and ``mp.op`` show in a traced graph: ops made inside carry the region's number as an attribute.

The regions in force are kept by thread; while no function is traced for ``mp.autocast`` they mark nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from typing import NamedTuple

_local = threading.local()
_numbers = itertools.count(1)


class Region(NamedTuple):
    """A region that the author has marked.

    Attributes:
        number: of this entry into it.
        dtype: what ``mp.island`` keeps.
        family: what ``mp.op`` says its ops are.
    """

    number: int
    dtype: str | None = None
    family: str | None = None


def current() -> Region | None:
    """The innermost region that the running code is in."""
    regions = getattr(_local, "regions", ())
    return regions[-1] if regions else None


@contextlib.contextmanager
def region(dtype: str | None = None, family: str | None = None) -> Iterator[None]:
    """Be in a region."""
    if not hasattr(_local, "regions"):
        _local.regions = []
    _local.regions.append(Region(next(_numbers), dtype, family))
    try:
        yield
    finally:
        _local.regions.pop()


def tracing() -> bool:
    """Whether a function is being traced for ``mp.autocast`` in this thread."""
    return getattr(_local, "tracing", 0) > 0


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """While a function is being traced. Regions entered outside do not reach inside."""
    before, _local.regions = getattr(_local, "regions", []), []
    _local.tracing = getattr(_local, "tracing", 0) + 1
    try:
        yield
    finally:
        _local.tracing -= 1
        _local.regions = before


@contextlib.contextmanager
def replaying() -> Iterator[None]:
    """While a traced function is replayed: nothing is marked."""
    before, _local.regions = getattr(_local, "regions", []), []
    depth, _local.tracing = getattr(_local, "tracing", 0), 0
    try:
        yield
    finally:
        _local.regions, _local.tracing = before, depth
