"""Policies, rules and spellings: what resolves, what is written back, and what is refused with which words."""

import dataclasses
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from precision import DTYPES, FAMILIES, LossScale, PolicyError, PrecisionPolicy, Rule, decide
from precision.formats import canonical_dtype
from precision.names import PRESETS, STYLES

SPELLINGS = [(style, spelling) for style, table in STYLES.items() for spelling in table]
WHAT_IT_IS = {  # spelling: (param, compute, output, loss-scale mode), as the tools' own documents say
    "float32": "float32 float32 float32 none", "mixed_float16": "float32 float16 float32 dynamic",
    "mixed_bfloat16": "float32 bfloat16 float32 none", "float16": "float16 float16 float16 dynamic",
    "bfloat16": "bfloat16 bfloat16 bfloat16 none", "32-true": "float32 float32 float32 none",
    "16-mixed": "float32 float16 float32 dynamic", "bf16-mixed": "float32 bfloat16 float32 none",
    "16-true": "float16 float16 float16 dynamic", "bf16-true": "bfloat16 bfloat16 bfloat16 none",
    "32": "float32 float32 float32 none", "16": "float32 float16 float32 dynamic",
    "bf16": "float32 bfloat16 float32 none", "no": "float32 float32 float32 none",
    "fp16": "float32 float16 float32 dynamic", "O0": "float32 float32 float32 none",
    "O1": "float32 float16 float32 dynamic", "O2": "float32 float16 float32 dynamic",
    "O3": "float16 float16 float16 static",
}  # fmt: skip


@pytest.mark.parametrize(("style", "spelling"), SPELLINGS)
def test_every_spelling_resolves(style, spelling):
    p = PrecisionPolicy.from_name(spelling)
    assert f"{p.param_dtype} {p.compute_dtype} {p.output_dtype} {p.loss_scale.mode}" == WHAT_IT_IS[spelling]
    assert PrecisionPolicy.from_name(f" {spelling.upper()} ") == p
    assert PrecisionPolicy.from_name(p.to_name(style)) == p


@given(st.sampled_from([(s, n) for s, table in STYLES.items() for n in table]), st.randoms())
def test_spellings_go_both_ways_in_any_case(item, random):
    style, spelling = item
    mangled = "".join(c.upper() if random.random() < 0.5 else c.lower() for c in spelling)
    policy = PrecisionPolicy.from_name(mangled)
    assert PrecisionPolicy.from_name(policy.to_name(style)) == policy
    assert policy.to_name(style) in STYLES[style]


DTYPE_SHORT = {"float32": ["f32", "float32", "full"], "float16": ["f16", "float16"], "bfloat16": ["bf16", "bfloat16"]}


@given(*3 * [st.sampled_from(sorted(DTYPE_SHORT))], st.data())
def test_jmp_strings_go_both_ways(param, compute, output, data):
    parts = {}
    for field, dtype in (("params", param), ("compute", compute), ("output", output)):
        key = data.draw(st.sampled_from([field, field[0]]))
        parts[key] = data.draw(st.sampled_from(DTYPE_SHORT[dtype]))
    text = ",".join(f"{k}={v}" for k, v in data.draw(st.permutations(sorted(parts.items()))))
    policy = PrecisionPolicy.from_name(text)
    assert (policy.param_dtype, policy.compute_dtype, policy.output_dtype) == (param, compute, output)
    assert policy.loss_scale.mode == ("dynamic" if compute == "float16" else "none")
    assert PrecisionPolicy.from_name(policy.to_name("jmp")) == policy


@pytest.mark.parametrize("text", ["p=f32,c=bf16", "c=f16", "p=bf16", "params=float32,compute=float16,output=float32"])
def test_jmp_strings_mean_what_jmp_says(text):
    jmp = pytest.importorskip("jmp")
    theirs, ours = jmp.get_policy(text), PrecisionPolicy.from_name(text)
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert np.dtype(getattr(theirs, field)).name == getattr(ours, field)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mixed_bfloat", "Did you mean 'mixed_bfloat16'"), ("half", "float16 on GPUs and bfloat16 on TPUs"),
        ("fp8", "no fp8 preset"), ("64-true", "float64 needs no precision policy"), ("fp32", "ambiguous"),
        ("transformer-engine", "library's own recipe"), ("p=f32,z=f16", "unknown part 'z=f16'"),
        ("p=f32,params=f16", "given twice"), ("p=half", "float16 in PyTorch"), ("p=int8", "unknown dtype 'int8'"),
        (True, "not bool"), (None, "not NoneType"),
    ],
)  # fmt: skip
def test_unknown_spellings_say_what_to_write(name, message):
    with pytest.raises(PolicyError, match=re.escape(message)):
        PrecisionPolicy.from_name(name)


def test_styles_without_a_name_say_so():
    odd = PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="static", initial=8.0))
    for style in (*STYLES, "jmp"):
        with pytest.raises(PolicyError, match="has no name for this policy"):
            odd.to_name(style)
    with pytest.raises(PolicyError, match="unknown style 'kerras'.*Did you mean 'keras'"):
        odd.to_name("kerras")


def test_policies_are_frozen_hashable_values():
    a, b = PrecisionPolicy.from_name("mixed_float16"), PrecisionPolicy.from_name("fp16")
    assert a == b and hash(a) == hash(b) and len({a, b, PrecisionPolicy()}) == 2
    with pytest.raises(Exception, match="frozen"):
        a.compute_dtype = "float32"
    assert a.with_(compute_dtype="bf16").compute_dtype == "bfloat16" and a.compute_dtype == "float16"
    with pytest.raises(PolicyError, match="compute_dtyp: unknown key.*Did you mean 'compute_dtype'"):
        a.with_(compute_dtyp="bf16")


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_are_known_by_object_too(dtype):
    obj = getattr(ml_dtypes, dtype, None) or getattr(np, dtype)
    assert canonical_dtype(obj) == canonical_dtype(np.dtype(obj)) == canonical_dtype(dtype.upper()) == dtype


