"""Checks of ``mp.checkpoints`` on four CPU devices, for ``test_jax_checkpoints.py``: what is saved, and what comes back where."""

import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import precision
from precision import CheckpointError, LossScale, PrecisionPolicy
from tests.distributed.jax_cases import Cases
from tests.distributed.workers_jax import AUTO, EXPLICIT, mesh_of, put

case = Cases()
POLICY = PrecisionPolicy(loss_scale=LossScale(mode="dynamic", initial=64.0, growth_interval=3))


def run_cases(rank, world, port, folder):
    return case.run(folder)


def checkpoints(folder, name, policy=POLICY, keep=None):
    return precision.bind(policy, backend="jax").checkpoints(f"{folder}/{name}", keep)


def bits(x):
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.dtype(x.dtype).name, tuple(x.shape), np.asarray(x).tobytes()


def same(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert type(x) is type(y)
        assert bits(x) == bits(y) if hasattr(x, "dtype") else x == y


@case
def every_kind_of_leaf_comes_back_as_it_was(folder):
    state = {
        "low": {name: jnp.asarray([1.5, -0.0, jnp.nan], name) for name in ("float16", "bfloat16", "float8_e5m2")},
        "fp8": jnp.asarray([1.5, 448.0], "float8_e4m3fn"),
        "int4": jnp.asarray([-8, 7], jnp.int4),
        "complex": jnp.asarray([1 + 2j]),
        "flag": jnp.asarray(True),
        "scalar": jnp.float32(0.1),
        "empty": jnp.zeros((0, 3), jnp.bfloat16),
        "keys": jax.random.split(jax.random.key(1), 3),
        "rbg": jax.random.key(2, impl="rbg"),
        "old key": jax.random.PRNGKey(3),
        "numpy": (np.arange(3), np.float64(0.1), np.asarray([1, 2], ml_dtypes.bfloat16)),
        "plain": [3, 0.1, float("inf"), True, "text", None],
        "mlp/~/linear.w": jnp.ones(2),
        "..": jnp.ones(1),
        "tanh": jnp.tanh,
    }
    saves = checkpoints(folder, "kinds")
    assert saves.restore(state) is None
    saves.save(3, state, extra={"epoch": 2, "rest": [0.1]})
    blank = jax.tree.map(lambda x: x * 0 if isinstance(x, (np.ndarray, np.generic)) else x, state)
    blank.update(plain=[0, 0.0, 0.0, False, "", None], scalar=jnp.float32(0))
    step, got, extra = saves.restore(blank)
    assert (step, extra) == (3, {"epoch": 2, "rest": [0.1]})
    same(got, state)
    assert got["tanh"] is jnp.tanh
    shapes = jax.eval_shape(lambda s: s, {k: v for k, v in state.items() if k not in ("plain", "tanh", "numpy")})
    saves.save(4, {k: state[k] for k in shapes})
    same(saves.restore(shapes).state, {k: state[k] for k in shapes})


@case
def a_state_moves_between_meshes(folder):
    mp = precision.bind(POLICY.with_(loss_scale=POLICY.loss_scale.with_(max_consecutive_skips=3)), backend="jax")
    opt = mp.optimizer(optax.adam(0.1), master_weights=True)
    saves = mp.checkpoints(f"{folder}/meshes")
    params = {"w": jnp.arange(32, dtype=jnp.bfloat16).reshape(8, 4), "b": jnp.arange(4.0)}
    layouts = {
        "four": (mesh_of(), {"w": P("data"), "b": P()}),
        "two by two": (mesh_of((2, 2), ("data", "model")), {"w": P("data", "model"), "b": P("model")}),
        "explicit": (mesh_of((4,), ("x",), EXPLICIT), {"w": P(None, "x"), "b": P("x")}),
        "two": (
            jax.make_mesh((2,), ("data",), axis_types=(AUTO,), devices=jax.devices()[2:]),
            {"w": P("data"), "b": P()},
        ),
    }

    def start(name):
        mesh, specs = layouts[name]
        placed = {k: put(mesh, specs[k], v) for k, v in params.items()}
        state = jax.jit(opt.init, out_shardings=mp.state_shardings(opt, placed))(placed)
        return {"params": placed, "opt_state": state, "key": put(mesh, P(), jax.random.key(0))}

    first = start("four")
    updates, after = opt.update({"w": jnp.ones((8, 4)), "b": jnp.ones(4)}, first["opt_state"], first["params"])
    saved = {"params": optax.apply_updates(first["params"], updates), "opt_state": after, "key": first["key"]}
    saves.save(1, saved)
    for name in layouts:
        target = start(name)
        got = saves.restore(target).state
        same(got, saved)
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(target), strict=True):
            assert x.sharding.is_equivalent_to(y.sharding, y.ndim), name
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target)
        again = saves.restore(shapes).state
        same(again, saved)
        assert again["params"]["w"].sharding == target["params"]["w"].sharding


