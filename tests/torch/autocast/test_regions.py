"""mp.autocast is a torch.autocast, used in every way that one is, and gives the table's decisions."""

import copy
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

import precision
from precision import PrecisionPolicy, Rule

from ..helpers import bind

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
LOW = torch.full((2, 4), 0.5, dtype=BF16)
WIDE = torch.full((2, 4), 0.5)


def softmax_dtype():
    return LOW.softmax(-1).dtype


def test_natively_the_cpu_leaves_these_low_and_here_they_are_float32():
    calls = (
        lambda x: x.softmax(-1), lambda x: x.sum(), torch.mean, torch.exp, torch.log, lambda x: x**2, torch.square,
        lambda x: F.layer_norm(x, (4,)), lambda x: x.norm(), lambda x: x.cumsum(0), lambda x: x.logsumexp(-1),
        lambda x: F.kl_div(x.log_softmax(-1), x, reduction="sum"), lambda x: F.avg_pool1d(x, 2), lambda x: x.std(),
    )  # fmt: skip
    for call in calls:
        with torch.autocast("cpu", BF16):
            native = call(LOW).dtype
        with bind().autocast():
            assert call(LOW).dtype is F32
        assert native is BF16 or call is calls[11]  # a loss that the native list has


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.mv(x, y[0]), lambda x, y: torch.dot(x[0], y[0]), lambda x, y: torch.inner(x, y),
        lambda x, y: torch.tensordot(x, y, 2), lambda x, y: torch.vdot(x[0], y[0]), lambda x, y: torch.addmv(y[:, 0], x, y[0]),
        lambda x, y: torch.addr(y @ y.T, x[:, 0], y[:, 0]), lambda x, y: x.mv(y[0]), lambda x, y: torch.einsum("ij,kj->ik", x, y),
        lambda x, y: torch.chain_matmul(x, y.T), lambda x, y: torch.linalg.multi_dot([x, y.T, x]),
    ],
)  # fmt: skip
def test_products_of_mixed_dtypes_are_low(call):
    with bind().autocast():
        assert call(LOW, WIDE).dtype is call(WIDE, LOW).dtype is BF16


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: torch.lerp(x, y, 0.5), lambda x, y: torch.scatter_add(x, 0, torch.zeros(2, 4).long(), y),
        lambda x, y: x.index_add(0, torch.tensor([0, 1]), y), lambda x, y: torch.linalg.cross(x[:, :3], y[:, :3]),
        lambda x, y: F.bilinear(x, y, y.new_ones(3, 4, 4)), lambda x, y: x.index_put((torch.tensor([0]),), y[0]),
        lambda x, y: x.masked_scatter(x > 0, y), lambda x, y: torch.addcmul(x, x, y), lambda x, y: F.prelu(x, y[0, :1]),
    ],
)  # fmt: skip
def test_elementwise_functions_that_fail_on_mixed_dtypes_promote(call):
    with bind().autocast():
        assert call(LOW, WIDE).dtype is F32
        assert call(LOW, LOW).dtype is BF16 or call(LOW, WIDE).dtype is F32


def test_moved_values_stay_low_where_the_cpu_would_widen_them():
    x = torch.rand(1, 2, 4, 4, dtype=BF16)
    calls = (
        lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
        lambda x: F.max_pool3d(x, 2),
        lambda x: F.grid_sample(x, x.new_zeros(1, 4, 4, 2)),
    )
    for call in calls:
        with torch.autocast("cpu", BF16):
            assert call(x).dtype is F32
        with bind().autocast():
            assert call(x).dtype is BF16
    with bind().autocast():
        assert (
            F.interpolate(x, scale_factor=2).dtype
            is F.interpolate(x, scale_factor=2, mode="nearest-exact").dtype
            is BF16
        )
        assert F.interpolate(x, scale_factor=2, mode="bilinear").dtype is F32


def test_quotients():
    with bind().autocast():
        assert (1 / LOW).dtype is (1.0 / LOW).dtype is LOW.reciprocal().dtype is F32
        assert (2 / LOW).dtype is (LOW / 2).dtype is (LOW / LOW).dtype is BF16
        assert (LOW / WIDE).dtype is F32
        assert (2**LOW).dtype is (LOW**0.5).dtype is F32


