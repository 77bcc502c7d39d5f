"""Tiers T0 to T3: dtype decisions, scale trajectories, rounding and single ops, judged against independent references."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import numpy as np

from precision.formats import FloatFormat
from precision.loss_scale import LossScale, initial_state, next_state, state_to_dict
from precision.ops import decide
from precision.parity.adapter import Array, ParityAdapter
from precision.parity.cases import CASES, OpCase
from precision.policy import PrecisionPolicy


@dataclasses.dataclass(frozen=True)
class TierResult:
    """The outcome of one tier.

    Attributes:
        tier: ``"T0"`` to ``"T4"``.
        what: what was compared, in a few words.
        checked: number of comparisons made.
        failures: one sentence a comparison that failed; empty when the tier holds.
        detail: further facts, as plain values.
    """

    tier: str
    what: str
    checked: int
    failures: tuple[str, ...] = ()
    detail: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether something was compared and nothing failed."""
        return self.checked > 0 and not self.failures


def op_inputs(case: OpCase, dtype: str, seed: int = 0) -> list[Array]:
    """Draw a case's inputs and round them to a dtype (integers stay; a mixed case keeps its second input float32)."""
    numpy_dtype = FloatFormat.of(dtype).numpy_dtype
    drawn = case.make(np.random.default_rng(seed))
    dtypes = [np.dtype(np.float32) if case.mixed and i == 1 else numpy_dtype for i in range(len(drawn))]
    return [
        a.astype(np.float32).astype(d) if np.issubdtype(a.dtype, np.floating) else a
        for a, d in zip(drawn, dtypes, strict=True)
    ]


def tier_decisions(bound: Sequence[tuple[ParityAdapter, Any]], cases: Iterable[OpCase] = CASES) -> TierResult:
    """T0: each op sees the dtypes the one table decides, and its result has the same dtype on every backend.

    Args:
        bound: adapters, each with the policy bound to its backend.
        cases: the ops to try, each on float32 inputs and on inputs in the compute dtype.
    """
    checked, failures, table = 0, [], {}
    for case in cases:
        policy: PrecisionPolicy = bound[0][1].policy
        for dtype in dict.fromkeys(("float32", policy.compute_dtype)):
            inputs = op_inputs(case, dtype)
            expected = decide(policy, case.family, [a.dtype.name for a in inputs])
            outputs: dict[str, str] = {}
            for adapter, mp in bound:
                result = adapter.run_op(mp, case.name, case.family, inputs)
                outputs[adapter.name] = result.output_dtype
                checked += 1
                if result.input_dtypes != expected:
                    failures.append(
                        f"{case.name} on {dtype}: {adapter.name} ran on {result.input_dtypes}, not {expected}"
                    )
            if len(set(outputs.values())) > 1:
                failures.append(f"{case.name} on {dtype}: results differ in dtype: {outputs}")
            table[f"{case.name}({dtype})"] = {"inputs": expected, "output": next(iter(outputs.values()))}
    return TierResult("T0", "dtype decisions", checked, tuple(failures), table)


def rule_trajectory(config: LossScale, finite: Sequence[bool]) -> list[dict[str, float | int]]:
    """The rule's own trajectory over a pattern, with NumPy scalars."""
    state, out = initial_state(config), []
    for flag in finite:
        with np.errstate(over="ignore"):  # a huge growth factor overflows before the maximum cuts it
            state = next_state(config, state, np.bool_(flag), np)
        out.append(state_to_dict(state))
    return out


def tier_trajectories(
    adapter: ParityAdapter,
    patterns: Iterable[tuple[LossScale, Sequence[bool]]],
    forms: Sequence[Literal["neutral", "native"]] = ("neutral", "native"),
) -> TierResult:
    """T1: the state after every step equals the rule's, bit for bit, in the neutral and in the framework's own form."""
    checked, failures = 0, []
    for config, finite in patterns:
        expected = rule_trajectory(config, finite)
        for form in forms:
            got = adapter.trajectory(config, finite, form)
            checked += len(expected)
            for step, (want, have) in enumerate(zip(expected, got, strict=True)):
                if want != have:
                    failures.append(f"{adapter.name} {form}: step {step} of {list(finite)}: {have}, not {want}")
                    break
    return TierResult("T1", "loss-scale trajectories", checked, tuple(failures))


