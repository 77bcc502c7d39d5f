"""Op-level autocast: the same decisions and values of each op, and of whole networks, on the three backends."""

import functools

import ml_dtypes
import numpy as np
import pytest

from precision import PrecisionPolicy, Rule
from precision.ops import FAMILIES
from precision.parity import AUTOCAST_CASES, OpResult, ParityAdapter
from precision.parity.autocast_tiers import case_inputs, tier_autocast
from precision.parity.networks import NETWORKS, float32_results, tier_networks
from precision.parity.remote import PolicyOnly

LOW = {name: PrecisionPolicy.from_name(name) for name in ("mixed_float16", "mixed_bfloat16")}
RULES = PrecisionPolicy(
    compute_dtype="bfloat16",
    rules=(
        {"family": "softmax", "dtype": "bfloat16"},
        {"family": "matmul", "dtype": "float32"},
        {"family": "norm", "dtype": "bfloat16"},
    ),
)


@pytest.mark.parametrize("policy", LOW.values(), ids=LOW)
def test_every_op_takes_and_gives_what_the_table_decides_and_is_right(adapters, policy):
    decisions, values = tier_autocast([(adapter, PolicyOnly(policy)) for adapter in adapters])
    assert decisions.checked == 3 * 4 * len(AUTOCAST_CASES) and not decisions.failures
    assert values.checked == 3 * len(AUTOCAST_CASES) and not values.failures


def test_family_rules_mean_the_same(adapters):
    cases = [
        c
        for c in AUTOCAST_CASES
        if c.family in ("softmax", "matmul", "norm") and c.name not in ("lstm_cell_wide", "gru_cell", "lstm_cell")
    ]
    decisions, values = tier_autocast([(adapter, PolicyOnly(RULES)) for adapter in adapters], cases)
    assert decisions.passed and not decisions.failures
    assert {d["output"] for name, d in decisions.detail.items() if name.startswith(("softmax", "layer_norm"))} == {
        "bfloat16"
    }
    assert {d["output"] for name, d in decisions.detail.items() if name.startswith("linear")} == {"float32"}
    del values  # a norm inside of bfloat16 is what was asked for


@pytest.fixture(scope="module")
def wide(adapters):
    """Each network's float32 results, by backend."""
    return functools.cache(lambda network: float32_results(adapters, network))


def agree(adapters, wide, network, policy, **options):
    result = tier_networks(adapters, network, policy, wide=wide(network), **options)
    print(f"\n{network}: {result.detail}")
    assert result.passed, result.failures
    return result.detail


@pytest.mark.parametrize("policy", LOW.values(), ids=LOW)
@pytest.mark.parametrize("network", NETWORKS)
def test_whole_networks_agree(adapters, wide, network, policy):
    detail = agree(adapters, wide, network, policy)
    if network == "transformer" and policy.compute_dtype == "bfloat16":
        assert max(detail["saved"].values()) <= 0.6


@pytest.mark.parametrize("network", ["unet", "lstm"])
def test_networks_that_are_not_compiled_agree(adapters, wide, network):
    agree(adapters, wide, network, LOW["mixed_bfloat16"], compiled=False)


def test_rules_for_modules_mean_the_same(adapters, wide):
    rules = [Rule(module="block0.mlp", dtype="float32"), Rule(module="*.attention", dtype="float32")]
    ruled = dict.fromkeys(("block0.mlp", "block0.attention", "block1.attention"), "float32")
    agree(adapters, wide, "transformer", LOW["mixed_bfloat16"].with_(rules=rules), modules=ruled)


class Wrong(ParityAdapter):
    """Computes all in one dtype."""

    name = "wrong"

    def __init__(self, dtype):
        self.dtype = dtype

    def autocast_ops(self, mp, calls):
        by_name = {case.name: case for case in AUTOCAST_CASES}
        results = []
        for name, inputs in calls:
            low = [a.astype(self.dtype) if a.dtype.kind not in "iub" else a for a in inputs]
            exact = by_name[name].reference(*[a.astype(np.float64) if a.dtype.kind not in "iub" else a for a in low])
            values = np.asarray(exact).astype(np.float32).astype(self.dtype).astype(np.float64)
            results.append(OpResult(tuple(a.dtype.name for a in low), np.dtype(self.dtype).name, values))
        return results

    run_op = round_to = trajectory = train = None


def test_the_tier_fails_a_backend_that_computes_all_in_one_dtype():
    for dtype, wrong in (("float32", ("compute",)), ("bfloat16", ("float32",))):
        adapter = Wrong(np.dtype(getattr(ml_dtypes, dtype, dtype)))
        decisions, values = tier_autocast([(adapter, PolicyOnly(LOW["mixed_bfloat16"]))])
        blamed = {failure.split(" on ")[0] for failure in decisions.failures}
        for case in AUTOCAST_CASES:
            if FAMILIES[case.family].treatment in wrong:
                assert case.name in blamed, (dtype, case.name)
        if dtype == "bfloat16":  # float32 families computed low are seen by their values too
            apart = {failure.split(":")[0] for failure in values.failures}
            expected = {c.name for c in AUTOCAST_CASES if FAMILIES[c.family].treatment == "float32"}
            assert len(expected & apart) > 0.85 * len(expected)


def test_cases_cover_every_family_and_are_drawn_in_range():
    assert {case.family for case in AUTOCAST_CASES} == set(FAMILIES) and len(AUTOCAST_CASES) >= 60
    for case in AUTOCAST_CASES:
        inputs = case_inputs(case, "float16")
        exact = case.reference(*[a.astype(np.float64) if a.dtype.kind == "f" else a for a in inputs])
        assert np.isfinite(exact).all() and np.abs(exact).max() < 60000, case.name
