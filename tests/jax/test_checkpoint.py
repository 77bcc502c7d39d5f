"""Saving and resuming: Orbax, a plain pytree file, flax serialization, and the neutral dict."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import precision
from precision import LossScale, PrecisionPolicy, StateError

POLICY = PrecisionPolicy(loss_scale=LossScale(mode="dynamic", initial=64.0, growth_interval=3))
FLAGS = [True, True, False, True, True, True, False, True, True, True]


class Run:
    def __init__(self):
        self.mp = precision.bind(POLICY, backend="jax")
        self.opt = self.mp.optimizer(optax.adam(0.1), master_weights=True)
        self.traces = 0
        self.step = jax.jit(self._step)

    def _step(self, state, flag):
        self.traces += 1
        params, opt_state = state
        slope = jnp.where(flag, 1.0, jnp.nan)
        _, grads = self.mp.value_and_grad(lambda p: (p["w"] * slope).astype(jnp.float32).sum(), cast_argnums=())(
            params, loss_scale=opt_state.loss_scale
        )
        updates, opt_state = self.opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    def start(self):
        params = {"w": jnp.ones(3, jnp.bfloat16)}
        return params, self.opt.init(params)

    def go(self, state, flags):
        for flag in flags:
            state = self.step(state, flag)
        return state


def through_orbax(run, state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, run.start()))


def through_npz(run, state, folder):
    leaves, structure = jax.tree.flatten(state)
    # NumPy's format has no bfloat16; its bits go through uint16.
    plain = [np.asarray(x).view(np.uint16) if x.dtype == jnp.bfloat16 else np.asarray(x) for x in leaves]
    np.savez(folder / "state.npz", **{str(i): x for i, x in enumerate(plain)})
    with np.load(folder / "state.npz", allow_pickle=False) as file:
        back = [file[str(i)] for i in range(len(leaves))]
    back = [x.view(jnp.bfloat16) if like.dtype == jnp.bfloat16 else x for x, like in zip(back, leaves, strict=True)]
    return jax.tree.unflatten(structure, back)


def through_flax(run, state, folder):
    (folder / "state.msgpack").write_bytes(serialization.to_bytes(state))
    return serialization.from_bytes(run.start(), (folder / "state.msgpack").read_bytes())


@pytest.mark.parametrize("way", [through_orbax, through_npz, through_flax])
def test_a_run_resumes_bit_for_bit_and_without_a_new_trace(way, tmp_path):
    run = Run()
    middle = run.go(run.start(), FLAGS[:5])
    want = run.go(middle, FLAGS[5:])
    restored = way(run, middle, tmp_path)
    assert jax.tree.structure(restored) == jax.tree.structure(middle)
    got = run.go(restored, FLAGS[5:])
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert run.traces == 1


def test_the_neutral_dict_is_json_and_resumes_the_trajectory():
    run = Run()
    middle = run.go(run.start(), FLAGS[:5])
    scaler = run.mp.loss_scaler
    saved = json.loads(json.dumps(scaler.state_dict(middle[1].loss_scale)))
    resumed = middle[0], middle[1]._replace(loss_scale=scaler.load_state_dict(saved))
    got, want = run.go(resumed, FLAGS[5:]), run.go(middle, FLAGS[5:])
    assert scaler.state_dict(got[1].loss_scale) == scaler.state_dict(want[1].loss_scale)
    state = precision.loss_scale.state_from_dict(POLICY.loss_scale, saved)
    for flag in FLAGS[5:]:
        state = precision.next_state(POLICY.loss_scale, state, np.bool_(flag), np)
    assert precision.loss_scale.state_to_dict(state) == scaler.state_dict(got[1].loss_scale)


def test_orbax_without_a_target_gives_a_dict_that_says_what_to_do(tmp_path):
    run = Run()
    state = run.start()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        raw = checkpointer.restore(tmp_path / "state")
    loss_scale = raw[1]["loss_scale"]
    with pytest.raises(precision.LossScaleError, match="load_state_dict first"):
        run.mp.value_and_grad(lambda p: p["w"].sum())(state[0], loss_scale=loss_scale)
    with pytest.raises(StateError, match="not a loss-scale state"):
        run.mp.loss_scaler.load_state_dict(loss_scale)  # it has no version: not a state_dict()
    loaded = run.mp.loss_scaler.load_state_dict({"version": 1, **loss_scale})
    assert float(loaded.scale) == 64.0
