"""What a run that ends in skipped steps says: which tensors were not finite, how the scale came down, what to try.

Backends hand over names and counts; the words and the scale history are the same on all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import numpy as np

from precision.errors import NonFiniteGradientsError
from precision.loss_scale import LossScale, LossScaleState

SHOWN = 8
"""Tensors that the message names; the error's ``tensors`` holds all that were given."""


@dataclasses.dataclass(frozen=True)
class NonFiniteTensor:
    """A gradient with values that are not finite.

    Attributes:
        name: of the parameter, as the framework names it.
        nan: how many values are NaN; None if that was not counted.
        inf: how many are infinite; None if that was not counted.
        size: how many values it has; None if not known.
        rank: the process or replica it was seen on; None where all hold the same.
    """

    name: str
    nan: int | None = None
    inf: int | None = None
    size: int | None = None
    rank: int | None = None

    def __str__(self) -> str:
        counts = [f"{n} {what}" for n, what in ((self.nan, "NaN"), (self.inf, "inf")) if n]
        found = " and ".join(counts) + (f" of {self.size}" if self.size is not None else "") if counts else "not finite"
        return f"{self.name} ({found}{'' if self.rank is None else f', rank {self.rank}'})"


def recent_scales(config: LossScale, state: LossScaleState) -> tuple[float, ...]:
    """The loss scales of the last skipped steps and the one that comes next, oldest first, worked out from the state.

    Each skip in a row backed off by a known factor, so the way down needs no record. It ends where the state does not
    tell any more: at the last step that was not skipped, at the minimum, or where the hysteresis may have held the scale.

    Args:
        config: the settings the state came about under.
        state: scalars that can be read on the host.

    Example:
        >>> config = LossScale(mode="dynamic", initial=8.0)
        >>> recent_scales(config, LossScaleState(2.0, 0, 0, 2, 2))
        (8.0, 4.0, 2.0)
    """
    scale = np.float32(float(state.scale))
    skips, left = int(state.consecutive_skips), int(state.hysteresis_left)
    scales = [float(scale)]
    if config.mode != "dynamic" or left > 0:
        return tuple(scales * (skips + 1))
    certain = max(skips - (config.hysteresis - 1), min(skips, 1))  # the last skip has backed off in any case
    for _ in range(certain):
        if scale <= np.float32(config.minimum):
            break
        with np.errstate(over="ignore"):
            scale = np.float32(scale / np.float32(config.backoff_factor))
        if not scale <= np.float32(config.maximum):
            break
        scales.insert(0, float(scale))
    return tuple(scales)


def divergence_error(
    config: LossScale,
    state: LossScaleState,
    tensors: Iterable[NonFiniteTensor] | Callable[[], Iterable[NonFiniteTensor]] = (),
) -> NonFiniteGradientsError:
    """The error to raise when more steps in a row were skipped than ``max_consecutive_skips`` allows.

    Args:
        config: the loss-scale settings.
        state: the state after the last step, readable on the host.
        tensors: the gradients that are not finite, in the order of the parameters; or what gives them, called now.
    """
    found = tuple(tensors() if callable(tensors) else tensors)
    scales = recent_scales(config, state)
    skips = int(state.consecutive_skips)
    summary = (
        f"{skips} steps in a row had non-finite gradients and were skipped (max_consecutive_skips = "
        f"{config.max_consecutive_skips}); {int(state.skipped)} steps were skipped in all."
    )
    lines = [summary]
    if found:
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        lines.append(f"First gradients that are not finite: {', '.join(map(str, found[:SHOWN]))}{more}.")
    lines.append(f"Loss scale: {_way_down(config, scales, skips)}.")
    lines.append(_advice(config, scales[-1], found))
    return NonFiniteGradientsError("\n".join(lines), tensors=found, scales=scales, consecutive_skips=skips)


def _way_down(config: LossScale, scales: tuple[float, ...], skips: int) -> str:
    if len(set(scales)) == 1:
        at = " (the minimum)" if config.mode == "dynamic" and scales[-1] <= config.minimum else ""
        return f"{scales[-1]:g}{at} all the while" if len(scales) > skips else f"{scales[-1]:g}{at}"
    shown = [f"{scale:g}" for scale in scales]
    if len(shown) > 12:
        shown = [*shown[:4], "...", *shown[-6:]]
    return " -> ".join(shown)


def _advice(config: LossScale, scale: float, found: tuple[NonFiniteTensor, ...]) -> str:
    if config.mode == "dynamic" and scale > 1.0:
        first = (
            "The scale is still above 1 and may be coming down: allow more skips, or set a lower loss_scale.initial."
        )
    else:
        first = "At this scale the loss or a gradient is NaN or inf by itself, and no scale can mend that."
    nan = any(tensor.nan for tensor in found)
    look = (
        "Look for 0/0, log of 0, inf - inf (masks) or a bad batch" if nan else "Look for a bad batch or a division by 0"
    )
    return (
        f"{first} {look}; lower the learning rate; keep the first module named in float32 (a rule); or use bfloat16, whose "
        "range is that of float32."
    )
