"""jmp, Flax and Optax, MaxText: the real packages take what is exported and compute, store and accumulate as it says."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
import pytest
from flax import nnx

import precision
from precision import InteropError, LossScale, PolicyError, PrecisionPolicy, Rule
from precision.interop.flax import from_flax, to_flax
from precision.interop.jmp import from_jmp, to_jmp
from precision.interop.maxtext import from_maxtext, to_maxtext
from precision.names import PRESETS

TREE = {"w": jnp.ones((2, 2)), "n": jnp.arange(3), "h": jnp.ones(2, jnp.float16)}


@pytest.mark.parametrize("preset", PRESETS)
def test_jmp_casts_as_our_backend_does(preset):
    policy = PRESETS[preset]
    theirs, ours = jmp.get_policy(to_jmp(policy).config), precision.bind(policy, backend="jax")
    for name in ("cast_to_param", "cast_to_compute", "cast_to_output"):
        a, b = getattr(theirs, name)(TREE), getattr(ours, name)(TREE)
        assert jax.tree.map(lambda x: x.dtype, a) == jax.tree.map(lambda x: x.dtype, b)
        assert a["n"].dtype == jnp.int32
    assert from_jmp(str(theirs)).policy == policy  # jmp's own way of writing it down


@pytest.mark.parametrize(
    "text", ["full", "f32", "bf16", "bfloat16", "f16", "p=f16", "c=bf16", "p=f32,c=f16,o=f32", "p=bf16,o=full"]
)
def test_jmp_strings_mean_what_they_mean_to_jmp(text):
    theirs, ours = jmp.get_policy(text), from_jmp(text).policy
    for field in ("param_dtype", "compute_dtype", "output_dtype"):
        assert jnp.dtype(getattr(theirs, field)) == getattr(ours, field)


def test_jmp_has_what_the_losses_say_it_has():
    scale = jmp.DynamicLossScale(jnp.float32(1.0))
    assert scale.adjust(jnp.bool_(False)).loss_scale == 1.0  # its minimum
    low = jmp.DynamicLossScale(jnp.float32(2.0), min_loss_scale=jnp.float32(0.25))
    assert low.adjust(jnp.bool_(False)).adjust(jnp.bool_(False)).loss_scale == 0.5
    kept = jax.jit(lambda s: s.adjust(jnp.bool_(False)))(low.adjust(jnp.bool_(False)))
    assert kept.min_loss_scale == 1.0  # lost across jit, as the note says
    assert any("lost across jax.jit" in note for note in to_jmp(PRESETS["mixed_float16"]).notes)
    lost = {e.field for e in to_jmp(PRESETS["mixed_float16"].with_(loss_scale=LossScale(mode="static"))).lost}
    assert lost == {"loss_scale"}


@pytest.mark.parametrize(
    ("text", "error"), [("half", InteropError), (3, InteropError), ("p=half", PolicyError), ("q=f32", PolicyError)]
)
def test_jmp_strings_without_one_meaning_are_refused(text, error):
    with pytest.raises(error):
        from_jmp(text)


def test_dtypes_that_jmp_has_not_are_lost():
    export = to_jmp(PrecisionPolicy(compute_dtype="float8_e4m3fn", output_dtype="bfloat16"))
    assert jmp.get_policy(export.config).compute_dtype == jnp.float32
    assert [entry.field for entry in export.lost] == ["compute_dtype"]


# ---- Flax and Optax ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_flax_layers_built_from_the_flags_have_its_dtypes(preset):
    policy = PRESETS[preset]
    flags = to_flax(policy).config
    layer = {key: flags[key] for key in ("dtype", "param_dtype", "precision")}
    x = jnp.ones((2, 3))
    dense = nn.Dense(4, **layer)
    variables = dense.init(jax.random.key(0), x)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(variables)} == {policy.param_dtype}
    out = dense.apply(variables, x)
    assert out.dtype == policy.compute_dtype == from_flax(flags).policy.output_dtype
    norm = nn.LayerNorm(dtype=flags["dtype"], param_dtype=flags["param_dtype"])
    assert norm.apply(norm.init(jax.random.key(0), x), x).dtype == policy.compute_dtype
    linear = nnx.Linear(3, 4, rngs=nnx.Rngs(0), **layer)
    assert linear.kernel[...].dtype == policy.param_dtype and linear(x).dtype == policy.compute_dtype
    # a dot in that dtype, at that precision
    text = str(jax.make_jaxpr(lambda v: dense.apply(v, x))(variables))
    assert ("HIGHEST" in text) == (policy.compute_dtype == "float32")


def test_flax_norms_reduce_in_float32_as_the_note_says():
    x = jnp.linspace(300.0, 301.0, 8, dtype=jnp.float16)[None]
    norm = nn.LayerNorm(dtype="float16", use_scale=False, use_bias=False)
    assert jnp.abs(norm.apply({}, x)).max() > 0.5  # the variance survives, which float16's would not
    assert any("float32 whatever dtype" in note for note in to_flax(PRESETS["mixed_float16"]).notes)


@pytest.mark.parametrize("reduce_dtype", ["float32", "bfloat16"])
def test_optax_accumulates_and_keeps_moments_in_the_flags_dtypes(reduce_dtype):
    flags = to_flax(PRESETS["bfloat16"].with_(reduce_dtype=reduce_dtype)).config
    params = {"w": jnp.ones(3, flags["param_dtype"])}
    steps = optax.MultiSteps(optax.sgd(1.0), 2, accumulator_dtype=flags["accumulator_dtype"])
    state = steps.init(params)
    _, state = steps.update({"w": jnp.full(3, 1 + 2**-7, "bfloat16")}, state, params)
    assert state.acc_grads["w"].dtype == reduce_dtype
    adam = optax.adam(1e-3, mu_dtype=flags["mu_dtype"])
    inferred = optax.adam(1e-3)
    assert adam.init(params)[0].mu["w"].dtype == inferred.init(params)[0].mu["w"].dtype == flags["mu_dtype"]


def test_flax_infers_a_dtype_that_is_not_given():
    found = from_flax({"param_dtype": "bfloat16"})
    dense = nn.Dense(2, param_dtype="bfloat16")
    variables = dense.init(jax.random.key(0), jnp.ones((1, 3), "bfloat16"))
    assert dense.apply(variables, jnp.ones((1, 3), "bfloat16")).dtype == found.policy.compute_dtype == "bfloat16"
    assert dense.apply(variables, jnp.ones((1, 3), "float32")).dtype == "float32"  # so the note
    assert any("widest of input and parameter" in note for note in found.notes)


def test_a_moments_dtype_of_ones_own_is_kept():
    flags = {"dtype": "bfloat16", "param_dtype": "float32", "mu_dtype": "bfloat16", "width": 3}
    found = from_flax(flags)
    assert found.rest == {"mu_dtype": "bfloat16", "width": 3} and any("mu_dtype" in note for note in found.notes)
    back = to_flax(found.policy, base=found.rest).config
    assert back["mu_dtype"] == "bfloat16" and back["width"] == 3
    with pytest.raises(InteropError, match="mu_dtype must be one of"):
        from_flax({**flags, "mu_dtype": "int8"})


def test_what_the_flags_cannot_say_is_lost():
    policy = PRESETS["mixed_float16"].with_(
        rules=[{"module": "head", "dtype": "float32"}], loss_scale=LossScale(mode="static")
    )
    assert [entry.field for entry in to_flax(policy).lost] == ["output_dtype", "rules", "loss_scale"]
    assert to_flax(PRESETS["mixed_bfloat16"].with_(output_dtype="bfloat16"), strict=True).lost == ()


# ---- MaxText (0.2.5; its package needs a newer Python than this library, so its own files are quoted) ------------

BASE_YML = {
    "grad_dtype": "float32", "dtype": "bfloat16", "matmul_precision": "default", "activations_in_float32": False,
    "weight_dtype": "float32", "logits_dot_in_fp32": False, "cast_logits_to_fp32": True, "float32_qk_product": False,
    "float32_logits": False, "float32_weight_sum": True, "float32_gate_logits": False, "mu_dtype": "", "quantization": "",
}  # fmt: skip
"""The lines of MaxText's configs/base.yml about dtypes."""


