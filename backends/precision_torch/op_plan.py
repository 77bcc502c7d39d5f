"""What has to be done to which function, so that ``torch.autocast`` and this together give the table's decisions.

A plan is made once a policy and device type. Functions that ``torch.autocast`` treats as the table asks are not in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from precision.ops import FAMILIES, family_dtype
from precision.policy import PrecisionPolicy
from precision_torch.native_lists import NATIVE
from precision_torch.op_families import APART, FAMILY, MEETS, namespaces

SPECIAL: dict[str, str] = {
    "__rdiv__": "quotient", "__rtruediv__": "quotient", "interpolate": "resize", "upsample": "resize",
    "where": "constants", "masked_fill": "constants", "masked_fill_": "constants",
    "scaled_dot_product_attention": "attention", "baddbmm": "attention",
    "lstm_cell": "cell", "gru_cell": "cell", "rnn_tanh_cell": "cell", "rnn_relu_cell": "cell",
    **dict.fromkeys(
        ("__setitem__", "index_put_", "index_add_", "index_copy_", "scatter_", "scatter_add_", "scatter_reduce_",
         "masked_scatter_", "lerp_"), "into"),
    "batch_norm": "statistics", "instance_norm": "statistics",
    "multi_head_attention_forward": "body", "linear_cross_entropy": "body",
}  # fmt: skip
"""Functions with a treatment of their own in :mod:`precision_torch.op_treatments`, by bare name."""


MADE_OF_OTHERS = (
    frozenset(
        """corrcoef cov norm nuclear_norm triplet_margin_with_distance_loss pairwise_distance __rdiv__ __rtruediv__""".split()  # noqa: SIM905
    )
    | APART
)
"""Functions, beside those of ``linalg``, that come to others inside which would be treated once more."""


class Plan:
    """The treatment of each function that needs one.

    Attributes:
        number: what the plan is known by to :func:`treatment_of`, also while the compiler traces.
        policy, device_type, only: what it was made of; see :func:`plan_for`.
        enabled: whether native autocasting is on where the plan is in force; elsewhere it rests.
        low: the dtype of native autocasting: the compute dtype, or, where that is float32, a rule's.
        families: the dtype of each family that has one; None for one that promotes or follows.
        treatments: by function: ``"compute"``, a dtype's name, ``"promote"``, ``"follow"``, or one of :data:`SPECIAL`; and
            whether native autocasting has to be off while it runs.
    """

    def __init__(self, policy: PrecisionPolicy, device_type: str, only: frozenset[str] | None = None) -> None:
        self.policy, self.device_type, self.only = policy, device_type, only
        self.enabled = only is None
        self.families = {name: family_dtype(policy, name) for name in FAMILIES}
        self.low = native_dtype(policy)
        self.treatments: dict[Any, tuple[str, bool]] = {}
        for function, name in functions():
            family = FAMILY.get(name.removesuffix("_") if name == "masked_fill_" else name, "")
            if only is not None and family not in only:
                continue
            native = NATIVE.get(device_type, {}).get(name) if self.enabled else None
            treatment = self._treatment(name, family, native)
            if treatment is not None:
                off = (
                    native is not None or family in ("linalg", "matmul", "conv", "attention") or name in MADE_OF_OTHERS
                )
                plain = self.families.get(family) in (None, "float32")
                parts = treatment in ("cell", "body", "into")  # treated themselves, or not at all
                self.treatments[function] = treatment, self.enabled and not parts and (off or not plain)
        if self.treatments and self.enabled:
            self.treatments[torch._C._set_grad_enabled] = "grad_mode", False
            self.treatments[torch.Tensor.unflatten] = "unflatten", False
        self.number = len(_PLANS)
        _PLANS.append(self)

    def code(self, family: str) -> str:
        """The treatment of a family where no function of it is special."""
        target = self.families[family]
        if target is not None:
            return "compute" if self.enabled and target == self.low else target
        return FAMILIES[family].treatment

    def _treatment(self, name: str, family: str, native: str | None) -> str | None:
        special = SPECIAL.get(name)
        if special is not None or not family:
            return special
        target = self.families[family]
        if target is not None:
            given = {"low": self.low, "float32": "float32"}.get(native or "")
            return None if given == target else self.code(family)
        if FAMILIES[family].treatment == "follow":
            return "follow" if native is not None else None
        if native == "promote" or (native is None and name not in MEETS and name not in APART):
            return None
        return "promote"


_PLANS: list[Plan] = []


@functools.lru_cache(maxsize=256)
def plan_for(policy: PrecisionPolicy, device_type: str, only: frozenset[str] | None = None) -> Plan:
    """The plan of a policy on a device type.

    Args:
        policy: the policy.
        device_type: ``"cpu"``, ``"cuda"``, ...
        only: families that alone are treated, with native autocasting off: in a module under a rule of its own, those
            with a rule that comes before it.
    """
    return Plan(policy, device_type, only)


def native_dtype(policy: PrecisionPolicy) -> str | None:
    """The low dtype that native autocasting casts to under a policy; None if nothing in it computes low."""
    if policy.compute_dtype != "float32":
        return policy.compute_dtype
    return next((rule.dtype for rule in policy.family_rules if rule.dtype != "float32"), None)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def treatment_of(number: int, function: Any) -> tuple[str, bool] | None:
    """A function's treatment in a plan; while the compiler traces, a constant, rather than a dict to guard."""
    return _PLANS[number].treatments.get(function)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def code_of(number: int, family: str) -> str:
    """The treatment of a family in a plan, as a constant."""
    return _PLANS[number].code(family)


def functions() -> Iterator[tuple[Callable[..., Any], str]]:
    """Every public function that the table or :data:`SPECIAL` names, with its bare name."""
    for space in namespaces().values():
        for name in {**FAMILY, **SPECIAL}:
            function = getattr(space, name, None)
            if callable(function) and not isinstance(function, type):
                yield function, name
            elif space is torch.Tensor and function is not None and not isinstance(function, type):
                yield function.__get__, name  # a property, such as T
