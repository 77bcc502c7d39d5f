"""The GradScaler: the neutral rule behind the native interface, and errors for calls in an order that cannot be right."""

import copy
import io
import math
import pickle

import numpy as np
import pytest
import torch

from precision import LossScale, LossScaleError, NonFiniteGradientsError, PolicyError, StateError, next_state
from precision.loss_scale import initial_state, state_to_dict

from .helpers import bind, finite, overflow, weight


def sgd(*params, **kwargs):
    return torch.optim.SGD(list(params), lr=0.5, **kwargs)


def run(scaler, optimizer, param, *, ok=True):
    optimizer.zero_grad()
    (finite if ok else overflow)(scaler, param)
    result = scaler.step(optimizer)
    scaler.update()
    return result


def test_it_is_a_native_scaler_and_answers_like_one():
    scaler = bind("float32", initial=8.0, growth_interval=3).grad_scaler()
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    assert scaler.get_scale() == 8.0 and scaler._scale.item() == 8.0 and scaler._get_growth_tracker() == 0
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (2.0, 0.5, 3)


@pytest.mark.parametrize("fused", [False, True])
def test_trajectory_and_weights_equal_the_native_scaler(fused):
    rng = np.random.default_rng(0)
    settings = {
        "growth_interval": 3,
        "growth_factor": 3.0,
        "backoff_factor": 0.375,
    }  # exact in float32, as the rule's are
    ours = bind("float32", initial=1000.0, **settings).grad_scaler()
    theirs = torch.amp.GradScaler("cpu", init_scale=1000.0, **settings)
    weights = [torch.nn.Parameter(torch.tensor([1.0, -3.0])) for _ in range(2)]
    optimizers = [torch.optim.Adam([w], lr=0.1, fused=fused) for w in weights]
    for _ in range(60):
        ok, data = rng.random() < 0.7, torch.tensor(rng.standard_normal(2), dtype=torch.float32)
        for scaler, w, optimizer in zip((ours, theirs), weights, optimizers, strict=True):
            optimizer.zero_grad()
            scaler.scale(((w - data) ** 2).sum() * (1.0 if ok else math.inf)).backward()
            scaler.step(optimizer)
            scaler.update()
        assert ours.get_scale() == theirs.get_scale()
        assert ours._get_growth_tracker() == theirs._get_growth_tracker()
    # the fused kernel divides by the scale where we multiply by its reciprocal: a rounding apart for a scale of 300
    assert torch.allclose(weights[0], weights[1], rtol=0 if not fused else 1e-5, atol=0)


def test_floor_cap_and_hysteresis_follow_the_rule():
    config = LossScale(mode="dynamic", initial=4.0, minimum=1.0, maximum=8.0, growth_interval=2, hysteresis=2)
    scaler, w = bind("float32", **config.effective()).grad_scaler(), weight()
    optimizer, state = sgd(w), initial_state(config)
    pattern = [1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 1, 1, 0, 1, 1]
    scales = []
    for ok in pattern:
        run(scaler, optimizer, w, ok=bool(ok))
        state = next_state(config, state, np.bool_(ok), np)
        assert scaler.state_dict() == state_to_dict(state)
        scales.append(scaler.get_scale())
    assert scales == [4, 8, 8, 8, 8, 8, 8, 4, 2, 1, 1, 1, 1, 2, 2, 2, 4]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_a_skipped_step_touches_neither_parameters_nor_optimizer_state(kind, fused):
    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0, 2.0)
    optimizer = kind([w], lr=0.1, fused=fused, **({"momentum": 0.9} if kind is torch.optim.SGD else {}))
    assert run(scaler, optimizer, w).taken
    before = copy.deepcopy((w.detach(), optimizer.state_dict()["state"]))
    result = run(scaler, optimizer, w, ok=False)
    assert result.skipped and not result.taken and not result and result.value is None
    assert torch.equal(w.detach(), before[0])
    for key, value in optimizer.state_dict()["state"][0].items():
        assert value is None or torch.equal(torch.as_tensor(value), torch.as_tensor(before[1][0][key])), key
    assert scaler.get_scale() == 4.0
    assert run(scaler, optimizer, w).taken


