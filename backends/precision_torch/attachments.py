"""What ``prepare`` ties to an optimizer instance: master weights, and the module state to restore when a step is skipped."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from precision_torch.masters import MasterWeights
    from precision_torch.skipped_state import SkippedState

_ATTRIBUTE = "_precision_attachments"


@dataclasses.dataclass
class Attachments:
    """Kept as an attribute of the optimizer; ``torch.optim`` leaves it out of copies and pickles of the optimizer."""

    masters: MasterWeights | None = None
    guards: list[SkippedState] = dataclasses.field(default_factory=list)


_NONE = Attachments()


def attachments(optimizer: torch.optim.Optimizer) -> Attachments:
    """What was attached to an optimizer; empty if nothing was."""
    return getattr(optimizer, _ATTRIBUTE, _NONE)


def attach(optimizer: torch.optim.Optimizer) -> Attachments:
    """The attachments of an optimizer, to add to."""
    if not hasattr(optimizer, _ATTRIBUTE):
        setattr(optimizer, _ATTRIBUTE, Attachments())
    found: Attachments = getattr(optimizer, _ATTRIBUTE)
    return found
