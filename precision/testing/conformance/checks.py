"""The checks of the kit: each is one promise that ``precision.bind`` makes whatever the backend."""

from __future__ import annotations

import json
from typing import Any, Literal

import numpy as np

from precision.backend import BoundPolicy
from precision.errors import (
    MixedFrameworksError,
    NonFiniteGradientsError,
    PolicyError,
    StateError,
    UnsupportedError,
)
from precision.formats import DTYPES, FloatFormat
from precision.loss_scale import LossScale, LossScaler, LossScaleState, initial_state, next_state, state_to_dict
from precision.names import PRESETS
from precision.parity.replicas import replica_specs, tier_replicas
from precision.parity.suite import trajectory_patterns
from precision.parity.tiers import rule_trajectory, tier_decisions, tier_ops, tier_rounding, tier_trajectories
from precision.parity.training import overflow_steps, train_spec
from precision.policy import PrecisionPolicy, Rule
from precision.testing.conformance.kit import Kit, NotOffered, check, need, need_error, need_tier

DYNAMIC = LossScale(mode="dynamic", initial=1024.0, growth_interval=3)


# ---- what it says of itself --------------------------------------------------------------------------------------


@check("it has a name, and tells versions and what each device can do in each dtype")
def _tells(kit: Kit) -> None:
    backend = kit.backend
    need(backend.name == backend.name.strip().lower() and backend.name, f"name {backend.name!r} is not lower case")
    need(kit.adapter.name == backend.name, f"the adapter is called {kit.adapter.name!r}, not {backend.name!r}")
    versions = backend.versions()
    need(versions.get(backend.framework), f"versions() lacks the framework {backend.framework!r}: {versions}")
    need(all(isinstance(v, str) for v in versions.values()), f"versions are strings: {versions}")
    capabilities = backend.capabilities()
    devices = list(dict.fromkeys(c.device for c in capabilities))
    need(devices, "capabilities() lists no device")
    for device in devices:
        here = {c.dtype: c for c in capabilities if c.device == device}
        need(set(here) == set(DTYPES), f"{device} must list {', '.join(DTYPES)}; it lists {', '.join(here)}")
        need(all(c.reason.strip() for c in here.values()), f"{device}: a capability gives no reason")
        kinds = {c.support for c in here.values()}
        need(kinds <= {"native", "slow", "storage", "none"}, f"{device}: unknown support in {kinds}")
        need(here["float32"].support in ("native", "slow"), f"{device} has no float32 arithmetic")


@check("it binds what its device can do, and refuses the rest with an error")
def _binds(kit: Kit) -> None:
    bound = 0
    for name, policy in PRESETS.items():
        try:
            mp = kit.bind(policy)
        except UnsupportedError:
            need(not {policy.compute_dtype, policy.param_dtype} <= {"float32", *kit.lows}, f"refuses preset {name}")
            continue
        bound += 1
        need(isinstance(mp, BoundPolicy), f"bind gives a {type(mp).__name__}, not a BoundPolicy")
        need(mp.policy == policy and mp.backend is kit.backend, f"{name}: .policy or .backend is not what was bound")
        need(isinstance(mp.loss_scaler, LossScaler), f"{name}: .loss_scaler is no LossScaler")
        need(mp.loss_scaler.config == policy.loss_scale, f"{name}: .loss_scaler has other settings")
    need(bound, "binds none of the presets")
    usable = {c.dtype for c in kit.backend.capabilities() if c.support in ("native", "slow")}
    for dtype in sorted(set(DTYPES) - usable):
        policy = PrecisionPolicy(compute_dtype=dtype)
        need_error(UnsupportedError, f"computing in {dtype}, which no device can", kit.bind, policy)


# ---- casts and regions -------------------------------------------------------------------------------------------