def rounding_probes(dtype: str, count: int = 4096, seed: int = 0) -> Array:
    """Float32 values that try a format's rounding: ties and their neighbours, subnormals, overflow, NaN, random bits."""
    fmt, rng = FloatFormat.of(dtype), np.random.default_rng(seed)
    bits = rng.integers(0, 2**32, count, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = np.ldexp(rng.uniform(0.5, 1.0, count), rng.integers(-30, 18, count)).astype(np.float32)
    grid = fmt.round(near)
    step = np.array([fmt.spacing(float(v)) if np.isfinite(v) else 0.0 for v in grid], np.float32)
    ties = (grid + 0.5 * step).astype(np.float32)
    tiny = (fmt.smallest_subnormal * np.array([0.25, 0.5, 0.75, 1.0, 1.5, 2.5])).astype(np.float32)
    with np.errstate(over="ignore"):
        top = np.float32(fmt.max) * np.array([0.999, 1.0, 1.001, 1.01, 1.1, 2.0], np.float32)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3.4e38], np.float32)
    with np.errstate(over="ignore"):
        neighbours = [np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(-np.inf))]
    probes = np.concatenate([bits, near, ties, *neighbours, tiny, top, special]).astype(np.float32)
    return np.concatenate([probes, -probes])


def tier_rounding(adapter: ParityAdapter, dtypes: Sequence[str], values: Array | None = None) -> TierResult:
    """T2: casts round as ``ml_dtypes`` does, bit for bit, but for what the backend states: subnormals flushed, overflow saturated."""
    checked, failures = 0, []
    for dtype in dtypes:
        probes = rounding_probes(dtype) if values is None else values
        fmt = FloatFormat.of(dtype)
        want = fmt.round(probes)
        if dtype in adapter.flushes_subnormals:
            want = np.where(np.abs(want) < fmt.smallest_normal, np.copysign(np.float32(0), want), want)
        if dtype in adapter.saturates:
            over = ~np.isfinite(want) & ~np.isnan(probes)
            want = np.where(over, np.copysign(np.float32(fmt.max), probes), want)
        got = adapter.round_to(probes, dtype)
        same = (want.view(np.uint32) == got.view(np.uint32)) | (np.isnan(want) & np.isnan(got))
        checked += probes.size
        for i in np.flatnonzero(~same)[:5]:
            failures.append(f"{adapter.name}: {probes[i]!r} to {dtype} gave {got[i]!r}, not {want[i]!r}")
    return TierResult("T2", "rounding to low formats", checked, tuple(failures))


def op_tolerance(case: OpCase, dtype: str, inputs: Sequence[Array], expected: Array) -> Array:
    """T3's bar: one unit in the last place of ``dtype`` at the exact result, and float32 accumulation's own error.

    The latter is bounded by ``32 * 2**-24`` times the op on absolute values (Higham, 2002, section 3.1, for inner
    products of up to 32 terms, which is the longest in the cases but for ``sum``).
    """
    ulp = np.vectorize(FloatFormat.of(dtype).spacing, otypes=[float])(expected)
    size = case.reference(*[np.abs(a) if np.issubdtype(a.dtype, np.floating) else a for a in inputs])
    return np.asarray(ulp + 32 * 2.0**-24 * np.abs(size))


def tier_ops(bound: Sequence[tuple[ParityAdapter, Any]], cases: Iterable[OpCase] = CASES) -> TierResult:
    """T3: each op's values lie within one unit in the last place of the compute dtype of the float64 result.

    The float64 reference gets the inputs as the policy rounds them, so that only the op itself is judged.
    """
    checked, failures, worst = 0, [], {}
    for case in cases:
        policy: PrecisionPolicy = bound[0][1].policy
        inputs = op_inputs(case, policy.compute_dtype)
        exact = [np.asarray(a, np.float64) if a.dtype.kind not in "iu" else a for a in inputs]
        expected = np.asarray(case.reference(*exact))
        bar = op_tolerance(case, policy.compute_dtype, exact, expected)
        for adapter, mp in bound:
            values = adapter.run_op(mp, case.name, case.family, inputs).values
            checked += 1
            if values.shape != expected.shape:
                failures.append(f"{case.name}: {adapter.name} has shape {values.shape}, not {expected.shape}")
                continue
            ratio = float(np.max(np.abs(values - expected) / bar))
            worst[f"{case.name}/{adapter.name}"] = ratio
            if not ratio <= 1.0:
                failures.append(f"{case.name}: {adapter.name} is {ratio:.2f} times the bar away from float64")
    return TierResult("T3", "single ops against float64", checked, tuple(failures), {"worst": worst})
