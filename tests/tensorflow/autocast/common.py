"""Small things the op-level autocast tests share: a bound policy, arrays, and what ran in which dtype."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

import precision
from precision import LossScale, PrecisionPolicy, Rule


def bind(compute: str = "bfloat16", *rules: dict, output: str = "float32"):
    """A policy that computes in a low dtype, bound; ``rules`` are rules as dicts."""
    policy = PrecisionPolicy(
        compute_dtype=compute, output_dtype=output, rules=[Rule(**r) for r in rules], loss_scale=LossScale()
    )
    return precision.bind(policy, backend="tensorflow")


MP = bind()


def draw(*shape: int, seed: int = 0) -> tf.Tensor:
    """Standard normal float32."""
    return tf.constant(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def low(x: tf.Tensor, dtype: str = "bfloat16") -> tf.Tensor:
    """Rounded to a low dtype and back: independent of the code under test."""
    return tf.cast(tf.cast(x, dtype), tf.float32)


def run(function, *args, mp=MP, **options):
    """The function under autocast, its results as they come."""
    return mp.autocast_as_is(function, **options)(*args)


def ops_of(function, *args, mp=MP) -> list:
    """The ops of the graph that runs."""
    return mp.autocast_as_is(function).get_concrete_function(*args).graph.get_operations()


def dtypes_of(function, *args, op: str, mp=MP) -> set[str]:
    """The dtypes of the results of all ops of a type, in the graph that runs."""
    return {o.outputs[0].dtype.name for o in ops_of(function, *args, mp=mp) if o.type == op}


def close(a, b, rtol: float = 1e-6) -> bool:
    """Whether two arrays are equal but for float32 accumulation."""
    a, b = (np.asarray(tf.cast(x, tf.float64)) for x in (a, b))
    return a.shape == b.shape and np.allclose(a, b, rtol=rtol, atol=rtol * max(1e-30, np.abs(b).max()))