def test_step_result_keeps_the_optimizers_return_value():
    class Returns(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            return 42

    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight()
    result = run(scaler, Returns([w], lr=0.1), w)
    assert result.value == 42
    assert "taken=True" in repr(result)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_losses_are_scaled_in_float32_or_wider(dtype, shape):
    scaler = bind("float32", initial=2.0**16).grad_scaler()
    loss = torch.full(shape, 3.0, dtype=dtype)
    scaled = scaler.scale(loss)
    assert scaled.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    assert torch.equal(scaled.double(), torch.full(shape, 3.0 * 2**16, dtype=torch.float64))


def test_native_overflows_a_float16_loss_vector_where_ours_does_not():
    loss = torch.full((3,), 3.0, dtype=torch.float16)
    assert torch.isinf(torch.amp.GradScaler("cpu", init_scale=2.0**16).scale(loss)).all()
    assert torch.isfinite(bind("float32", initial=2.0**16).grad_scaler().scale(loss)).all()


def test_scale_takes_what_the_native_one_takes():
    scaler, x = bind("float32", initial=4.0).grad_scaler(), torch.ones(())
    assert [float(v) for v in scaler.scale([x, x * 2])] == [4.0, 8.0]
    assert isinstance(scaler.scale((x,)), tuple)
    assert [float(v) for v in scaler.scale(v for v in (x, x))] == [4.0, 4.0]
    assert float(scaler.scale({"a": x})["a"]) == 4.0
    with pytest.raises(LossScaleError, match="int"):
        scaler.scale(3)


def test_unscale_then_clip_then_step():
    scaler, w = bind("float32", initial=2.0**10).grad_scaler(), weight(1.0, 1.0)
    optimizer = sgd(w)
    scaler.scale((w * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(optimizer)
    assert torch.equal(w.grad, torch.tensor([3.0, 4.0]))
    torch.nn.utils.clip_grad_norm_([w], 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert torch.allclose(w.detach(), 1 - 0.5 * torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("fused", [False, True])
def test_order_of_calls(fused):
    scaler, w = bind("float32", initial=4.0).grad_scaler(), weight()
    optimizer = sgd(w, fused=fused)
    for early in (scaler.update, lambda: scaler.step(optimizer), lambda: scaler.unscale_(optimizer)):
        with pytest.raises(LossScaleError, match="before any loss was scaled"):
            early()
    finite(scaler, w)
    with pytest.raises(LossScaleError, match=r"before any step\(optimizer\)"):
        scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(LossScaleError, match="already called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    with pytest.raises(LossScaleError, match="already called"):
        scaler.step(optimizer)
    with pytest.raises(LossScaleError, match="after step"):
        scaler.unscale_(optimizer)
    scaler.update()
    with pytest.raises(LossScaleError, match="before any loss was scaled"):
        scaler.update()
    run(scaler, optimizer, w)  # and the errors left it usable


def test_no_gradients_is_an_error():
    scaler, w = bind("float32", initial=4.0).grad_scaler(), weight()
    scaler.scale(torch.ones(()))
    with pytest.raises(LossScaleError, match="no gradients"):
        scaler.step(sgd(w))


def test_several_optimizers_share_one_update_and_have_a_flag_each():
    scaler, a, b = bind("float32", initial=8.0, growth_interval=2).grad_scaler(), weight(1.0), weight(1.0)
    first, second = sgd(a), sgd(b)
    finite(scaler, a)
    overflow(scaler, b)
    assert scaler.step(first).taken
    assert scaler.step(second).skipped
    scaler.update()
    assert (a.item(), b.item(), scaler.get_scale()) == (0.5, 1.0, 4.0)
    assert scaler.state_dict()["skipped"] == 1
    for _ in range(2):
        a.grad = b.grad = None
        scaler.scale(a.sum() + b.sum()).backward()
        scaler.step(first)
        scaler.step(second)
        scaler.update()
    assert scaler.get_scale() == 8.0  # two iterations made one growth: counted once each


def test_accumulation_scales_every_micro_batch_alike():
    scaler, w = bind("float32", initial=8.0, growth_interval=1).grad_scaler(), weight(1.0)
    optimizer = sgd(w)
    for _ in range(3):
        scaler.scale(w.sum() / 3).backward()
        assert scaler.get_scale() == 8.0
    scaler.step(optimizer)
    scaler.update()
    assert w.item() == pytest.approx(0.5)
    assert scaler.get_scale() == 16.0


def test_an_overflow_in_any_micro_batch_skips_the_step():
    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0)
    overflow(scaler, w)
    finite(scaler, w)
    assert scaler.step(sgd(w)).skipped


def test_sparse_and_complex_and_double_gradients():
    mp = bind("float32", initial=2.0**10)
    table = torch.nn.Embedding(4, 2, sparse=True)
    phase = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    double = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torch.optim.SGD([*table.parameters(), phase, double], lr=0.5)
    scaler = mp.grad_scaler()
    before = table.weight.detach().clone()
    loss = table(torch.tensor([1, 1, 3])).sum() + (phase * phase.conj()).real.sum() + (3 * double).sum()
    scaler.scale(loss).backward()
    assert scaler.step(optimizer).taken
    scaler.update()
    assert torch.allclose(table.weight.detach() - before, torch.tensor([[0.0], [-1.0], [0.0], [-0.5]]).expand(4, 2))
    assert torch.allclose(phase.detach(), torch.zeros(2, dtype=torch.complex64))
    assert double.detach().tolist() == [-0.5, -0.5]
    optimizer.zero_grad()
    scaler.scale(table(torch.tensor([0])).sum() * math.inf).backward()
    assert scaler.step(optimizer).skipped


def test_closures_are_refused_as_native_does():
    scaler, w = bind("float32", initial=4.0).grad_scaler(), weight()
    optimizer = torch.optim.LBFGS([w])
    native = torch.amp.GradScaler("cpu")
    native.scale(w.sum()).backward()
    finite(scaler, w)
    with pytest.raises(RuntimeError, match="Closure"):
        native.step(optimizer, closure=lambda: w.sum())
    for call in (lambda c: scaler.step(optimizer, closure=c), lambda c: scaler.step(optimizer, c)):
        with pytest.raises(LossScaleError, match=r"closures.*LBFGS"):
            call(lambda: w.sum())


def test_mode_none_passes_through_closures_too():
    scaler, w = bind("float32").grad_scaler(), weight(1.0)
    assert not scaler.is_enabled() and scaler.get_scale() == 1.0
    loss = w.sum()
    assert scaler.scale(loss) is loss
    loss.backward()
    scaler.unscale_(sgd(w))
    assert scaler.step(sgd(w)).taken and w.item() == 0.5
    scaler.update()
    lbfgs = torch.optim.LBFGS([w])

    def closure():
        lbfgs.zero_grad()
        value = (w**2).sum()
        value.backward()
        return value

    assert scaler.step(lbfgs, closure).value.item() == 0.25


def test_mode_static_skips_and_keeps_the_scale():
    scaler, w = bind("float32", mode="static", initial=16.0).grad_scaler(), weight(1.0)
    optimizer = sgd(w)
    assert run(scaler, optimizer, w, ok=False).skipped
    assert run(scaler, optimizer, w).taken
    assert scaler.get_scale() == 16.0 and scaler.state_dict()["skipped"] == 1
    with pytest.raises(LossScaleError, match="static"):
        scaler.update(4.0)


def test_a_new_scale_is_held_to_the_bounds():
    scaler, w = bind("float32", initial=4.0, minimum=1.0, maximum=64.0).grad_scaler(), weight()
    scaler.update(32.0)
    assert scaler.get_scale() == 32.0
    for bad in (0.5, 65.0, math.nan, True, "4"):
        with pytest.raises(LossScaleError, match=r"minimum, maximum"):
            scaler.update(bad)
    for given, got in ((16.0, 16.0), (1e9, 64.0), (math.nan, 64.0), (0.0, 1.0)):
        scaler.update(torch.tensor([given]))
        assert scaler.get_scale() == got
    with pytest.raises(LossScaleError, match="one-element"):
        scaler.update(torch.ones(2))
    assert run(scaler, sgd(w), w).taken


def test_setters_are_validated():
    scaler = bind("float32", initial=4.0).grad_scaler()
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    assert (scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()) == (3.0, 0.25, 7)
    for setter, bad in (
        (scaler.set_growth_factor, 1.0),
        (scaler.set_backoff_factor, -1.0),
        (scaler.set_growth_interval, 0),
    ):
        with pytest.raises(PolicyError):
            setter(bad)


def test_state_is_neutral_and_survives_pickle_deepcopy_and_torch_save():
    mp = bind("float32", initial=8.0, growth_interval=5, hysteresis=2)
    scaler, w = mp.grad_scaler(), weight()
    optimizer = sgd(w)
    for ok in (True, False, True):
        run(scaler, optimizer, w, ok=ok)
    saved = scaler.state_dict()
    assert saved == {
        "version": 1, "scale": 8.0, "good_steps": 1, "hysteresis_left": 1, "skipped": 1, "consecutive_skips": 0,
    }  # fmt: skip
    assert all(type(v) in (int, float) for v in saved.values())
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    fresh = mp.grad_scaler()
    fresh.load_state_dict(torch.load(buffer, weights_only=True))
    for other in (fresh, copy.deepcopy(scaler), pickle.loads(pickle.dumps(scaler))):
        assert other.state_dict() == saved and other.config == scaler.config
        for ok in (False, True, True):
            optimizer.zero_grad()
            (finite if ok else overflow)(other, w)
            other.step(optimizer)
            other.update()
        assert other.get_scale() == 4.0
    assert scaler.state_dict() == saved  # copies are apart
    finite(scaler, w)
    with pytest.raises(LossScaleError, match="iteration"):
        pickle.dumps(scaler)


def test_native_states_load_and_bad_ones_do_not():
    native = torch.amp.GradScaler("cpu", init_scale=512.0)
    w = weight()
    finite(native, w)
    native.step(sgd(w))
    native.update()
    scaler = bind("float32", initial=8.0).grad_scaler()
    scaler.load_state_dict(native.state_dict())
    assert (scaler.get_scale(), scaler._get_growth_tracker()) == (512.0, 1)
    good = scaler.state_dict()
    for bad in (
        {},
        {k: v for k, v in good.items() if k != "skipped"},
        {**good, "version": 2},
        {**good, "scale": math.nan},
    ):
        with pytest.raises(StateError):
            scaler.load_state_dict(bad)
        assert scaler.state_dict() == good


def test_too_many_skips_in_a_row_raise_without_looking_each_step():
    scaler, w = bind("float32", initial=8.0, max_consecutive_skips=3).grad_scaler(), weight()
    optimizer, done = sgd(w), 0
    with pytest.raises(NonFiniteGradientsError, match="max_consecutive_skips = 3"):
        for _ in range(20):
            run(scaler, optimizer, w, ok=False)
            done += 1
    assert 3 <= done <= 6


def test_custom_optimizer_with_the_older_grad_scaler_contract():
    class Older(torch.optim.SGD):
        _step_supports_amp_scaling = True

        def step(self, closure=None, *, grad_scaler=None):
            found = sum(v.item() for v in grad_scaler._check_inf_per_device(self).values())
            if not found:
                for group in self.param_groups:
                    for p in group["params"]:
                        p.grad.div_(grad_scaler._get_scale_async())
                return super().step()
            return None

    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0)
    optimizer = Older([w], lr=0.5)
    assert run(scaler, optimizer, w).taken and w.item() == 0.5
    assert run(scaler, optimizer, w, ok=False).skipped and w.item() == 0.5


def test_a_fused_optimizers_own_grad_scale_is_kept():
    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0)
    optimizer = sgd(w, fused=True)
    optimizer.grad_scale = torch.tensor(2.0)
    run(scaler, optimizer, w)
    assert w.item() == 0.75
    assert not hasattr(optimizer, "grad_scale") and not hasattr(optimizer, "found_inf")


def test_the_rule_on_device_tensors_is_the_rule_on_host_scalars():
    """On the CPU the state is moved by NumPy scalars; on an accelerator by tensor ops. Here both, on the same pattern."""
    settings = {
        "initial": 4.0,
        "minimum": 1.0,
        "maximum": 3e38,
        "growth_factor": 1e5,
        "growth_interval": 2,
        "hysteresis": 2,
    }
    host, device = (bind("float32", **settings).grad_scaler() for _ in range(2))
    device._views = None  # as on an accelerator
    rng, w = np.random.default_rng(0), weight()
    optimizer = torch.optim.SGD([w], lr=0.0)
    for ok in rng.random(60) < 0.8:
        for scaler in (host, device):
            run(scaler, optimizer, w, ok=bool(ok))
        assert host.state_dict() == device.state_dict()
    assert host.state_dict()["skipped"] > 5


def test_accelerates_way_of_telling_whether_a_step_was_taken():
    """Accelerate replaces ``optimizer.step`` by one that notes the call, and passes a closure of None."""
    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0)
    optimizer, called = sgd(w), []
    native_step = optimizer.step
    optimizer.step = lambda *args, **kwargs: (called.append(1), native_step(*args, **kwargs))[1]
    for ok, count in ((True, 1), (False, 1), (True, 2)):
        optimizer.zero_grad()
        (finite if ok else overflow)(scaler, w)
        scaler.step(optimizer, None)
        scaler.update()
        assert len(called) == count


def test_lightnings_way_of_stepping():
    """Lightning unscales before its hooks unless the optimizer does so itself, and hands keywords through."""
    for fused in (False, True):
        scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0)
        optimizer = sgd(w, fused=fused)
        finite(scaler, w)
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        assert w.item() == 0.5


def test_native_code_that_reads_the_found_flags():
    scaler, w = bind("float32", initial=8.0).grad_scaler(), weight(1.0)
    optimizer = sgd(w)
    overflow(scaler, w)
    scaler.unscale_(optimizer)
    assert [v.item() for v in scaler._found_inf_per_device(optimizer).values()] == [1.0]
    assert scaler.step(optimizer).skipped


def test_an_optimizer_that_is_gone_is_not_mistaken_for_another():
    """States are kept by id, as the native scaler keeps them; a freed optimizer's id goes to the next one made."""
    scaler, ws = bind("float32", initial=8.0).grad_scaler(), [weight(1.0) for _ in range(8)]
    scaler.scale(sum(w.sum() for w in ws)).backward()
    for w in ws:
        assert scaler.step(sgd(w)).taken
    scaler.update()
    assert [w.item() for w in ws] == [0.5] * 8


def test_lazy_conjugates_and_negations():
    scaler = bind("float32", initial=8.0).grad_scaler()
    z = torch.nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    w = weight(0.0)
    scaler.scale(torch.view_as_real(z.conj() * complex(1, 2)).sum()).backward()
    w.grad = torch.full((1,), 8j).conj().imag
    assert z.grad.is_conj() and w.grad.is_neg()
    plain = (z.grad / 8).resolve_conj()
    optimizer = sgd(z, w)
    assert scaler.step(optimizer).taken
    assert torch.equal(z.detach(), -0.5 * plain)
    assert w.item() == 0.5
