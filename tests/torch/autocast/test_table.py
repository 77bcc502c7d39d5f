"""The table of torch's functions is complete, and what it says of torch.autocast is so."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import overrides

import precision
from precision import PrecisionPolicy, Rule
from precision.ops import FAMILIES, decide
from precision_torch.dtypes import dtype_name
from precision_torch.native_lists import NATIVE
from precision_torch.op_families import FAMILY, FOLLOWS, LEFT, MEETS, PROMOTES, namespaces
from precision_torch.op_plan import SPECIAL, plan_for
from precision_torch.op_treatments import cast_arguments

BFLOAT16 = PrecisionPolicy.from_name("mixed_bfloat16")


def bare_names():
    """Of every function that torch says may be overridden: its bare name, and where it was found."""
    found = {}
    for functions in overrides.get_overridable_functions().values():
        for function in functions:
            path = (overrides.resolve_name(function) or str(function)).removesuffix(".__get__")
            found.setdefault(path.rpartition(".")[2], path)
    return found


def in_place(name, names):
    return name.endswith("_") and not name.startswith("__") and name[:-1] in names


def test_every_public_function_is_in_the_table():
    names = bare_names()
    assert len(names) > 900
    missing = {name: path for name, path in names.items() if name not in FAMILY and name not in LEFT}
    missing = {name: path for name, path in missing.items() if not in_place(name, names)}
    assert not missing


def test_public_functions_that_may_not_be_overridden_are_known_too():
    ignored = overrides.get_ignored_functions()
    for space in (F, torch.special, torch.linalg, torch.fft):
        names = [n for n in dir(space) if not n.startswith("_") and callable(getattr(space, n))]
        names = [n for n in names if getattr(space, n) in ignored]
        rest = {n for n in names if n not in FAMILY and n not in LEFT}
        assert rest <= {
            *("fftfreq", "rfftfreq"),  # make frequencies
            *("assert_int_or_pair", "boolean_dispatch", "handle_torch_function", "has_torch_function"),
            *("has_torch_function_unary", "has_torch_function_variadic"),
            *("grouped_mm", "scaled_grouped_mm", "scaled_mm"),  # kernels for the dtypes and scales that they are given
        }


def test_no_name_is_in_two_tables_and_each_has_a_known_family():
    assert not set(FAMILY) & set(LEFT)
    assert set(FAMILY.values()) == set(FAMILIES)


def test_the_table_can_be_looked_up():
    entries = {entry.name: entry for entry in precision.get_backend("torch").op_table()}
    assert entries["torch.softmax"].family == "softmax" and entries["torch.nn.functional.gelu"].why
    assert entries["torch.linalg.svdvals"].family == "linalg" and entries["torch.Tensor.view"].family == "shape"
    left = entries["torch.bernoulli"]
    assert left.family is None and "random" in left.why
    assert all(entry.why for entry in entries.values() if entry.family is None)
    assert len(entries) > 800


def test_what_promotes_or_follows_says_why():
    for treatment, reasons in (("promote", PROMOTES), ("follow", FOLLOWS)):
        named = {name for name, family in FAMILY.items() if FAMILIES[family].treatment == treatment}
        assert set(reasons) == named
        assert all(reasons.values())
    assert set(PROMOTES) >= MEETS


def test_names_are_those_of_functions_that_exist():
    known = {name for space in namespaces().values() for name in dir(space)}
    assert not [name for name in FAMILY if name not in known and not hasattr(torch._C._nn, name)]
    assert all(
        name in FAMILY or name in LEFT for name in (n if n.startswith("__") else n.removesuffix("_") for n in SPECIAL)
    )


# ---- what torch.autocast does by itself ---------------------------------------------------------------------------


def header():
    """The lists of the header that torch was built with, by macro."""
    path = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = path.read_text()
    lists = {}
    for kind in ("LOWER_PRECISION_FP", "FP32", "FP32_SET_OPT_DTYPE", "PROMOTE"):
        body = re.search(rf"define AT_FORALL_{kind}\(_\)(.*?)\n\n", text, re.S).group(1)
        lists[kind] = {name.removeprefix("linalg_") for name in re.findall(r"_\((\w+)", body)}
    return lists


# How CUDA's list calls what users call otherwise, and what it reaches through those it names.
SAME = {
    "arccos": "acos", "arcsin": "asin", "__matmul__": "matmul", "__pow__": "pow", "__rpow__": "pow",
    "__rdiv__": "reciprocal", "__rtruediv__": "reciprocal", "cross_entropy": "log_softmax", "upsample_nearest": "upsample_nearest2d",
    "__rmatmul__": "matmul", "grid_sample": "grid_sampler",
}  # fmt: skip
KERNELS = {"lstm", "gru", "rnn_tanh", "rnn_relu"}  # cuDNN's, cast as a whole in autocast_mode.cpp


@pytest.mark.parametrize("device_type", ["cuda", "xpu"])
def test_the_list_for_cuda_is_the_headers(device_type):
    lists = header()
    kinds = {
        "low": lists["LOWER_PRECISION_FP"],
        "float32": lists["FP32"] | lists["FP32_SET_OPT_DTYPE"],
        "promote": lists["PROMOTE"],
    }
    for name, kind in NATIVE[device_type].items():
        assert name in KERNELS or SAME.get(name, name) in kinds[kind], name


def test_what_the_header_lists_and_we_do_not_is_treated_by_us():
    lists = header()
    treated = {name for function, name in _treated("cuda")}
    for name in lists["LOWER_PRECISION_FP"] | lists["FP32"] | lists["FP32_SET_OPT_DTYPE"]:
        if name in FAMILY and name not in NATIVE["cuda"]:
            assert name in treated, name


def _treated(device_type):
    from precision_torch.op_plan import functions

    plan = plan_for(BFLOAT16, device_type)
    return [(function, name) for function, name in functions() if function in plan.treatments]


def rand(*shape):
    return torch.rand(*shape) * 0.5 + 0.25


def _square():
    a = rand(3, 3)
    return a @ a.T + torch.eye(3)


IMAGE, VOLUME = (1, 2, 4, 4), (1, 2, 4, 4, 4)
POOL = {"kernel_size": 2}
CALLS = {
    "conv1d": ((1, 2, 4), (2, 2, 3)), "conv2d": (IMAGE, (2, 2, 3, 3)), "conv3d": (VOLUME, (2, 2, 3, 3, 3)),
    "conv_transpose1d": ((1, 2, 4), (2, 2, 3)), "conv_transpose2d": (IMAGE, (2, 2, 3, 3)),
    "conv_transpose3d": (VOLUME, (2, 2, 3, 3, 3)), "conv_tbc": ((4, 1, 2), (3, 2, 2), (2,)),
    "addmm": ((2, 2), (2, 3), (3, 2)), "matmul": ((2, 3), (3, 2)), "mm": ((2, 3), (3, 2)), "linear": ((2, 3), (4, 3)),
    "addbmm": ((2, 2), (1, 2, 3), (1, 3, 2)), "bmm": ((1, 2, 3), (1, 3, 2)), "vecdot": ((3,), (3,)), "prelu": (IMAGE, (1,)),
    "__matmul__": ((2, 3), (3, 2)), "__rmatmul__": ((2, 3), (3, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name, kind in NATIVE["cpu"].items() if kind == "low"])
def test_the_cpu_casts_these_down(name):
    function = _find(name)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*(rand(*shape) for shape in CALLS[name])).dtype is torch.bfloat16


def _find(name):
    return next(
        getattr(space, name)
        for space in (F, torch, torch.linalg, torch.special, torch.fft, torch.Tensor)
        if hasattr(space, name)
    )


def _loss(*shapes, **settings):
    return lambda f, low: f(*(low(rand(*shape)) for shape in shapes), **settings)


def _labels(f, low):
    return f(low(rand(2, 3)), torch.tensor([0, 1]))


def _unary(f, low):
    return f(low(_square()))


def _spectrum(f, low):
    return f(low(rand(4)).to(torch.complex64) if f.__name__ in ("fft_irfft", "fft_hfft") else low(rand(4, 4)))


FLOAT32_CALLS = {
    **dict.fromkeys(["adaptive_avg_pool3d", "adaptive_max_pool3d", "adaptive_max_pool3d_with_indices"], lambda f, low: f(low(rand(*VOLUME)), 2)),
    **dict.fromkeys(["avg_pool3d", "max_pool3d", "max_pool3d_with_indices"], lambda f, low: f(low(rand(*VOLUME)), 2)),
    **dict.fromkeys(["fractional_max_pool2d", "fractional_max_pool2d_with_indices"], lambda f, low: f(low(rand(*IMAGE)), 2, output_size=2)),
    **dict.fromkeys(["fractional_max_pool3d", "fractional_max_pool3d_with_indices"], lambda f, low: f(low(rand(*VOLUME)), 2, output_size=2)),
    "max_unpool1d": lambda f, low: f(low(rand(1, 2, 2)), torch.tensor([[[0, 2], [0, 2]]]), 2),
    "max_unpool2d": lambda f, low: f(low(rand(1, 1, 1, 1)), torch.zeros(1, 1, 1, 1).long(), 2),
    "max_unpool3d": lambda f, low: f(low(rand(1, 1, 1, 1, 1)), torch.zeros(1, 1, 1, 1, 1).long(), 2),
    **dict.fromkeys(["binary_cross_entropy", "binary_cross_entropy_with_logits", "huber_loss", "kl_div", "l1_loss", "mse_loss",
                     "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss", "hinge_embedding_loss"], _loss((2, 3), (2, 3))),
    "cdist": _loss((2, 3), (2, 3)),
    "cosine_embedding_loss": _loss((2, 3), (2, 3), (2,)),
    "margin_ranking_loss": _loss((2,), (2,), (2,)),
    "triplet_margin_loss": _loss((2, 3), (2, 3), (2, 3)),
    **dict.fromkeys(["cross_entropy", "nll_loss", "multi_margin_loss"], _labels),
    "multilabel_margin_loss": lambda f, low: f(low(rand(2, 3)), torch.tensor([[0, -1, 1], [1, 0, -1]])),
    "ctc_loss": lambda f, low: f(low(rand(4, 1, 3)), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2])),
    "fake_quantize_per_tensor_affine": lambda f, low: f(low(rand(3)), 0.1, 0, 0, 255),
    **dict.fromkeys(["grid_sample"], lambda f, low: f(low(rand(*IMAGE)), low(rand(1, 4, 4, 2)), align_corners=False)),
    **dict.fromkeys(["grid_sampler", "grid_sampler_2d"], lambda f, low: f(low(rand(*IMAGE)), low(rand(1, 4, 4, 2)), 0, 0, False)),
    "grid_sampler_3d": lambda f, low: f(low(rand(*VOLUME)), low(rand(1, 2, 2, 2, 3)), 0, 0, False),
    "pad": lambda f, low: f(low(rand(*IMAGE)), (1, 1, 1, 1), mode="reflect"),
    **dict.fromkeys(["cholesky_inverse", "cholesky", "cholesky_ex", "inverse", "inv", "inv_ex", "eig", "eigh", "eigvals", "eigvalsh", "cond",
                     "qr", "svd", "svdvals", "pinverse", "geqrf", "matrix_rank", "trace"], _unary),
    "cholesky_solve": _loss((3, 1), (3, 3)),
    "triangular_solve": _loss((3, 1), (3, 3)),
    "lstsq": _loss((3, 3), (3, 1)),
    "householder_product": _loss((3, 3), (3,)),
    "orgqr": _loss((3, 3), (3,)),
    "ormqr": _loss((3, 3), (3,), (3, 3)),
    "tensorinv": lambda f, low: f(low(_square()), ind=1),
    "tensorsolve": _loss((3, 3), (3,)),
    "nanquantile": lambda f, low: f(low(rand(4)), 0.5),
    "quantile": lambda f, low: f(low(rand(4)), 0.5),
    "prod": lambda f, low: f(low(rand(4))),
    "polar": _loss((3,), (3,)),
    "view_as_complex": _loss((3, 2)),
    "stft": lambda f, low: f(low(rand(16)), 4, return_complex=True, window=torch.ones(4)),
    **dict.fromkeys(["fft", "fft2", "fftn", "hfft", "ifft", "ifft2", "ifftn", "ihfft", "irfft", "irfft2", "irfftn", "rfft", "rfft2",
                     "rfftn"], lambda f, low: f(low(rand(4, 4)))),
}  # fmt: skip
WIDE = (torch.float32, torch.complex64, torch.int64)


@pytest.mark.parametrize("name", [name for name, kind in NATIVE["cpu"].items() if kind == "float32"])
def test_the_cpu_widens_these(name):
    space = (
        torch.fft
        if hasattr(torch.fft, name)
        else torch.linalg
        if name in ("cond", "eig", "lstsq", "matrix_rank")
        else None
    )
    function = getattr(space, name) if space else _find(name)
    with torch.autocast("cpu", torch.bfloat16):
        result = FLOAT32_CALLS[name](function, lambda tensor: tensor.bfloat16())
    result = result[0] if isinstance(result, tuple) else result
    assert result.dtype in WIDE


@pytest.mark.parametrize("name", [name for name, kind in NATIVE["cpu"].items() if kind == "promote"])
def test_the_cpu_promotes_these(name):
    low, wide = rand(2, 2).bfloat16(), rand(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        function = getattr(torch, name)
        result = function(low, 0, torch.tensor([0, 1]), wide) if name == "index_copy" else function([low, wide])
    assert result.dtype is torch.float32


def test_where_the_lists_agree_with_the_table_nothing_is_done():
    for device_type in ("cpu", "cuda"):
        treated = {function for function, _ in _treated(device_type)}
        for function in (
            F.linear,
            torch.matmul,
            torch.bmm,
            F.conv2d,
            F.mse_loss,
            torch.add,
            torch.cat,
            torch.relu,
            F.embedding,
        ):
            assert function not in treated
    on_cuda = {function for function, _ in _treated("cuda")}
    assert not {torch.exp, F.softmax, torch.sum, F.layer_norm} & on_cuda
    assert {torch.mean, F.batch_norm, F.avg_pool2d, torch.prelu, torch.dot, torch.square} <= on_cuda


def test_a_float32_policy_has_nothing_to_treat():
    from precision_torch.op_plan import native_dtype

    assert native_dtype(PrecisionPolicy()) is None
    assert native_dtype(PrecisionPolicy(rules=(Rule(family="matmul", dtype="float16"),))) == "float16"


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_are_cast_as_the_one_decision_says(family):
    plan = plan_for(BFLOAT16, "cpu")
    kinds = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64]
    for first in kinds:
        for second in kinds:
            args = (torch.ones(2, dtype=first), torch.ones(2, dtype=second))
            with torch.autocast("cpu", torch.bfloat16):
                cast, _ = cast_arguments(plan.code(family), "cpu", args, {})
            expected = decide(BFLOAT16, family, [dtype_name(first), dtype_name(second)])
            assert tuple(dtype_name(tensor.dtype) for tensor in cast) == expected