def test_maxtexts_own_defaults_amount_to_this_policy():
    found = from_maxtext({**BASE_YML, "base_emb_dim": 2048})
    assert found.policy == PRESETS["mixed_bfloat16"].with_(
        rules=(Rule(family="softmax", dtype="bfloat16"), Rule(family="transcendental", dtype="bfloat16"))
    )
    assert found.rest == {"base_emb_dim": 2048, "mu_dtype": "", "quantization": ""} and found.notes == ()
    assert to_maxtext(found.policy, base=found.rest, strict=True).config == {**BASE_YML, "base_emb_dim": 2048}
    # what a short file leaves out is the same, and told of
    short = from_maxtext({"weight_dtype": "float32", "dtype": "bfloat16"})
    assert short.policy == found.policy and any("float32_logits = false" in note for note in short.notes)


def test_every_maxtext_flag_is_written_and_known_to_maxtext():
    config = to_maxtext(PRESETS["mixed_bfloat16"]).config
    assert set(config) == set(BASE_YML) - {"mu_dtype", "quantization"}
    assert all(type(config[key]) is type(BASE_YML[key]) for key in config)


@pytest.mark.parametrize(
    ("family", "dtype", "flag", "value"),
    [
        ("softmax", "bfloat16", "float32_logits", False),
        ("attention", "float32", "float32_qk_product", True),
        ("transcendental", "bfloat16", "activations_in_float32", False),
        ("reduction", "bfloat16", "float32_weight_sum", False),
    ],
)
def test_rules_for_families_are_maxtexts_flags(family, dtype, flag, value):
    usual = to_maxtext(PRESETS["mixed_bfloat16"]).config
    policy = PRESETS["mixed_bfloat16"].with_(rules=[{"family": family, "dtype": dtype}])
    config = to_maxtext(policy, strict=True).config
    assert {key for key in config if config[key] != usual[key]} == {flag} and config[flag] is value
    assert from_maxtext(config).policy == policy