@check("casts round floating leaves as the policy says, and leave the rest alone")
def _casts(kit: Kit) -> None:
    values = np.array([0.1, -3.0, 1e-3, 123.456], np.float32)
    for low in kit.lows:
        mp = kit.bind(PrecisionPolicy(compute_dtype=low, rules=(Rule(module="kept", dtype="float32"),)))
        counts = kit.tensor([1, 2], np.int32)
        tree = {"w": kit.tensor(values), "kept": kit.tensor(values), "counts": counts, "name": "text", "none": None}
        cast = mp.cast_to_compute(tree)
        need(set(cast) == set(tree), f"the tree's keys changed: {list(cast)}")
        _same(kit, cast["w"], FloatFormat.of(low).round(values), low, "cast_to_compute")
        _same(kit, cast["kept"], values, "float32", "cast_to_compute under a rule")
        _same(kit, cast["counts"], np.array([1, 2]), "int32", "an integer leaf")
        need(cast["name"] == "text" and cast["none"] is None, "leaves that are no tensors changed")
        back = mp.cast_to_param(cast)
        _same(kit, back["w"], FloatFormat.of(low).round(values), "float32", "cast_to_param")
        _same(
            kit,
            mp.cast_to_output({"y": cast["w"]})["y"],
            FloatFormat.of(low).round(values),
            "float32",
            "cast_to_output",
        )
    wide = kit.adapter.tensor(np.array([0.1]))
    if kit.array(wide).dtype == np.float64:  # where float64 tensors exist
        mp = kit.bind(PrecisionPolicy(compute_dtype=kit.lows[0] if kit.lows else "float32"))
        _same(
            kit, mp.cast_to_compute({"w": wide})["w"], np.array([0.1]), "float64", "float64, which is never narrowed,"
        )


@check("another framework's tensor is an error that says so")
def _foreign(kit: Kit) -> None:
    other = "jax" if kit.backend.framework != "jax" else "torch"
    foreign = type("Array", (), {"__module__": f"{other}.core"})()
    mp = kit.bind(PrecisionPolicy())
    for cast in (mp.cast_to_compute, mp.cast_to_param, mp.cast_to_output):
        need_error(MixedFrameworksError, f"a tensor of {other} in a tree", cast, {"w": foreign})


@check("an island keeps its dtype")
def _island(kit: Kit) -> None:
    for low in kit.lows:
        mp = kit.bind(PrecisionPolicy(compute_dtype=low))
        seen: list[str] = []

        def inside(x: Any, seen: list[str] = seen) -> Any:
            seen.append(kit.array(x).dtype.name)
            return x

        x = kit.tensor([1.0, 2.0], FloatFormat.of(low).numpy_dtype)
        _same(kit, mp.island("float32")(inside)(x), np.array([1.0, 2.0]), "float32", "an island's result")
        need(seen == ["float32"], f"an island in float32 saw {seen}")


@check("ops are cast as the one table decides (T0)")
def _decisions(kit: Kit) -> None:
    for low in kit.lows or ["float32"]:
        need_tier(tier_decisions([(kit.adapter, kit.bind(PrecisionPolicy(compute_dtype=low)))]))


@check("rounding is that of ml_dtypes, but for what is stated (T2)")
def _rounding(kit: Kit) -> None:
    castable = {c.dtype for c in kit.backend.capabilities() if c.support != "none"} - {"float32"}
    need_tier(tier_rounding(kit.adapter, sorted(castable)))


@check("ops are exact to one unit in the last place (T3)")
def _ops(kit: Kit) -> None:
    for low in kit.lows or ["float32"]:
        need_tier(tier_ops([(kit.adapter, kit.bind(PrecisionPolicy(compute_dtype=low)))]))


# ---- the loss scale ----------------------------------------------------------------------------------------------


@check("the loss is scaled in float32, whatever its dtype")
def _scales(kit: Kit) -> None:
    scaler = kit.bind(PrecisionPolicy(loss_scale=LossScale(mode="dynamic"))).loss_scaler
    for dtype in ("float32", *kit.lows):
        loss = kit.tensor(40.0, FloatFormat.of(dtype).numpy_dtype)
        _same(kit, scaler.scale(loss, scaler.init()), np.float32(40.0 * 65536), "float32", f"a scaled {dtype} loss")