def test_what_an_author_asks_for_is_obeyed():
    out = torch.empty(4, dtype=BF16)
    with bind().autocast():
        assert LOW.sum(dtype=BF16).dtype is BF16
        assert torch.softmax(LOW, -1, BF16).dtype is F.softmax(LOW, -1, dtype=BF16).dtype is BF16
        assert torch.cumsum(LOW, 0, dtype=F16).dtype is F16
        torch.sum(LOW, 0, out=out)
        x = LOW.clone()
        assert x.exp_() is x and x.dtype is BF16  # in place: the tensor keeps its dtype
        x **= 2
        x.pow_(2)
        x += WIDE
        assert x.dtype is BF16
    assert torch.equal(out, torch.ones(4, dtype=BF16))


def test_other_dtypes_are_left_alone():
    double = torch.rand(3, 3, dtype=torch.float64)
    with bind().autocast():
        assert double.softmax(-1).dtype is torch.pow(double, LOW[0, :1].float()).dtype is torch.float64
        assert (double @ double).dtype is double.mean().dtype is torch.float64
        assert torch.arange(3).sum().dtype is torch.int64
        assert torch.exp(torch.arange(3)).dtype is F32
        assert torch.ones(2, dtype=torch.complex64).sum().dtype is torch.complex64
        assert torch.fft.rfft(LOW).dtype is torch.complex64
        assert torch.ones(2, dtype=torch.bool).sum().dtype is torch.int64
        meta = torch.ones(2, 2, dtype=BF16, device="meta")
        assert meta.softmax(-1).dtype is BF16  # another device's


def test_sparse_tensors():
    sparse = torch.eye(3).to_sparse()
    with bind().autocast():
        assert sparse.bfloat16().sum().dtype is F32
        assert torch.sparse.sum(sparse).item() == 3.0


# ---- the ways of torch.autocast -----------------------------------------------------------------------------------


def test_it_is_a_torch_autocast_and_reenters():
    region = bind().autocast()
    assert isinstance(region, torch.autocast)
    with region:
        with region:
            assert softmax_dtype() is F32
        assert softmax_dtype() is F32
    assert softmax_dtype() is BF16 and not torch.is_autocast_enabled("cpu")
    with pytest.raises(ZeroDivisionError), region:
        raise ZeroDivisionError
    assert torch._C._len_torch_function_stack() == 0 and not torch.is_autocast_enabled("cpu")


def test_enabled_false_and_regions_that_switch_autocasting_off():
    mp = bind()
    with mp.autocast():
        for region in (
            mp.autocast(enabled=False),
            torch.autocast("cpu", enabled=False),
            mp.island(),
            bind("float32").autocast(),
        ):
            with region:
                assert softmax_dtype() is BF16 and (WIDE @ WIDE.T).dtype is F32
            assert softmax_dtype() is F32 and (WIDE @ WIDE.T).dtype is BF16
    with mp.autocast(enabled=False):
        assert (WIDE @ WIDE.T).dtype is F32


def test_the_innermost_of_nested_regions_decides_alone():
    softmax_low = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(family="softmax", dtype="bfloat16"),)))
    half, default = bind("mixed_float16"), bind()
    with default.autocast():
        with softmax_low.autocast():
            assert WIDE.softmax(-1).dtype is BF16 and WIDE.exp().dtype is F32
            with default.autocast():
                assert softmax_dtype() is F32
            assert WIDE.softmax(-1).dtype is BF16
        assert softmax_dtype() is F32
        with half.autocast():
            assert torch.mv(WIDE, WIDE[0]).dtype is (WIDE @ WIDE.T).dtype is F16
        with torch.autocast("cpu", F16):  # the user's own: its dtype, the table's decisions
            assert torch.mv(WIDE, WIDE[0]).dtype is (WIDE @ WIDE.T).dtype is F16
            assert softmax_dtype() is F32