@case
def what_was_free_to_move_still_is(folder):
    """A scalar that is on no mesh meets parameters on four devices; Orbax alone would pin it to one."""
    mesh = mesh_of()
    mp = precision.bind(POLICY, backend="jax")
    state = put(mesh, P("data"), jnp.ones(4)), jnp.float32(3)
    step = jax.jit(lambda w, rate: (w * rate, rate))
    saves = mp.checkpoints(f"{folder}/free")
    saves.save(0, state)
    restored = saves.restore(state).state
    assert not restored[1].committed and restored[0].committed
    same(step(*restored), step(*state))
    with ocp.StandardCheckpointer() as plain:
        plain.save(f"{folder}/plain", state)
        plain.wait_until_finished()
        pinned = plain.restore(f"{folder}/plain", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    with pytest.raises(ValueError, match="incompatible devices"):
        step(*pinned)


@case
def a_run_on_a_mesh_is_traced_once_restores_included(folder):
    """The state's scalars are on the parameters' mesh from the start, as they are after a step."""
    mp = precision.bind(POLICY, backend="jax")
    opt = mp.optimizer(optax.adam(0.1))
    saves = mp.checkpoints(f"{folder}/traces")
    for kind in (AUTO, EXPLICIT):
        params = put(mesh_of(kind=kind), P("data"), jnp.ones(4))
        state = params, opt.init(params)
        traces = []

        @jax.jit
        def step(params, state, traces=traces):
            traces.append(1)
            updates, state = opt.update(params, state, params)
            return optax.apply_updates(params, updates), state

        after = step(*state)
        saves.save(1, after)
        same(step(*saves.restore(state).state), step(*after))
        assert len(traces) == 1
        for leaf in jax.tree.leaves(state[1]):
            assert leaf.sharding.mesh == params.sharding.mesh


@case
def another_state_is_told_by_its_leaves(folder):
    saves = checkpoints(folder, "other")
    state = {"w": jnp.ones(2), "b": jnp.ones(3), "key": jax.random.key(0), "n": 1, "tag": "a"}
    saves.save(0, state)
    for change, says in (
        ({"w": jnp.ones(3)}, r"w is float32\[2\] in the checkpoint and float32\[3\] here"),
        ({"w": jnp.ones(2, jnp.bfloat16)}, r"w is float32\[2\] in the checkpoint and bfloat16\[2\] here"),
        ({"key": jax.random.key(0, impl="rbg")}, r"key<threefry2x32>\[\] in the checkpoint and key<rbg>\[\]"),
        ({"key": jax.random.PRNGKey(0)}, r"key<threefry2x32>\[\] in the checkpoint and uint32\[2\]"),
        ({"v": jnp.ones(1)}, "it lacks v"),
        ({"b": None}, "it has besides b"),
        ({"tag": jnp.tanh}, "tag is str in the checkpoint and no array here"),
    ):
        with pytest.raises(CheckpointError, match=says + r".*Nothing was restored"):
            saves.restore({**state, **change})
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 5"):
        saves.restore(state, step=5)
    # A number that the first compiled step makes an array of is no other state, either way.
    got = saves.restore({**state, "n": jnp.int32(0)}).state["n"]
    assert (got.dtype, int(got)) == (jnp.int32, 1)
    saves.save(1, {**state, "n": jnp.int32(7)})
    assert int(saves.restore(state).state["n"]) == 7


@case
def max_consecutive_skips_may_be_set_later(folder):
    params, grads = {"w": jnp.ones(2)}, {"w": jnp.asarray([1.0, jnp.nan])}
    policies = POLICY, POLICY.with_(loss_scale=POLICY.loss_scale.with_(max_consecutive_skips=9))
    states = []
    for policy in policies:
        opt = precision.bind(policy, backend="jax").optimizer(optax.adam(0.1))
        states.append((opt.init(params), opt.update(grads, opt.init(params), params)[1]))
    for i, (_, saved) in enumerate(states):
        saves = checkpoints(folder, f"skips{i}")
        saves.save(1, saved)
        for fresh, _ in states:
            got = saves.restore(fresh).state
            same(got.loss_scale, saved.loss_scale)
            assert (got.finite_leaves is None) == (fresh.finite_leaves is None)
    assert got.finite_leaves.tolist() == [False], "saved, and restored"


@case
def what_cannot_be_saved(folder):
    saves = checkpoints(folder, "never")
    with pytest.raises(CheckpointError, match="w has no value to save: it is a ShapeDtypeStruct"):
        saves.save(0, {"w": jax.ShapeDtypeStruct((2,), jnp.float32)})
    with pytest.raises(CheckpointError, match="w has no value to save: it is a .*Tracer"):
        jax.jit(lambda w: saves.save(0, {"w": w}))(jnp.ones(2))
    with pytest.raises(CheckpointError, match="must be JSON"):
        saves.save(0, {"w": jnp.ones(2)}, extra={"a": jnp.ones(1)})
    gone = jnp.ones(2)
    jax.jit(lambda x: x + 1, donate_argnums=0)(gone)
    with pytest.raises(CheckpointError, match="w was donated"):
        saves.save(0, {"w": gone})
    assert saves.steps() == [] and saves.restore({"w": jnp.ones(2)}) is None


@case
def a_failed_save_loses_nothing_and_the_state_lives_on(folder):
    saves = checkpoints(folder, "failed", keep=1)
    state = {"w": jnp.ones(2)}
    saves.save(1, state)
    handler = ocp.PyTreeCheckpointHandler.save

    def full(*args, **kwargs):
        raise OSError("No space left on device")

    ocp.PyTreeCheckpointHandler.save = full
    try:
        with pytest.raises(
            CheckpointError, match="step 2 was not written: OSError: No space left.*Those before are as they were"
        ):
            saves.save(2, state)
    finally:
        ocp.PyTreeCheckpointHandler.save = handler
    assert saves.steps() == [1] and saves.restore(state).step == 1
    assert not state["w"].is_deleted()
    saves.save(3, state)
    assert saves.steps() == [3]


@case
def damaged_and_foreign_checkpoints_are_errors(folder):
    state = {"w": jnp.arange(1000.0)}
    saves = checkpoints(folder, "whole")
    for step in (1, 2):
        saves.save(step, state)
    latest = saves.store.path(2)
    for file in sorted(p for p in latest.rglob("*") if p.is_file()):
        whole = file.read_bytes()
        for damage in (whole[:-1], whole[: len(whole) // 2], b"", bytes([whole[0] ^ 1]) + whole[1:], None):
            file.unlink()
            if damage is not None:
                file.write_bytes(damage)
            with pytest.raises(
                CheckpointError, match=r"not a whole checkpoint|not of the format|cannot be read|damaged"
            ):
                saves.restore(state)
        file.write_bytes(whole)
    same(saves.restore(state).state, state)
    assert saves.restore(state, step=1).step == 1
    # Orbax's own, without our manifest; another backend's; our own format with another writer's content.
    shutil.copytree(latest / "state", f"{folder}/foreign/step-00000003")
    with pytest.raises(CheckpointError, match="no manifest.json: another program wrote it"):
        checkpoints(folder, "foreign").restore(state)
    for about, backend, says in (
        ({}, "torch", "written by backend 'torch'"),
        ({}, "jax", "holds no state that mp.checkpoints saved"),
        ({"leaves": [[1]]}, "jax", "table of leaves cannot be read"),
        ({"leaves": [["w", "array", [1000], "float32", ""]]}, "jax", "cannot be restored.*Nothing was restored"),
    ):
        other = checkpoints(folder, "others")
        with other.store.saving(1, backend=backend, about=about):
            pass
        with pytest.raises(CheckpointError, match=says):
            other.restore(state)


@case
def models_of_equinox_and_flax(folder):
    saves = checkpoints(folder, "models")
    mlp = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(0))
    other = eqx.nn.MLP(2, 2, 4, 1, activation=jnp.tanh, key=jax.random.key(1))
    saves.save(1, mlp)
    got = saves.restore(other).state
    x = jnp.ones(2)
    assert got(x).tolist() == mlp(x).tolist() != other(x).tolist()
    assert got.activation is other.activation

    class Net(nnx.Module):
        def __init__(self, seed):
            self.layer = nnx.Linear(2, 2, rngs=nnx.Rngs(seed))
            self.norm = nnx.BatchNorm(2, rngs=nnx.Rngs(seed))
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=seed))

        def __call__(self, x):
            return self.drop(self.norm(self.layer(x)))

    one, two = Net(0), Net(1)
    x = jnp.arange(8.0).reshape(4, 2)
    one(x)
    saves.save(2, nnx.state(one))
    nnx.update(two, saves.restore(nnx.state(two)).state)
    assert two(x).tolist() == one(x).tolist(), "weights, statistics and the stream of random numbers"


