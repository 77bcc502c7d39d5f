"""What the tests of op-level autocast share: bound policies, and the products of a jaxpr with their dtypes."""

import jax
import jax.numpy as jnp
import numpy as np

import precision
from precision import LossScale, PrecisionPolicy

BF16 = precision.bind("mixed_bfloat16", backend="jax")
FP16 = precision.bind(PrecisionPolicy(compute_dtype="float16", loss_scale=LossScale(mode="dynamic")), backend="jax")


def bind(*rules, compute="bfloat16", **fields):
    return precision.bind(PrecisionPolicy(compute_dtype=compute, rules=rules, **fields), backend="jax")


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape) * scale, jnp.float32)


def rounded(x, dtype="bfloat16"):
    """Values rounded to a low dtype, in float64, by NumPy and ml_dtypes."""
    return np.asarray(x).astype(jnp.dtype(dtype)).astype(np.float64)


def equations(jaxpr):
    """Every equation of a jaxpr and of the jaxprs inside."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from equations(inner)


def traced(fun, *args):
    return list(equations(jax.make_jaxpr(fun)(*args).jaxpr))


def dtypes(fun, *args, of):
    """The dtypes that every equation of a primitive takes and gives: ``"float32,float32->float32"``."""
    return [
        ",".join(v.aval.dtype.name for v in eqn.invars) + "->" + eqn.outvars[0].aval.dtype.name
        for eqn in traced(fun, *args)
        if eqn.primitive.name == of
    ]


def products(fun, *args):
    """The dtype that each product and convolution computes in."""
    found = []
    for eqn in traced(fun, *args):
        if eqn.primitive.name == "precision_contract":
            found.append(eqn.params["compute"].name)
        elif eqn.primitive.name in ("dot_general", "conv_general_dilated"):
            found.append(eqn.invars[0].aval.dtype.name)
    return found
