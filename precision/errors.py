"""Every error this library raises on purpose, in one hierarchy.

Each message says what was wrong and what to do about it. Each class also derives from the built-in exception that
callers would expect (``ValueError`` for a bad value, ``ImportError`` for a missing framework, ...), so existing
``except`` clauses keep working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class PrecisionError(Exception):
    """Base of all errors raised by this library."""


class PolicyError(PrecisionError, ValueError):
    """A policy, rule or loss-scale setting is not valid.

    Attributes:
        problems: pairs ``(key, message)``, one a fault; ``key`` is the dotted path of the field (``"loss_scale.initial"``).
    """

    def __init__(self, message: str, problems: Iterable[tuple[str, str]] = ()) -> None:
        super().__init__(message)
        self.problems: tuple[tuple[str, str], ...] = tuple(problems)


class ConfigError(PolicyError):
    """A precision config file cannot be read or says something that is not valid. Names file, key and line."""


class BackendNotFoundError(PrecisionError, LookupError):
    """No backend of that name is registered."""

    def __str__(self) -> str:  # KeyError-like classes would print a repr
        return str(self.args[0]) if self.args else ""


class BackendUnavailableError(PrecisionError, ImportError):
    """The backend is known, but its framework is missing, broken or too old."""


class UnsupportedError(PrecisionError, ValueError):
    """The backend or device cannot do what the policy asks. Says what it can do instead."""


class MixedFrameworksError(PrecisionError, TypeError):
    """A tree holds tensors of another framework than the one the policy is bound to."""


class LossScaleError(PrecisionError, RuntimeError):
    """The calls of a loss scaler came in an order that cannot be right (unscale twice, update before scale, ...)."""


class InteropError(PrecisionError, ValueError):
    """Another tool's config is not valid, is not recognised, or (where asked to be strict) cannot express the policy.

    Attributes:
        lost: what the target cannot express (:class:`precision.interop.Lost`), if that is what is wrong.
    """

    def __init__(self, message: str, *, lost: Iterable[Any] = ()) -> None:
        super().__init__(message)
        self.lost: tuple[Any, ...] = tuple(lost)


class StateError(PrecisionError, ValueError):
    """A saved loss-scale state is truncated, of another version, or not a loss-scale state."""


class MasterWeightsError(PrecisionError, ValueError):
    """Trainable parameters are in a low-precision dtype and no float32 master copies are kept."""


class CheckpointError(PrecisionError, ValueError):
    """A checkpoint is truncated, damaged, of another kind, or could not be written by all processes. Nothing was changed."""


class NonFiniteGradientsError(PrecisionError, FloatingPointError):
    """More steps in a row were skipped for non-finite gradients than ``max_consecutive_skips`` allows.

    Attributes:
        tensors: the gradients that were not finite (:class:`precision.divergence.NonFiniteTensor`), parameters' order.
        scales: the loss scales of the last steps and the next one, oldest first, as far as the state tells.
        consecutive_skips: steps skipped in a row.
    """

    def __init__(
        self,
        message: str,
        *,
        tensors: Iterable[Any] = (),
        scales: Iterable[float] = (),
        consecutive_skips: int = 0,
    ) -> None:
        super().__init__(message)
        self.tensors: tuple[Any, ...] = tuple(tensors)
        self.scales: tuple[float, ...] = tuple(scales)
        self.consecutive_skips = consecutive_skips


class PrecisionWarning(UserWarning):
    """Something in a policy has no effect here (a rule that matched nothing, a family no op was marked with)."""


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``" Did you mean 'x'?"`` for the closest known name, or an empty string."""
    match = difflib.get_close_matches(str(name).lower(), [str(k) for k in known], n=1, cutoff=0.6)
    return f" Did you mean {match[0]!r}?" if match else ""