@case
def a_resumed_run_is_the_run_bit_for_bit(folder):
    """Masters, moments, scale, accumulator, noise keys and all; saved at every step, restored from each, one trace."""
    mp = precision.bind(POLICY.with_(compute_dtype="bfloat16"), backend="jax")
    tx = optax.MultiSteps(optax.chain(optax.add_noise(0.01, 0.5, jax.random.key(0)), optax.adam(0.1)), 2)
    opt = mp.optimizer(tx, master_weights=True)
    traces = []

    @jax.jit
    def step(state, factor):
        traces.append(1)
        params, opt_state, key = state
        key, use = jax.random.split(key)
        x = jax.random.normal(use, (4, 3))
        _, grads = mp.value_and_grad(
            lambda p, x: jnp.mean((x @ p["w"]).astype(jnp.float32) ** 2) * factor, cast_argnums=(0, 1)
        )(params, x, loss_scale=opt_state.loss_scale)
        updates, opt_state = opt.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, key

    def start():
        params = {"w": jnp.ones((3, 2), jnp.float16)}
        return params, opt.init(params), jax.random.key(7)

    factors = np.float32([1, 1, np.inf, 1, 1, np.nan, 1, 1])
    saves = checkpoints(folder, "resumed")
    state = start()
    for i, factor in enumerate(factors):
        saves.save(i, state, extra={"position": i})
        state = step(state, factor)
    for i in saves.steps():
        _, resumed, extra = saves.restore(start(), step=i)
        for factor in factors[extra["position"] :]:
            resumed = step(resumed, factor)
        same(resumed, state)
    assert len(traces) == 1
    neutral = json.loads(json.dumps(mp.loss_scaler.state_dict(resumed[1].loss_scale)))
    assert neutral == mp.loss_scaler.state_dict(state[1].loss_scale)
    assert neutral["skipped"] == 2