def test_other_modes_around_and_inside_stay_in_their_places():
    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += 1
            return func(*args, **(kwargs or {}))

    mp, outer, inner = bind(), Count(), Count()
    with outer, mp.autocast(), inner:
        with mp.autocast():
            assert softmax_dtype() is F32
            assert len(torch.overrides._get_current_function_mode_stack()) == 3
        assert softmax_dtype() is F32
        seen = torch.overrides._get_current_function_mode_stack()
        assert seen[0] is outer and seen[-1] is inner
    assert outer.calls and inner.calls and torch._C._len_torch_function_stack() == 0


@pytest.mark.parametrize("form", ["decorator", "function"])
def test_decorated_functions_nest_and_leave_nothing(form):
    mp = bind()

    def count(n):
        assert softmax_dtype() is F32
        return again(n - 1) + 1 if n else 0

    again = mp.autocast(count) if form == "function" else mp.autocast()(count)
    assert again(3) == 3 and again.__name__ == "count"
    assert softmax_dtype() is BF16
    with pytest.raises(TypeError, match="decorates a function"):
        mp.autocast()(3)


def test_threads_have_their_own():
    mp, seen = bind(), {}

    def work(name, enter):
        if enter:
            with mp.autocast():
                barrier.wait()
                seen[name] = softmax_dtype()
        else:
            barrier.wait()
            seen[name] = softmax_dtype()

    barrier = threading.Barrier(3)
    with mp.autocast():
        threads = [threading.Thread(target=work, args=(name, name == "in")) for name in ("in", "out")]
        for thread in threads:
            thread.start()
        barrier.wait()
        for thread in threads:
            thread.join()
    assert seen == {"in": F32, "out": BF16}


def test_backward_outside_and_inside_of_the_region():
    mp, grads = bind(), []
    for inside in (False, True):
        w = torch.linspace(-1, 1, 16).view(4, 4).requires_grad_()
        with mp.autocast():
            loss = (WIDE @ w).softmax(-1).square().mean()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        grads.append(w.grad)
    assert grads[0].dtype is F32 and torch.equal(*grads)


def test_the_weight_cache_works_for_those_who_want_it():
    w = nn.Parameter(torch.ones(4, 4))
    with bind().autocast(cache_enabled=True):
        first = F.linear(WIDE, w)
        with torch.no_grad():
            w.zero_()
        assert torch.equal(F.linear(WIDE, w), first)  # stale, as natively
        with torch.no_grad():
            F.linear(WIDE, w)
        assert F.linear(WIDE, w).requires_grad
    with bind().autocast():
        assert F.linear(WIDE, w).sum() == 0


def test_native_leaves_the_decisions_to_torch():
    mp = precision.bind("mixed_bfloat16", backend="torch", device="cpu", native_autocast=True)
    with mp.autocast():
        assert softmax_dtype() is BF16 and (WIDE @ WIDE.T).dtype is BF16
        assert torch._C._len_torch_function_stack() == 0
        with bind().autocast():
            assert softmax_dtype() is F32
            with mp.autocast():
                assert softmax_dtype() is BF16
    with pytest.raises(precision.PolicyError, match="native_autocast"):
        precision.bind("mixed_bfloat16", backend="torch", device="cpu", native_autocast="yes")


def test_custom_autograd_functions_that_cast_their_inputs():
    mp = bind()

    class Softmax(torch.autograd.Function):
        @staticmethod
        @mp.custom_fwd(cast_inputs="compute")
        def forward(ctx, x):
            return x.softmax(-1)

        @staticmethod
        @mp.custom_bwd
        def backward(ctx, grad):
            return grad

    with mp.autocast():
        assert Softmax.apply(WIDE).dtype is BF16


def test_marked_functions_run_without_it():
    mp = bind()
    with mp.autocast():
        assert mp.op("matmul")(lambda x: x.softmax(-1))(WIDE).dtype is BF16
        assert mp.op("elementwise")(lambda x: x.softmax(-1))(LOW).dtype is BF16


def test_a_mode_copies_and_pickles_as_itself():
    from precision_torch.autocast_mode import mode_for

    mode = mode_for(PrecisionPolicy.from_name("mixed_bfloat16"), "cpu")
    assert copy.deepcopy(mode) is mode and pickle.loads(pickle.dumps(mode)) is mode