def test_what_maxtext_cannot_say_is_lost():
    policy = PrecisionPolicy(
        param_dtype="bfloat16", compute_dtype="float16", output_dtype="bfloat16", loss_scale=LossScale(mode="dynamic"),
        rules=[{"module": "head", "dtype": "float32"}, {"family": "norm", "dtype": "float16"}],
    )  # fmt: skip
    export = to_maxtext(policy)
    assert [entry.field for entry in export.lost] == ["output_dtype", "reduce_dtype", "rules", "loss_scale"]
    assert any("without loss scaling" in note for note in export.notes) and any(
        "mu_dtype" in note for note in export.notes
    )
    assert export.config["grad_dtype"] == "bfloat16"  # what it would be in any case


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"weight_dtype": "float64"}, "weight_dtype must be one of"),
        ({"weight_dtype": "float32", "float32_logits": "yes"}, "float32_logits must be one of"),
        ({"weight_dtype": "float32", "matmul_precision": 3}, "matmul_precision must be one of"),
    ],
)
def test_maxtext_values_are_checked(config, says):
    with pytest.raises(InteropError, match=says):
        from_maxtext(config)


def test_what_acts_on_top_of_the_flags_is_told_of():
    notes = from_maxtext({**BASE_YML, "quantization": "int8", "mu_dtype": "bfloat16", "dtype": "float32"}).notes
    assert [note.split(":")[0] for note in notes] == [
        "matmul_precision = default", "mu_dtype = bfloat16", "quantization = int8",
    ]  # fmt: skip


def test_float32_matmuls_are_asked_for_as_such():
    # the reason for precision = highest: what a TPU would otherwise do to float32
    a = np.float32(1 + 2**-12)
    assert float(jnp.dot(jnp.full(1, a), jnp.ones(1), precision="highest")) == a
    assert (
        to_maxtext(PRESETS["float32"]).config["matmul_precision"]
        == to_flax(PRESETS["float32"]).config["precision"]
        == "highest"
    )
