"""What ``prepare`` ties to an optimizer instance: master weights, the module state to restore when a step is skipped, and who
else trains the same model.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from precision_torch.masters import MasterWeights
    from precision_torch.skipped_state import SkippedState

_ATTRIBUTE = "_precision_attachments"


@dataclasses.dataclass
class Attachments:
    """Kept as an attribute of the optimizer; ``torch.optim`` leaves it out of copies and pickles of the optimizer.

    Attributes:
        masters: the float32 masters of its low-precision parameters.
        guards: what goes back to where it was when a step is skipped.
        wrappers: the DDP and FSDP1 modules of the models it was prepared with.
        names: its parameters' names in those models.
    """

    masters: MasterWeights | None = None
    guards: list[SkippedState] = dataclasses.field(default_factory=list)
    wrappers: list[weakref.ref[torch.nn.Module]] = dataclasses.field(default_factory=list)
    names: dict[torch.nn.Parameter, str] = dataclasses.field(default_factory=dict)


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
