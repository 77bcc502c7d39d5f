"""What a step returns: the native return value, and whether the step was taken, read only when asked for."""

from __future__ import annotations

from typing import Any

import torch


class StepResult:
    """The outcome of ``scaler.step(optimizer)`` or ``mp.step(optimizer)``.

    Attributes:
        value: what ``optimizer.step()`` returned; None if the step was not taken.

    ``taken`` (and the truth value) reads the device where the host does not know yet: that is what waits, not the step.

    Example:
        >>> StepResult(value=None, taken=True).taken
        True
    """

    __slots__ = ("_found_inf", "_taken", "value")

    def __init__(self, value: Any, *, taken: bool | None = None, found_inf: torch.Tensor | None = None) -> None:
        self.value = value
        self._taken = taken
        self._found_inf = found_inf

    @property
    def taken(self) -> bool:
        """Whether the parameters were updated: all gradients were finite. Waits for the device if need be."""
        if self._taken is None:
            self._taken = not bool(self._found_inf)
            self._found_inf = None
        return self._taken

    @property
    def skipped(self) -> bool:
        """Whether the step was left out for a non-finite gradient; the opposite of :attr:`taken`."""
        return not self.taken

    def __bool__(self) -> bool:
        return self.taken

    def __repr__(self) -> str:
        known = "not read yet" if self._taken is None else str(self._taken)
        return f"StepResult(value={self.value!r}, taken={known})"
