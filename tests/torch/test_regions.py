"""Autocast, islands, op families and custom autograd functions: what runs in which dtype."""

import pytest
import torch
import torch.nn.functional as F

from precision import PolicyError, PrecisionPolicy, Rule

from .helpers import bind, weight


def test_autocast_is_torch_autocast_with_device_and_dtype():
    region = bind("mixed_bfloat16").autocast()
    assert isinstance(region, torch.autocast)
    assert (region.device, region.fast_dtype, region._enabled) == ("cpu", torch.bfloat16, True)


@pytest.mark.parametrize(("policy", "dtype"), [("mixed_bfloat16", torch.bfloat16), ("mixed_float16", torch.float16)])
def test_autocast_computes_low_as_context_manager_and_decorator(policy, dtype):
    mp, x = bind(policy), torch.ones(2, 2)
    with mp.autocast():
        inside = x @ x
    assert inside.dtype is dtype
    assert mp.autocast()(torch.matmul)(x, x).dtype is dtype
    assert mp.autocast(torch.matmul)(x, x).dtype is dtype
    assert (x @ x).dtype is torch.float32


def test_a_float32_policy_keeps_an_outer_autocast_out():
    mp, x = bind("float32"), torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with mp.autocast():
            assert (x @ x).dtype is torch.float32
            with torch.autocast("cpu"):  # a user's own, inside: torch's default dtype still holds
                assert (x @ x).dtype is torch.bfloat16
        assert (x @ x).dtype is torch.bfloat16


def test_native_autocast_cache_goes_stale_and_ours_does_not():
    x = torch.ones(1, 2)
    for region, expected in (
        (torch.autocast("cpu", torch.bfloat16), 0.0),  # the fault: the updated weight is not seen
        (bind("mixed_bfloat16").autocast(), 2.0),
    ):
        w = torch.nn.Parameter(torch.zeros(1, 2))
        with region:
            F.linear(x, w)
            with torch.no_grad():
                w.add_(1.0)
            assert F.linear(x, w).item() == expected


def test_a_weight_used_twice_gets_its_gradient_summed_in_float32():
    def gradient(region):
        w = torch.nn.Parameter(torch.ones(1, 1))
        with region:
            # 1 and 2**-9 in bfloat16: their sum needs more digits than bfloat16 has
            loss = F.linear(torch.ones(1, 1), w).float().sum() + F.linear(torch.full((1, 1), 2.0**-9), w).float().sum()
        loss.backward()
        return w.grad.item()

    assert gradient(bind("mixed_bfloat16").autocast()) == 1 + 2.0**-9
    assert gradient(torch.autocast("cpu", torch.bfloat16)) == 1.0  # native: lost in the cached copy's gradient


def test_autocast_after_no_grad_in_the_same_region_still_trains():
    mp, w = bind("mixed_bfloat16"), torch.nn.Parameter(torch.ones(2, 2))
    with mp.autocast(cache_enabled=True):
        with torch.no_grad():
            F.linear(torch.ones(1, 2), w)
        F.linear(torch.ones(1, 2), w).sum().backward()
    assert torch.equal(w.grad, torch.ones(2, 2))


def test_island_as_context_manager():
    mp, x = bind("mixed_bfloat16"), torch.ones(2, 2)
    with mp.autocast():
        low = x @ x
        with mp.island("float32") as cast:
            assert cast(low).dtype is torch.float32
            assert (cast(low) @ x).dtype is torch.float32
            assert cast({"i": torch.ones(1, dtype=torch.int32)})["i"].dtype is torch.int32
        assert (x @ x).dtype is torch.bfloat16


def test_island_as_decorator_casts_and_keeps_float64():
    mp = bind("mixed_bfloat16")
    seen = []

    @mp.island("float32")
    def inside(a, *, b):
        seen.append((a.dtype, b["x"].dtype, torch.is_autocast_enabled("cpu")))
        return a @ a

    with mp.autocast():
        out = inside(torch.ones(2, 2).bfloat16(), b={"x": torch.ones(1, dtype=torch.float64)})
    assert seen == [(torch.float32, torch.float64, False)]
    assert out.dtype is torch.float32
    assert inside.__name__ == "inside"


def test_an_island_may_be_low_and_nested_and_left_by_an_error():
    mp = bind("float32")
    island = mp.island("bfloat16")
    with island as outer, island as inner:
        assert outer(torch.ones(1)).dtype is inner(torch.ones(1)).dtype is torch.bfloat16
    with mp.autocast(), pytest.raises(ZeroDivisionError), mp.island():
        raise ZeroDivisionError
    assert not torch.is_autocast_enabled("cpu")


