"""The loss-scale rule, written once: its settings, its state, and the pure function that moves one to the next.

Every backend calls :func:`next_state` with its own arrays, so the trajectory is the same bit for bit everywhere.
"""

from __future__ import annotations

import abc
import math
import numbers
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import pydantic

from precision._model import FrozenModel
from precision.errors import PolicyError, StateError

STATE_VERSION = 1

_DYNAMIC_ONLY = (
    "growth_factor", "backoff_factor", "growth_interval", "minimum", "maximum", "hysteresis", "hysteresis_refill",
)  # fmt: skip


class LossScale(FrozenModel):
    """How the loss is scaled so that small float16 gradients do not flush to zero.

    Attributes:
        mode: ``"none"`` (no scaling and no finite check), ``"static"`` (a constant factor; non-finite steps are
            skipped) or ``"dynamic"`` (the factor adapts; non-finite steps are skipped).
        initial: the scale at the first step.
        growth_factor: the scale is multiplied by this after ``growth_interval`` finite steps in a row; above 1.
        backoff_factor: and by this on a non-finite step (see ``hysteresis``); between 0 and 1.
        growth_interval: finite steps in a row before the scale grows; at least 1.
        minimum: the scale never falls below this; above 0.
        maximum: the scale never rises above this; finite.
        hysteresis: non-finite steps tolerated before backing off: 1 backs off at once.
        hysteresis_refill: when the tolerance is restored: ``"on_growth"`` of the scale, or ``"on_finite_step"``.
        max_consecutive_skips: raise ``NonFiniteGradientsError`` after more than this many skipped steps in a row.
            None never raises. It is looked at when the state is read on the host, never by stalling the device each step.

    Raises:
        PolicyError: a value is out of range, a bool stands for a number, or a setting contradicts ``mode``.

    Example:
        >>> LossScale(mode="dynamic", initial=1024.0).growth_interval
        2000
    """

    mode: Literal["none", "static", "dynamic"] = "none"
    initial: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    minimum: float = 2.0**-24
    maximum: float = 2.0**126
    hysteresis: int = 1
    hysteresis_refill: Literal["on_growth", "on_finite_step"] = "on_growth"
    max_consecutive_skips: int | None = None

    @pydantic.model_validator(mode="after")
    def _check(self) -> LossScale:
        bad: list[tuple[str, str]] = []

        def need(field: str, ok: bool, what: str) -> None:
            if not ok:
                bad.append((field, f"must be {what} (given: {getattr(self, field)!r})"))

        need("initial", 0 < self.initial <= _FLOAT32_MAX, "above 0 and representable in float32")
        need("growth_factor", 1 < self.growth_factor <= _FLOAT32_MAX, "above 1 and finite")
        need("backoff_factor", 0 < self.backoff_factor < 1, "above 0 and below 1")
        need("growth_interval", 1 <= self.growth_interval < 2**31, "at least 1 and below 2**31")
        need("minimum", _FLOAT32_TINY <= self.minimum, "above 0 and a normal float32 (2**-126 or more)")
        need("maximum", self.maximum <= _FLOAT32_MAX, "finite in float32")
        need("hysteresis", 1 <= self.hysteresis < 2**31, "at least 1")
        if self.max_consecutive_skips is not None:
            need("max_consecutive_skips", 1 <= self.max_consecutive_skips < 2**31, "at least 1, or left out")
        if self.mode == "dynamic" and not bad and not self.minimum <= self.initial <= self.maximum:
            bad.append(("initial", f"must lie in [minimum, maximum] = [{self.minimum!r}, {self.maximum!r}]"))
        idle = {"dynamic": (), "static": _DYNAMIC_ONLY, "none": ("initial", *_DYNAMIC_ONLY, "max_consecutive_skips")}
        for field in idle[self.mode]:
            if getattr(self, field) != type(self).model_fields[field].default:
                bad.append((field, f"has no effect with mode = {self.mode!r}; leave it out or change mode"))
        if bad:
            raise PolicyError("; ".join(f"{k}: {m}" for k, m in bad), bad)
        return self

    def effective(self) -> dict[str, Any]:
        """The fields that have an effect in this mode, as plain values (what a config file needs to hold)."""
        names = {"none": ("mode",), "static": ("mode", "initial", "max_consecutive_skips")}.get(
            self.mode, tuple(type(self).model_fields)
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def initial_scale(self) -> float:
        """The scale at the first step: ``initial``, or 1 with mode ``"none"``."""
        return 1.0 if self.mode == "none" else self.initial


_FLOAT32_MAX = float(np.finfo(np.float32).max)
_FLOAT32_TINY = float(np.finfo(np.float32).tiny)


class LossScaleState(NamedTuple):
    """What the rule remembers from step to step; each field is a scalar of the backend's array type.

    Attributes:
        scale: float32, the factor on the loss.
        good_steps: int32, finite steps since the scale last moved or a step was skipped.
        hysteresis_left: int32, non-finite steps still tolerated before backing off.
        skipped: int32, steps skipped in total.
        consecutive_skips: int32, steps skipped in a row up to now.
    """

    scale: Any
    good_steps: Any
    hysteresis_left: Any
    skipped: Any
    consecutive_skips: Any


class ArrayOps(Protocol):
    """The three functions :func:`next_state` needs (``numpy`` itself will do).

    ``minimum`` and ``maximum`` get an array and a Python number.
    """

    def where(self, condition: Any, x: Any, y: Any, /) -> Any: ...
    def minimum(self, x: Any, y: Any, /) -> Any: ...
    def maximum(self, x: Any, y: Any, /) -> Any: ...


def next_state(config: LossScale, state: LossScaleState, finite: Any, xp: ArrayOps) -> LossScaleState:
    """Return the state after a step whose gradients were, or were not, all finite. Pure and branch-free.

    A finite step counts up, and after ``growth_interval`` of them in a row the scale grows (up to ``maximum``). A
    non-finite one is skipped, starts the count again and, once the hysteresis is used up, the scale backs off (down to
    ``minimum``). With ``hysteresis = 1`` and no bound reached this is the rule of ``torch.amp.GradScaler`` and of
    Keras. Products are taken in float32, factors included.

    Args:
        config: the settings; with mode ``"static"`` the scale stays and only the counters move; ``"none"`` changes nothing.
        state: the state the step was taken with.
        finite: boolean scalar, whether all gradients on all replicas were finite.
        xp: ``where``, ``minimum`` and ``maximum`` for the arrays in ``state``.

    Returns:
        The new state, with the dtypes of the old.

    Example:
        >>> config = LossScale(mode="dynamic", initial=8.0)
        >>> float(next_state(config, initial_state(config), np.bool_(False), np).scale)
        4.0
    """
    if config.mode == "none":
        return state
    counted = state.good_steps + 1
    due = counted >= config.growth_interval
    left = xp.maximum(state.hysteresis_left - 1, 0)
    if config.mode == "dynamic":
        grown = xp.where(due, xp.minimum(state.scale * config.growth_factor, config.maximum), state.scale)
        backed = xp.where(left <= 0, xp.maximum(state.scale * config.backoff_factor, config.minimum), state.scale)
        scale = xp.where(finite, grown, backed)
    else:
        scale = state.scale
    full = left * 0 + config.hysteresis
    refilled = full if config.hysteresis_refill == "on_finite_step" else xp.where(due, full, state.hysteresis_left)
    return LossScaleState(
        scale=scale,
        good_steps=xp.where(finite, xp.where(due, counted * 0, counted), counted * 0),
        hysteresis_left=xp.where(finite, refilled, left),
        skipped=xp.where(finite, state.skipped, state.skipped + 1),
        consecutive_skips=xp.where(finite, state.consecutive_skips * 0, state.consecutive_skips + 1),
    )


def initial_state(config: LossScale) -> LossScaleState:
    """The state before the first step, as NumPy scalars (float32, int32)."""
    zero = np.int32(0)
    return LossScaleState(np.float32(config.initial_scale), zero, np.int32(config.hysteresis), zero, zero)


def state_to_dict(state: LossScaleState) -> dict[str, float | int]:
    """Return the state as a flat dict of plain numbers: ``version`` and the five fields. The same on every backend.

    Reads the values, so on an accelerator it waits for the device.
    """
    scale, *counters = state
    plain: dict[str, float | int] = {"version": STATE_VERSION, "scale": float(scale)}
    plain.update((name, int(value)) for name, value in zip(LossScaleState._fields[1:], counters, strict=True))
    return plain


def state_from_dict(config: LossScale, saved: Mapping[str, Any]) -> LossScaleState:
    """Read a saved state back, as NumPy scalars.

    Besides our own dicts this takes, as mappings of plain numbers, the native states of ``torch.amp.GradScaler``
    (``scale``, ``_growth_tracker``), Keras' ``LossScaleOptimizer`` (``dynamic_scale``, ``step_counter``) and flax'
    ``DynamicScale`` (``scale``, ``fin_steps``); only the state is taken from them, the settings stay those of ``config``.

    With mode ``"static"`` or ``"none"`` the scale is the one ``config`` fixes; only the counters are taken.

    Args:
        config: the settings to resume under.
        saved: the saved mapping.

    Raises:
        StateError: not a loss-scale state, of another version, truncated, or a value out of range. Nothing is changed.

    Example:
        >>> config = LossScale(mode="dynamic")
        >>> state_from_dict(config, state_to_dict(initial_state(config))) == initial_state(config)
        True
    """
    if not isinstance(saved, Mapping):
        raise StateError(f"a loss-scale state is a mapping of names to numbers, not {type(saved).__name__}.")
    fields = _own_fields(saved) if "version" in saved else _native_fields(config, saved)
    scale = _number(fields, "scale")
    if config.mode != "dynamic":
        scale = config.initial_scale
    elif not config.minimum <= scale <= config.maximum:
        raise StateError(
            f"the saved scale {scale!r} lies outside [minimum, maximum] = [{config.minimum!r}, {config.maximum!r}] of "
            "this policy. Widen the bounds, or start from a fresh state."
        )
    counters = [_count(fields, name) for name in LossScaleState._fields[1:]]
    never_scaled = "version" in saved and scale == 1.0 and counters[0] == counters[2] == 0
    if never_scaled and config.mode == "dynamic" and config.initial > 1.0:
        # A scale that began above 1 comes down to it through skips only (native states do not count those).
        raise StateError(
            "the saved state is that of a run without loss scaling (scale 1, no step counted): growing from 1 would take "
            "long. Start from a fresh state instead of loading it."
        )
    return LossScaleState(np.float32(scale), *(np.int32(c) for c in counters))


def _own_fields(saved: Mapping[str, Any]) -> dict[str, Any]:
    if saved["version"] != STATE_VERSION or isinstance(saved["version"], bool):
        raise StateError(
            f"the loss-scale state has version {saved['version']!r}; this release reads version {STATE_VERSION}. "
            "Load it with the release that wrote it, or start from a fresh state."
        )
    expected = {"version", *LossScaleState._fields}
    if missing := expected - set(saved):
        raise StateError(f"the loss-scale state is truncated: it lacks {', '.join(sorted(missing))}.")
    if unknown := set(saved) - expected:
        raise StateError(f"the loss-scale state has unknown entries: {', '.join(sorted(map(str, unknown)))}.")
    return dict(saved)


def _native_fields(config: LossScale, saved: Mapping[str, Any]) -> dict[str, Any]:
    for scale_key, count_key in (
        ("scale", "_growth_tracker"),
        ("dynamic_scale", "step_counter"),
        ("scale", "fin_steps"),
    ):
        if scale_key in saved and count_key in saved:
            return {
                "scale": saved[scale_key], "good_steps": saved[count_key], "hysteresis_left": config.hysteresis,
                "skipped": 0, "consecutive_skips": 0,
            }  # fmt: skip
    keys = ", ".join(sorted(map(str, saved))) or "nothing"
    raise StateError(
        f"not a loss-scale state: it holds {keys}. Expected version and {', '.join(LossScaleState._fields)}; or the "
        "native state of a GradScaler, a Keras LossScaleOptimizer or a flax DynamicScale."
    )


def _number(fields: Mapping[str, Any], name: str) -> float:
    value = fields[name]
    if hasattr(value, "item"):  # a 0-d array or tensor
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise StateError(f"the loss-scale state's {name} must be a finite number, not {value!r}.")
    return float(value)


def _count(fields: Mapping[str, Any], name: str) -> int:
    value = _number(fields, name)
    if value != int(value) or not 0 <= value < 2**31:
        raise StateError(f"the loss-scale state's {name} must be a whole number of at least 0, not {value!r}.")
    return int(value)


class LossScaler(abc.ABC):
    """The neutral loss scaler: explicit state, the same four calls on every backend, usable inside a compiled step.

    ``init()``, ``scale(loss, state)``, ``unscale(grads, state)``, ``update(state, finite)``; and on the host
    ``state_dict(state)``, ``load_state_dict(saved)`` and ``check(state)``. A backend supplies ``from_host``, ``scale``,
    ``unscale`` and the array functions ``xp``.

    Example:
        >>> scaler = precision.bind("mixed_float16", backend="jax").loss_scaler   # doctest: +SKIP
        >>> state = scaler.init()                                                # doctest: +SKIP
        >>> grads, finite = scaler.unscale(grads_of(scaler.scale(loss, state)), state)   # doctest: +SKIP
        >>> state = scaler.update(state, finite)                                 # doctest: +SKIP
    """

    xp: ArrayOps

    def __init__(self, config: LossScale) -> None:
        self.config = config

    @abc.abstractmethod
    def from_host(self, state: LossScaleState) -> LossScaleState:
        """Turn NumPy scalars into the backend's scalars (float32, int32) on its device."""

    @abc.abstractmethod
    def scale(self, loss: Any, state: LossScaleState) -> Any:
        """Multiply a loss (any float dtype, any shape) by the scale, in float32 (or the loss's wider dtype)."""

    @abc.abstractmethod
    def unscale(self, grads: Any, state: LossScaleState) -> tuple[Any, Any]:
        """Divide a tree of gradients by the scale and say, as a device scalar, whether all are finite.

        Results are float32, or the gradient's wider dtype. Leaves that are not floating point pass through.
        """

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return self.from_host(initial_state(self.config))

    def update(self, state: LossScaleState, finite: Any) -> LossScaleState:
        """The state after a step; see :func:`next_state`."""
        return next_state(self.config, state, finite, self.xp)

    def state_dict(self, state: LossScaleState) -> dict[str, float | int]:
        """Save the state as a flat dict of plain numbers; see :func:`state_to_dict`."""
        return state_to_dict(state)

    def load_state_dict(self, saved: Mapping[str, Any]) -> LossScaleState:
        """Load a state saved under any backend, or a native one; see :func:`state_from_dict`."""
        return self.from_host(state_from_dict(self.config, saved))

    def check(self, state: LossScaleState, tensors: Any = ()) -> None:
        """Raise if more than ``max_consecutive_skips`` steps in a row were skipped. Reads the state from the device.

        Args:
            state: the state after a step.
            tensors: the gradients that were not finite (:class:`~precision.divergence.NonFiniteTensor`) to name in the
                error; or a function that gives them, called only if it is raised.

        Raises:
            NonFiniteGradientsError: the run diverges; names the tensors, the way of the scale, and what to try.
        """
        limit = self.config.max_consecutive_skips
        if limit is not None and int(state.consecutive_skips) > limit:
            from precision.divergence import divergence_error

            raise divergence_error(self.config, state, tensors)
