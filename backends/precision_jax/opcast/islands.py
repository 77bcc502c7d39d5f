"""Where an author casts to float32 what was traced in float32: such a cast leaves no equation behind.

(Filled in below.)
"""

from __future__ import annotations

from typing import Any


def find(flat: Any, closed: Any, values: Any, compute: Any) -> dict[Any, Any]:
    return {}
