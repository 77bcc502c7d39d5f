"""T0 and T3 for op-level autocast: what each op takes and gives under ``mp.autocast``, and how far its values are from float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from precision.formats import FloatFormat
from precision.parity.adapter import Array, ParityAdapter
from precision.parity.autocast_cases import AUTOCAST_CASES, AutocastCase
from precision.parity.tiers import TierResult
from precision.policy import PrecisionPolicy


def case_inputs(case: AutocastCase, dtype: str, seed: int = 0) -> list[Array]:
    """Draw a case's inputs and round them to a dtype; integers and bools stay, the case's ``wide`` ones are float32."""
    low = FloatFormat.of(dtype).numpy_dtype
    return [
        a if a.dtype.kind != "f" else a.astype(np.float32).astype(np.float32 if i in case.wide else low)
        for i, a in enumerate(case.make(np.random.default_rng(seed)))
    ]


def autocast_tolerance(case: AutocastCase, policy: PrecisionPolicy, inputs: Sequence[Array], expected: Array) -> Array:
    """T3's bar, elementwise: units in the last place of the compute dtype, plus float32 accumulation's own error.

    A low result may be one unit away, or as many as the op rounds in turn. A float32 one must be within 1/16 of a unit: it
    would not be had anything been computed low (rounding alone moves a value by up to half a unit). Where several results are
    rounded in turn, the units are those of the largest element: an element that cancels keeps the errors of its terms.
    """
    gives = case.result(policy, [a.dtype.name for a in inputs])
    low = gives == policy.compute_dtype or case.roundings > 1
    size = np.max(np.abs(expected)) if case.roundings > 1 else expected
    unit = np.vectorize(FloatFormat.of(policy.compute_dtype).spacing, otypes=[float])(size)
    return np.asarray((case.roundings if low else 1 / 16) * unit + 64 * 2.0**-24 * np.max(np.abs(expected)))


def tier_autocast(
    bound: Sequence[tuple[ParityAdapter, Any]], cases: Sequence[AutocastCase] = AUTOCAST_CASES
) -> tuple[TierResult, TierResult]:
    """T0 and T3 of op-level autocast: each op takes its inputs, and gives its result, in the dtypes the one table decides,
    and its values lie within the bar of the float64 result.

    Args:
        bound: adapters, each with the policy bound to its backend.
        cases: the ops; decisions are tried on float32 inputs and on inputs in the compute dtype, values on the latter.
    """
    policy: PrecisionPolicy = bound[0][1].policy
    dtypes = tuple(dict.fromkeys(("float32", policy.compute_dtype)))
    calls = [(case, dtype, case_inputs(case, dtype)) for case in cases for dtype in dtypes]
    results = [adapter.autocast_ops(mp, [(case.name, inputs) for case, _, inputs in calls]) for adapter, mp in bound]
    checked, failures, table = 0, [], {}
    compared, apart, worst = 0, [], {}
    for i, (case, dtype, inputs) in enumerate(calls):
        given = [a.dtype.name for a in inputs]
        takes, gives = case.decisions(policy, given), case.result(policy, given)
        table[f"{case.name}({dtype})"] = {"inputs": takes, "output": gives}
        for (adapter, _), ran in zip(bound, results, strict=True):
            checked += 2
            if ran[i].input_dtypes != takes:
                failures.append(f"{case.name} on {dtype}: {adapter.name} took {ran[i].input_dtypes}, not {takes}")
            if ran[i].output_dtype != gives:
                failures.append(f"{case.name} on {dtype}: {adapter.name} gave {ran[i].output_dtype}, not {gives}")
            if dtype == policy.compute_dtype:
                compared += 1
                worst[f"{case.name}/{adapter.name}"] = ratio = _distance(case, policy, inputs, ran[i].values)
                if not ratio <= 1.0:
                    apart.append(f"{case.name}: {adapter.name} is {ratio:.2f} times the bar away from float64")
    return (
        TierResult("T0", "decisions of op-level autocast", checked, tuple(failures), table),
        TierResult("T3", "ops under autocast against float64", compared, tuple(apart), {"worst": worst}),
    )


def _distance(case: AutocastCase, policy: PrecisionPolicy, inputs: Sequence[Array], values: Array) -> float:
    """From the float64 result, in terms of the bar; infinite for another shape."""
    exact = [np.asarray(a, np.float64) if a.dtype.kind not in "iub" else a for a in inputs]
    expected = np.asarray(case.reference(*exact))
    if values.shape != expected.shape:
        return float("inf")
    return float(np.max(np.abs(values - expected) / autocast_tolerance(case, policy, inputs, expected)))
