"""Policies to try every target with: the ones people have, and ones that few tools can express."""

from hypothesis import strategies as st

from precision import LossScale, PrecisionPolicy, Rule
from precision.names import PRESETS

DTYPES = ("float32", "bfloat16", "float16")


@st.composite
def loss_scales(draw):
    mode = draw(st.sampled_from(["none", "static", "dynamic", "dynamic"]))
    if mode == "none":
        return LossScale()
    if mode == "static":
        return LossScale(mode="static", initial=draw(st.sampled_from([1.0, 128.0, 1000.0, 65536.0])))
    return LossScale(
        mode="dynamic",
        initial=draw(st.sampled_from([2.0**16, 2.0**12, 1000.0, 1.0])),
        growth_factor=draw(st.sampled_from([2.0, 2.0, 1.5])),
        backoff_factor=draw(st.sampled_from([0.5, 0.5, 0.25])),
        growth_interval=draw(st.sampled_from([2000, 1000, 1])),
        minimum=draw(st.sampled_from([2.0**-24, 2.0**-24, 1.0])),
        maximum=draw(st.sampled_from([2.0**126, 2.0**126, 2.0**24])),
        hysteresis=draw(st.sampled_from([1, 2])),
        hysteresis_refill=draw(st.sampled_from(["on_growth", "on_finite_step"])),
        max_consecutive_skips=draw(st.sampled_from([None, None, 50])),
    )


RULES = (
    Rule(module="head", dtype="float32"),
    Rule(module="**.norm*", dtype="float32"),
    Rule(module="encoder.*.attention", dtype="bfloat16"),
    Rule(family="norm", dtype="float32"),
    Rule(family="softmax", dtype="bfloat16"),
)


@st.composite
def any_policies(draw):
    if draw(st.booleans()):  # near what people have: a preset with at most one thing changed
        policy = draw(st.sampled_from(list(PRESETS.values())))
        change = draw(st.sampled_from(["nothing", "reduce_dtype", "output_dtype", "rules", "loss_scale", "emulate"]))
        values = {
            "reduce_dtype": st.sampled_from(DTYPES), "output_dtype": st.sampled_from(DTYPES),
            "rules": st.lists(st.sampled_from(RULES), max_size=2, unique=True).map(tuple),
            "loss_scale": loss_scales(), "emulate": st.just(True),
        }  # fmt: skip
        return policy if change == "nothing" else policy.with_(**{change: draw(values[change])})
    return PrecisionPolicy(
        **{f: draw(st.sampled_from(DTYPES)) for f in ("param_dtype", "compute_dtype", "output_dtype", "reduce_dtype")},
        rules=tuple(draw(st.lists(st.sampled_from(RULES), max_size=3, unique=True))),
        loss_scale=draw(loss_scales()),
        emulate=draw(st.integers(0, 9)) == 0,
    )
