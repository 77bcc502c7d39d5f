"""What a backend must supply, and what a bound policy offers: the contract between the core and the frameworks."""

from __future__ import annotations

import abc
import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, Literal

from precision.errors import MixedFrameworksError, PrecisionWarning, UnsupportedError
from precision.loss_scale import LossScaler
from precision.ops import OpEntry
from precision.policy import PrecisionPolicy


@dataclasses.dataclass(frozen=True)
class Capability:
    """What a device can do with a dtype.

    Attributes:
        device: the framework's name for the device (``"cpu"``, ``"cuda:0"``, ``"GPU:0"``).
        dtype: canonical dtype name.
        support: ``"native"`` (hardware arithmetic), ``"slow"`` (works, without hardware support: slower than float32),
            ``"storage"`` (casts only, no arithmetic) or ``"none"``.
        reason: how that is known, in a sentence.
    """

    device: str
    dtype: str
    support: Literal["native", "slow", "storage", "none"]
    reason: str


class BoundPolicy(abc.ABC):
    """A policy tied to one backend; made by :func:`precision.bind`. Backends add their framework's own members.

    Attributes:
        policy: the policy.
        backend: the backend.
        loss_scaler: the neutral, explicit-state :class:`~precision.LossScaler`.
    """

    policy: PrecisionPolicy
    backend: Backend
    loss_scaler: LossScaler
    _told_of_families = False

    def _warn_of_families(self, instead: str) -> None:
        """Warn, once, that rules for op families do not reach what the caller of this method's caller asked for.

        Args:
            instead: what it does instead, as the end of a sentence.
        """
        if self.policy.family_rules and not self._told_of_families:
            self._told_of_families = True
            names = ", ".join(sorted({str(rule.family) for rule in self.policy.family_rules}))
            warnings.warn(
                f"rules for op families ({names}) reach only functions marked with mp.op(family); {instead}.",
                PrecisionWarning,
                stacklevel=3,
            )

    @abc.abstractmethod
    def autocast(self, *args: Any, **kwargs: Any) -> Any:
        """The framework's form of running code under the policy."""

    @abc.abstractmethod
    def island(self, dtype: str = "float32") -> Any:
        """A region, usable as a decorator, that keeps a dtype whatever is around it."""

    @abc.abstractmethod
    def op(self, family: str) -> Any:
        """A decorator that casts a function's floating inputs as its op family asks (:func:`precision.ops.decide`)."""

    @abc.abstractmethod
    def cast_to_param(self, tree: Any) -> Any:
        """Cast a tree's floating leaves (not float64) to the parameter dtype; a rule for a leaf's path wins."""

    @abc.abstractmethod
    def cast_to_compute(self, tree: Any) -> Any:
        """Cast a tree's floating leaves (not float64) to the compute dtype; a rule for a leaf's path wins."""

    @abc.abstractmethod
    def cast_to_output(self, tree: Any) -> Any:
        """Cast a tree's floating leaves (not float64) to the output dtype."""

    @abc.abstractmethod
    def optimizer(self, optimizer: Any, **kwargs: Any) -> Any:
        """The framework's own kind of optimizer, made to scale, skip and unscale as the policy says."""


class Backend(abc.ABC):
    """One framework's implementation. A subclass is registered by name; see ``docs/writing-a-backend.md``.

    Attributes:
        name: the backend's registered name.
        framework: the import name of its framework.
    """

    name: str
    framework: str

    @abc.abstractmethod
    def bind(self, policy: PrecisionPolicy, **options: Any) -> BoundPolicy:
        """Tie a policy to this backend.

        Raises:
            UnsupportedError: the device cannot do what the policy asks, with what it can do.
        """

    @abc.abstractmethod
    def versions(self) -> dict[str, str]:
        """Versions of the framework and of the packages this backend uses, by import name."""

    @abc.abstractmethod
    def capabilities(self) -> list[Capability]:
        """What each visible device can do with each dtype of :data:`precision.formats.DTYPES`."""

    def op_table(self) -> list[OpEntry]:
        """Every op of the framework that op-level autocast knows, with its family, by name."""
        raise UnsupportedError(f"backend {self.name!r} has no op-level autocast.")

    def parity(self) -> Any:
        """The backend's adapter for the parity suite (:class:`precision.parity.ParityAdapter`)."""
        raise UnsupportedError(f"backend {self.name!r} supplies no parity adapter.")