@check("unscaling gives float32 and one flag for all gradients")
def _unscales(kit: Kit) -> None:
    scale = 3.0  # its reciprocal is not exact
    scaler = kit.bind(PrecisionPolicy(loss_scale=DYNAMIC.with_(initial=scale))).loss_scaler
    state = scaler.init()
    values = np.array([[1.0, -2.5], [1e-6, 6e4]], np.float32)
    for dtype in ("float32", *kit.lows):
        grads = {"a": kit.tensor(values, FloatFormat.of(dtype).numpy_dtype), "b": kit.tensor([7.0])}
        out, finite = scaler.unscale(grads, state)
        want = FloatFormat.of(dtype).round(values) * (np.float32(1) / np.float32(scale)) if dtype != "float32" else None
        want = values * (np.float32(1) / np.float32(scale)) if want is None else want
        _same(kit, out["a"], want, "float32", f"an unscaled {dtype} gradient")
        need(bool(kit.array(finite)) is True, "finite gradients are called not finite")
    for bad in (np.inf, -np.inf, np.nan):
        for place in ("a", "b"):
            grads = {"a": kit.tensor(values), "b": kit.tensor([7.0])}
            spoilt = kit.array(grads[place]).copy()
            spoilt.flat[-1] = bad
            _, finite = scaler.unscale({**grads, place: kit.tensor(spoilt)}, state)
            need(bool(kit.array(finite)) is False, f"{bad} in gradient {place!r} is called finite")


@check("with mode none nothing is scaled or looked at")
def _none(kit: Kit) -> None:
    scaler = kit.bind(PrecisionPolicy()).loss_scaler
    state = scaler.init()
    _same(kit, scaler.scale(kit.tensor(3.0), state), np.float32(3), "float32", "a loss under mode none")
    out, finite = scaler.unscale({"w": kit.tensor([np.inf])}, state)
    _same(kit, out["w"], np.array([np.inf]), "float32", "a gradient under mode none")
    need(bool(kit.array(finite)) is True, "mode none has looked at the gradients")
    need(scaler.state_dict(scaler.update(state, finite)) == scaler.state_dict(state), "mode none moved the state")


@check("the scale moves by the rule, bit for bit, in every form (T1)")
def _trajectories(kit: Kit) -> None:
    need_tier(tier_trajectories(kit.adapter, trajectory_patterns(count=4, steps=24)))
    scaler = kit.bind(PrecisionPolicy(loss_scale=DYNAMIC)).loss_scaler
    state, rule = scaler.init(), initial_state(DYNAMIC)
    for flag in (True, False, True, True, True, False, False):
        _, finite = scaler.unscale({"w": kit.tensor([1.0 if flag else np.inf])}, state)
        state = scaler.update(state, finite)
        rule = next_state(DYNAMIC, rule, np.bool_(flag), np)
        need(isinstance(state, LossScaleState), f"update gives a {type(state).__name__}, not a LossScaleState")
        need(scaler.state_dict(state) == state_to_dict(rule), f"{scaler.state_dict(state)} is not the rule's {rule}")


@check("states save as plain numbers, load from anywhere, and resume bit for bit")
def _states(kit: Kit) -> None:
    scaler = kit.bind(PrecisionPolicy(loss_scale=DYNAMIC)).loss_scaler
    pattern = [True, True, False, True, True, True, True, False, True]
    whole = rule_trajectory(DYNAMIC, pattern)
    saved = json.loads(json.dumps(whole[4]))
    need(scaler.state_dict(scaler.load_state_dict(saved)) == saved, "a loaded state saves as another")
    forms: tuple[Literal["neutral", "native"], ...] = ("neutral", "native")
    for form in forms:
        resumed = kit.adapter.trajectory(DYNAMIC, pattern[5:], form, saved)
        need(resumed == whole[5:], f"{form}: resumed from a saved state, the scale takes another course")
    native = {"scale": 512.0, "_growth_tracker": 2}
    need(scaler.state_dict(scaler.load_state_dict(native))["scale"] == 512.0, "a GradScaler's state does not load")
    for what, bad in {
        "a truncated state": {k: v for k, v in saved.items() if k != "scale"},
        "a state of another version": {**saved, "version": 99},
        "a NaN scale": {**saved, "scale": float("nan")},
        "something else": {"weights": 1},
    }.items():
        need_error(StateError, what, scaler.load_state_dict, bad)


