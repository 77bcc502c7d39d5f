"""T0 and T3: every family on three backends sees the same dtypes and gives the same numbers, under every preset."""

import pytest

from precision import FAMILIES, PrecisionPolicy, Rule
from precision.names import PRESETS
from precision.parity import CASES
from precision.parity.adapter import OpResult
from precision.parity.remote import PolicyOnly
from precision.parity.tiers import tier_decisions, tier_ops


def bound(adapters, policy):
    return [(adapter, PolicyOnly(policy)) for adapter in adapters]


def test_every_family_has_a_case():
    assert {case.family for case in CASES} == set(FAMILIES)


@pytest.mark.parametrize("preset", PRESETS)
def test_t0_decisions_are_equal(adapters, preset):
    result = tier_decisions(bound(adapters, PRESETS[preset]))
    assert result.failures == ()
    assert result.checked == len(CASES) * 3 * (1 if preset == "float32" else 2)


WANT = {  # spelt out by hand for the case a reader looks up first: mixed_bfloat16, inputs in bfloat16
    "matmul": ("bfloat16", "bfloat16"), "linear": ("bfloat16", "bfloat16"), "conv2d": ("bfloat16", "bfloat16"),
    "attention": ("bfloat16", "bfloat16"), "layer_norm": ("float32", "float32"), "softmax": ("float32", "float32"),
    "cross_entropy": ("float32", "float32"), "mse": ("float32", "float32"), "sum": ("float32", "float32"),
    "mean": ("float32", "float32"), "exp": ("float32", "float32"), "log": ("float32", "float32"),
    "add": ("float32", "float32"), "relu": ("bfloat16", "bfloat16"), "transpose": ("bfloat16", "bfloat16"),
    "cholesky": ("float32", "float32"),
}  # fmt: skip


def test_t0_decisions_are_the_design_s(adapters):
    table = tier_decisions(bound(adapters, PRESETS["mixed_bfloat16"])).detail
    got = {
        case.name: (table[f"{case.name}(bfloat16)"]["inputs"][0], table[f"{case.name}(bfloat16)"]["output"])
        for case in CASES
    }
    assert got == WANT


def test_t0_family_rules_hold_on_all(adapters):
    policy = PrecisionPolicy(
        compute_dtype="bfloat16",
        rules=[Rule(family="softmax", dtype="bfloat16"), Rule(family="matmul", dtype="float32")],
    )
    result = tier_decisions(bound(adapters, policy))
    assert result.failures == ()
    assert result.detail["softmax(float32)"]["inputs"] == ("bfloat16",)
    assert result.detail["matmul(bfloat16)"]["inputs"] == ("float32", "float32")


@pytest.mark.parametrize("preset", PRESETS)
def test_t3_ops_are_within_one_unit_in_the_last_place(adapters, preset):
    result = tier_ops(bound(adapters, PRESETS[preset]))
    assert result.failures == ()
    assert result.checked == len(CASES) * 3


class Wrong:
    """An adapter that runs everything in float32 and is off by one percent."""

    name = "wrong"

    def run_op(self, mp, case, family, inputs):
        import numpy as np

        reference = next(c.reference for c in CASES if c.name == case)
        exact = [np.asarray(a, np.float64) if a.dtype.kind not in "iu" else a for a in inputs]
        return OpResult(
            tuple("float32" if a.dtype.kind not in "iu" else a.dtype.name for a in inputs),
            "float32",
            1.01 * reference(*exact),
        )


def test_the_tiers_can_fail():
    policy = PolicyOnly(PRESETS["mixed_float16"])
    assert any("matmul on float16: wrong ran on" in f for f in tier_decisions([(Wrong(), policy)]).failures)
    failed = {f.split(":")[0] for f in tier_ops([(Wrong(), policy)]).failures}
    assert {"matmul", "softmax", "sum", "exp"} <= failed