@pytest.mark.parametrize(
    ("dtype", "message"),
    [
        ("float61", "Did you mean 'float16'"),
        ("float64", "never narrowed"),
        ("int8", "unknown dtype 'int8'"),
        (3, "unknown"),
    ],
)
def test_unknown_dtypes(dtype, message):
    with pytest.raises(PolicyError, match=message) as error:
        PrecisionPolicy(compute_dtype=dtype)
    assert error.value.problems[0][0] == "compute_dtype"


@pytest.mark.parametrize(
    ("pattern", "path", "covered"),
    [
        ("norm", "norm", True), ("norm", "norm.weight", True), ("norm", "norm2", False), ("norm", "a.norm", False),
        ("**norm*", "blocks.0.norm1.scale", True), ("**norm*", "norm", True), ("**norm*", "blocks.0.fc", False),
        ("blocks.*.fc", "blocks.3.fc.kernel", True), ("blocks.*.fc", "blocks.3.x.fc", False),
        ("blocks/*/fc", "blocks.3.fc", True), ("blocks.?", "blocks/3", True), ("blocks.?", "blocks/31", False),
        ("a.b", "a+b", False), ("**", "anything.at.all", True), ("*", "one.two", True),
    ],
)  # fmt: skip
def test_rule_patterns(pattern, path, covered):
    assert Rule(module=pattern, dtype="float32").matches(path) is covered


def test_first_rule_wins_and_unmatched_are_reported():
    policy = PrecisionPolicy(
        compute_dtype="bfloat16",
        rules=[
            Rule(module="head", dtype="float16"),
            Rule(module="h*", dtype="float32"),
            Rule(module="nothing", dtype="float32"),
            Rule(family="softmax", dtype="bfloat16"),
        ],
    )
    assert policy.rule_for("head.kernel").dtype == "float16"
    assert policy.rule_for("hidden").dtype == "float32"
    assert policy.rule_for("softmax") is None
    assert [r.module for r in policy.unmatched_rules(["head", "hidden"])] == ["nothing"]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([{"dtype": "float32"}], "exactly one of module and family"),
        ([{"module": "a", "family": "norm", "dtype": "float32"}], "exactly one of module and family"),
        ([{"module": " ", "dtype": "float32"}], "must not be empty"),
        ([{"family": "nrom", "dtype": "float32"}], "Did you mean 'norm'"),
        ([{"module": "a"}], "Field required"),
        ([{"module": "a", "dtype": "float32"}, {"module": "a", "dtype": "float16"}], "second could never apply"),
    ],
)
def test_bad_rules(rules, message):
    with pytest.raises(PolicyError, match=message):
        PrecisionPolicy(rules=[Rule(**rule) for rule in rules])


def test_training_in_float16_needs_a_loss_scale():
    policy = PrecisionPolicy(compute_dtype="float16")
    with pytest.raises(PolicyError, match=r"loss_scale\.mode to 'dynamic'"):
        policy.require_trainable()
    with pytest.raises(PolicyError, match=r"rules\.1\.dtype \('b'\) float16"):
        PrecisionPolicy(
            compute_dtype="bfloat16", rules=[Rule(module="a", dtype="float32"), Rule(module="b", dtype="float16")]
        ).require_trainable()
    for name in PRESETS:
        PrecisionPolicy.from_name(name).require_trainable()


# ---- op families ---------------------------------------------------------------------------------------------------

CUDA_AUTOCAST = {  # treatment by torch.autocast's documented CUDA lists
    "matmul": "compute", "conv": "compute", "attention": "compute", "norm": "float32", "softmax": "float32",
    "loss": "float32", "reduction": "float32", "transcendental": "float32", "elementwise": "promote", "shape": "follow",
    "linalg": "float32",
}  # fmt: skip


def test_the_table_is_the_design_s():
    assert {name: family.treatment for name, family in FAMILIES.items()} == CUDA_AUTOCAST
    assert all(dataclasses.is_dataclass(family) and family.why for family in FAMILIES.values())


@given(
    st.sampled_from(sorted(FAMILIES)),
    st.lists(st.sampled_from(["float16", "bfloat16", "float32", "float64", "int32", "bool"]), min_size=1, max_size=4),
    st.sampled_from(["float16", "bfloat16", "float32"]),
)
def test_decisions(family, dtypes, compute):
    policy = PrecisionPolicy(compute_dtype=compute)
    out = decide(policy, family, dtypes)
    width = {"float16": 1, "bfloat16": 1, "float32": 2, "float64": 3}
    assert len(out) == len(dtypes)
    for before, after in zip(dtypes, out, strict=True):
        if before not in width or "float64" in dtypes:
            assert after == before
        elif CUDA_AUTOCAST[family] == "compute":
            assert after == compute
        elif CUDA_AUTOCAST[family] == "float32":
            assert after == "float32"
        elif CUDA_AUTOCAST[family] == "follow":
            assert after == before
        else:
            lows = {d for d in dtypes if d in width}
            assert after == (lows.pop() if len(lows) == 1 else "float32")


def test_family_rules_win_over_the_table():
    policy = PrecisionPolicy(compute_dtype="bfloat16", rules=[Rule(family="softmax", dtype="bfloat16")])
    assert decide(policy, "softmax", ["float32"]) == ("bfloat16",)
    with pytest.raises(PolicyError, match="unknown op family 'matmull'.*Did you mean 'matmul'"):
        decide(policy, "matmull", ["float32"])