@check("a run that only skips ends with an error")
def _diverges(kit: Kit) -> None:
    scaler = kit.bind(PrecisionPolicy(loss_scale=DYNAMIC.with_(max_consecutive_skips=2))).loss_scaler
    state = scaler.init()
    for skips in range(1, 4):
        _, finite = scaler.unscale({"w": kit.tensor([np.nan])}, state)
        state = scaler.update(state, finite)
        if skips <= 2:
            scaler.check(state)
    error = need_error(NonFiniteGradientsError, "three skips in a row where two are allowed", scaler.check, state)
    need("3 steps in a row" in str(error), f"the error does not count the skips: {error}")


# ---- training ----------------------------------------------------------------------------------------------------


@check("training skips what overflows, and a skipped step changes nothing, BatchNorm statistics included")
def _skips(kit: Kit) -> None:
    for model in _models(kit, ("mlp", "cnn")):
        spec = train_spec(model, PrecisionPolicy(loss_scale=DYNAMIC), steps=4, overflow_at=range(4))
        result = kit.adapter.train(spec)
        need(result.skipped == [True] * 4, f"{model}: of four overflowing steps it skipped {result.skipped}")
        for name, start in spec.weights.items():
            need(np.array_equal(result.weights[name], start), f"{model}: {name} changed though every step was skipped")


@check("training under each 16-bit dtype learns, with the rule's scales, and is repeatable")
def _trains(kit: Kit) -> None:
    model = _models(kit, ("mlp",))[0]
    for low in kit.lows:
        policy = PrecisionPolicy(compute_dtype=low, loss_scale=DYNAMIC)
        spec = train_spec(model, policy, kit.steps, overflow_at=overflow_steps(policy, kit.steps))
        first, second = kit.adapter.train(spec), kit.adapter.train(spec)
        forced = [bool(p) for p in ~np.isfinite(spec.poison)]
        need(first.skipped == forced, f"{low}: skipped {first.skipped}, not exactly the overflows {forced}")
        scales = [DYNAMIC.initial, *(float(s["scale"]) for s in rule_trajectory(DYNAMIC, [not f for f in forced]))]
        need(first.scales == scales[:-1], f"{low}: the scales {first.scales} are not the rule's {scales[:-1]}")
        need(first.losses == second.losses, f"{low}: the same run gives other losses the second time")
        late, early = np.mean(first.losses[-5:]), np.mean(first.losses[:5])
        need(np.isfinite(first.losses).all() and late < early, f"{low}: the loss goes from {early:.3g} to {late:.3g}")


@check("float16 computation without loss scaling is refused for training")
def _float16(kit: Kit) -> None:
    if "float16" not in kit.lows:
        raise NotOffered("no device computes in float16")
    spec = train_spec(_models(kit, ("mlp",))[0], PrecisionPolicy(compute_dtype="float16"), steps=1)
    need_error(PolicyError, "training in float16 without a loss scale", kit.adapter.train, spec)


@check("an overflow on any replica is seen by all before anybody steps")
def _replicas(kit: Kit) -> None:
    if not kit.adapter.engines:
        raise NotOffered("the backend trains on one device only")
    for engine in kit.adapter.engines:
        specs = [spec for number in kit.replicas for spec in replica_specs(kit.patterns, number)]
        need_tier(tier_replicas(kit.adapter, engine, specs))


def _models(kit: Kit, wanted: tuple[str, ...]) -> list[str]:
    found = [model for model in wanted if model in kit.adapter.models]
    if not found:
        raise NotOffered("the backend does not train")
    return found


def _same(kit: Kit, tensor: Any, values: Any, dtype: str, what: str) -> None:
    array = kit.array(tensor)
    need(array.dtype.name == dtype, f"{what} is {array.dtype.name}, not {dtype}")
    want = np.asarray(values).astype(array.dtype)
    need(array.shape == want.shape, f"{what} has shape {array.shape}, not {want.shape}")
    need(np.array_equal(array, want), f"{what} is {array.tolist()}, not {want.tolist()}")
