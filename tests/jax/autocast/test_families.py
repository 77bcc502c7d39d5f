"""The table is complete: every primitive of JAX, and what its public functions are made of, has a family or a reason."""

import functools
import inspect
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from precision import FAMILIES
from precision_jax.autocast import untouched
from precision_jax.opcast import control, derivatives
from precision_jax.opcast.families import EACH, ENTERED, FAMILY, OF_OTHER_RELEASES, OPAQUE, SELECTING, VIEW, WHY
from precision_jax.opcast.rewrite import HANDLERS
from tests.jax.autocast.common import equations, normal

KNOWN = {**FAMILY, **ENTERED, **OPAQUE}


LIST = """
import jax, jax.extend.core.primitives as published
from jax._src.interpreters import mlir  # every primitive that can be compiled; there is no public list
tables = mlir._lowerings, *mlir._platform_specific_lowerings.values()
names = {p.name for table in tables for p in table} | {getattr(published, n).name for n in dir(published) if n.endswith("_p")}
print(*sorted(names))
"""


@functools.cache
def primitives():
    """The primitives of JAX itself: in a process of its own, for tests and libraries add theirs."""
    done = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


def test_every_primitive_has_a_place():
    assert len(primitives()) > 200
    assert primitives() - set(KNOWN) == set()


def test_in_one_table_only():
    assert not (set(FAMILY) & set(OPAQUE) or set(FAMILY) & set(ENTERED) or set(OPAQUE) & set(ENTERED))
    assert set(FAMILY.values()) <= set(FAMILIES)
    assert set(FAMILY) - primitives() <= OF_OTHER_RELEASES, "no name that JAX does not have"
    for names in (EACH, SELECTING, VIEW, WHY):
        assert set(names) <= set(FAMILY)


def test_what_is_entered_has_a_handler():
    assert control and derivatives
    assert set(HANDLERS) == set(ENTERED)


@pytest.fixture
def unfiltered():
    """Most calls below fail, and filtering their tracebacks takes its time."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    yield
    jax.config.update("jax_traceback_filtering", before)


def test_ops_are_found_by_the_names_that_people_call_them_by():
    from precision.coverage import look_up
    from precision.registry import get_backend

    entries = get_backend("jax").op_table()
    assert len({e.name for e in entries}) == len(entries)
    assert all(e.family in FAMILIES if e.family else e.why for e in entries)
    for name, family in (
        ("softmax", "softmax"), ("gelu", "elementwise"), ("einsum", "matmul"), ("integer_pow", "transcendental"),
        ("mean", "reduction"), ("dot_product_attention", "attention"), ("pallas_call", None),
    ):  # fmt: skip
        assert {e.family for e in look_up({"jax": entries}, name)["jax"]} == {family}, name


def test_what_common_functions_amount_to_is_what_they_do(unfiltered):
    """Those of one array, on a low one: the dtype of the result."""
    from precision_jax.opcast.coverage import AMOUNTS
    from tests.jax.autocast.common import BF16

    low, checked = jnp.eye(4, dtype=jnp.bfloat16) + 1, 0
    for path, family in AMOUNTS.items():
        fun = functools.reduce(getattr, path.split(".")[1:], jax)
        for args in ((low,), (low, low), (low[0], low[0])):
            try:
                (out, *_) = jax.tree.leaves(jax.eval_shape(untouched(BF16, fun), *args))
            except Exception:
                continue
            checked += 1
            if jnp.issubdtype(out.dtype, jnp.floating):
                low_family = FAMILIES[family].treatment != "float32"
                assert out.dtype == (jnp.bfloat16 if low_family else jnp.float32), path
            break
    assert checked >= 44


A = np.random.default_rng(0).uniform(0.1, 0.9, (4, 4)).astype(np.float32)
CALLS = [
    (A,),
    (A, A),
    (A[0],),
    (A[0], A[0]),
    (A, A, A),
    (A, 1),
    (A, (4, 4)),
    ([A, A],),
    (A > 0.5, A, A),
    (A, 2, 1),
    (A, 0),
]
NO_FLOATS = [
    "array_equal",
    "array_equiv",
    "bartlett",
    "blackman",
    "hamming",
    "hanning",
    "kaiser",
    "arange",
    "eye",
    "identity",
    "tri",
    "ones",
    "zeros",
    "empty",
    "full",
    "indices",
    "linspace",
    "logspace",
    "geomspace",
    "tril_indices",
    "triu_indices",
    "diag_indices",
    "mask_indices",
    "unravel_index",
    "ravel_multi_index",
    "ix_",
    "mgrid",
    "ogrid",
]


@pytest.mark.parametrize("module", [jnp, jnp.linalg, jnp.fft, jax.lax, jax.nn], ids=lambda m: m.__name__)
def test_the_public_functions_are_made_of_known_primitives(module, unfiltered):
    """Each function is traced with whatever arguments it takes; some take none of these and are covered by the primitives."""
    unknown, called = {}, 0
    for name in sorted(dir(module)):
        fun = getattr(module, name)
        if (
            name.startswith("_")
            or inspect.isclass(fun)
            or inspect.ismodule(fun)
            or not callable(fun)
            or name in NO_FLOATS
        ):
            continue
        for args in CALLS:
            leaves, tree = jax.tree.flatten(args)
            places = [i for i, x in enumerate(leaves) if isinstance(x, np.ndarray)]

            def run(*arrays, fun=fun, leaves=leaves, tree=tree, places=places):
                given = list(leaves)
                for i, x in zip(places, arrays, strict=True):
                    given[i] = x
                return fun(*jax.tree.unflatten(tree, given))

            try:
                jaxpr = jax.make_jaxpr(run)(*(leaves[i] for i in places)).jaxpr
            except Exception:
                continue
            called += 1
            missing = {e.primitive.name for e in equations(jaxpr)} - set(KNOWN)
            if missing:
                unknown[name] = missing
            break
    assert unknown == {}
    assert (
        called
        >= {"jax.numpy": 200, "jax.lax": 70, "jax.nn": 20, "jax.numpy.linalg": 15, "jax.numpy.fft": 10}[module.__name__]
    )


def test_the_trained_functions_of_jax_nn_run_and_stay_close():
    from tests.jax.autocast.common import BF16

    names = ["relu", "relu6", "sigmoid", "softplus", "soft_sign", "silu", "swish", "log_sigmoid", "leaky_relu", "hard_sigmoid", "hard_silu", "hard_tanh", "elu", "celu", "selu", "gelu", "glu", "squareplus", "mish", "log_softmax", "softmax", "standardize", "logsumexp"]  # fmt: skip
    run = BF16.autocast(lambda x, w: [getattr(jax.nn, name)(x @ w) for name in names])
    got, want = jax.jit(lambda x: (run(x, jnp.eye(8)), [getattr(jax.nn, name)(x) for name in names]))(normal(4, 8))
    for name, a, b in zip(names, got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=0.03, rtol=0.03, err_msg=name)
