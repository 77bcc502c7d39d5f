"""Other tools' precision configs, both ways: one file a tool, and nothing lost silently.

>>> from precision.interop import convert
>>> convert("mixed_bfloat16", "lightning").config
{'precision': 'bf16-mixed'}
"""

from precision.interop.base import Export, Field, Import, Lost, Target
from precision.interop.convert import Difference, convert, diff, read
from precision.interop.targets import get_target, list_targets

__all__ = [
    "Difference",
    "Export",
    "Field",
    "Import",
    "Lost",
    "Target",
    "convert",
    "diff",
    "get_target",
    "list_targets",
    "read",
]