def test_unknown_dtypes_and_families_are_refused_at_once():
    with pytest.raises(PolicyError, match="float64"):
        bind().island("float64")
    with pytest.raises(PolicyError, match="float64"):
        bind().island(torch.float64)
    with pytest.raises(PolicyError, match="softmax"):
        bind().op("sofmax")


def test_op_casts_as_its_family_and_keeps_autocast_out():
    mp = bind("mixed_bfloat16")
    seen = {}

    def record(family):
        @mp.op(family)
        def op(a, pair, *, mask=None):
            seen[family] = (a.dtype, pair[0].dtype, mask and mask["m"].dtype, torch.is_autocast_enabled("cpu"))
            return a

        return op

    f32, bf16, integer = torch.ones(2), torch.ones(2).bfloat16(), {"m": torch.ones(2, dtype=torch.int64)}
    with mp.autocast():
        for family in ("matmul", "softmax", "elementwise", "shape"):
            record(family)(f32, (bf16,), mask=integer)
    assert seen == {
        "matmul": (torch.bfloat16, torch.bfloat16, torch.int64, False),
        "softmax": (torch.float32, torch.float32, torch.int64, False),
        "elementwise": (torch.float32, torch.float32, torch.int64, False),
        "shape": (torch.float32, torch.bfloat16, torch.int64, False),
    }


def test_op_leaves_float64_ops_alone_and_obeys_family_rules():
    mp = bind(PrecisionPolicy(compute_dtype="bfloat16", rules=(Rule(family="softmax", dtype="bfloat16"),)))
    double = torch.ones(2, dtype=torch.float64)
    assert mp.op("matmul")(lambda a, b: b)(double, torch.ones(2)).dtype is torch.float32
    assert mp.op("softmax")(lambda a: a.softmax(-1))(torch.ones(2)).dtype is torch.bfloat16


def make_function(mp, cast_inputs):
    """A matmul as a custom autograd function that notes the dtypes it works in."""
    seen = {}

    class Matmul(torch.autograd.Function):
        @staticmethod
        @mp.custom_fwd(cast_inputs=cast_inputs)
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            out = a @ b
            seen["forward"] = (a.dtype, out.dtype)
            return out

        @staticmethod
        @mp.custom_bwd
        def backward(ctx, grad):
            a, b = ctx.saved_tensors
            seen["backward"] = (grad.dtype, (grad @ b.T).dtype)
            return grad @ b.T, a.T @ grad

    return Matmul.apply, seen


@pytest.mark.parametrize(
    ("cast_inputs", "forward", "backward"),
    [
        (None, (torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)),
        ("float32", (torch.float32, torch.float32), (torch.float32, torch.float32)),
        ("compute", (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.bfloat16)),
    ],
)
def test_custom_autograd_functions(cast_inputs, forward, backward):
    mp = bind("mixed_bfloat16")
    matmul, seen = make_function(mp, cast_inputs)
    a, b = torch.nn.Parameter(torch.randn(2, 3)), torch.nn.Parameter(torch.randn(3, 2))
    with mp.autocast():
        out = matmul(a, b)
    out.float().sum().backward()
    assert seen == {"forward": forward, "backward": backward}
    assert a.grad.dtype is torch.float32
    expected = torch.ones(2, 2) @ b.detach().T
    assert torch.allclose(a.grad, expected, atol=0.05)


def test_custom_functions_outside_autocast_do_nothing():
    mp = bind("mixed_bfloat16")
    matmul, seen = make_function(mp, "compute")
    matmul(weight(1.0)[None], weight(2.0)[None]).sum().backward()
    assert seen["forward"] == (torch.float32, torch.float32)


@pytest.mark.parametrize("form", ["decorator", "function"])
def test_decorated_functions_may_call_themselves(form):
    def leaks(region):
        def halve(n):
            inside.append(torch.is_autocast_enabled("cpu"))
            return again(n // 2) if n else 0

        inside = []
        again = region(halve)
        try:
            again(4)
            return torch.is_autocast_enabled("cpu")
        finally:
            assert inside == [True] * 4
            torch.set_autocast_enabled("cpu", False)

    mp = bind("mixed_bfloat16")
    assert leaks(torch.autocast("cpu", dtype=torch.bfloat16))  # the native fault: on for good
    assert not leaks(mp.autocast() if form == "decorator" else mp.autocast)