# ---- checks that every backend takes alike -----------------------------------------------------------------------

_FRAMEWORK_ROOTS = {"torch": "torch", "tensorflow": "tensorflow", "keras": "tensorflow", "jax": "jax", "jaxlib": "jax"}


def check_leaf(leaf: Any, framework: str) -> None:
    """Refuse a tensor of another framework. NumPy arrays and plain Python values belong to none.

    Args:
        leaf: a leaf of a tree.
        framework: ``"torch"``, ``"tensorflow"`` or ``"jax"``, the one the policy is bound to.

    Raises:
        MixedFrameworksError: the leaf is another framework's tensor.
    """
    owner = _FRAMEWORK_ROOTS.get(type(leaf).__module__.partition(".")[0])
    if owner is not None and owner != framework:
        raise MixedFrameworksError(
            f"a tree given to the {framework} backend holds a {type(leaf).__module__}.{type(leaf).__qualname__}, which is "
            f"{owner}'s. Convert it (through numpy), or bind the policy with backend={owner!r}."
        )


def require_supported(policy: PrecisionPolicy, capabilities: Iterable[Capability], device: str) -> None:
    """Refuse a policy that the device cannot carry out, rather than run it in another dtype.

    Parameters, computation and reduction need arithmetic in their dtype; outputs only casts.

    Raises:
        UnsupportedError: names field, dtype, device, the reason and the dtypes the device has.
    """
    by_dtype = {capability.dtype: capability for capability in capabilities if capability.device == device}
    usable = [dtype for dtype, c in by_dtype.items() if c.support in ("native", "slow")]
    if policy.emulate:
        raise UnsupportedError(
            "emulate = true: this backend does not emulate low formats. Set emulate = false and use one of "
            f"{', '.join(usable)}."
        )
    for field in ("param_dtype", "compute_dtype", "reduce_dtype", "output_dtype"):
        dtype = getattr(policy, field)
        found = by_dtype.get(dtype)
        enough = ("native", "slow", "storage") if field == "output_dtype" else ("native", "slow")
        if found is None or found.support not in enough:
            reason = found.reason if found else "the device does not list it"
            raise UnsupportedError(f"{field} {dtype}: not on {device}: {reason}. This device has {', '.join(usable)}.")
    for rule in policy.rules:
        if rule.dtype not in usable:
            where = rule.module or rule.family
            raise UnsupportedError(
                f"rule {where!r}: dtype {rule.dtype} not on {device}, which has {', '.join(usable)}."
            )


def warn_idle_reduce(policy: PrecisionPolicy, stacklevel: int = 4) -> None:
    """Warn that a reduce dtype other than float32 has no effect in a backend that reduces over no replicas."""
    if policy.reduce_dtype != "float32":
        warnings.warn(
            f"reduce_dtype {policy.reduce_dtype} has no effect here: on one device gradients accumulate in the dtype of "
            "the parameters (float32 with master weights).",
            PrecisionWarning,
            stacklevel=stacklevel,
        )


def warn_unmatched(policy: PrecisionPolicy, paths: Iterable[str], what: str) -> None:
    """Warn of module rules that cover none of the given module or parameter paths (usually a misspelt pattern)."""
    known = list(paths)
    for rule in policy.unmatched_rules(known):
        shown = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
        warnings.warn(f"rule {rule.module!r} matched nothing in {what}: {shown}", PrecisionWarning, stacklevel=3)
