"""JAX and optax: a small network on handwritten digits, in the precision of ``precision.toml``."""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

import precision

mp = precision.bind(Path(__file__).parent / "precision.toml", backend="jax")

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
train, test = slice(0, 1500), slice(1500, None)


@mp.op("matmul")  # in the compute dtype, whatever comes in
def dense(p, x):
    return x @ p["kernel"] + p["bias"]


@mp.op("norm")  # in float32
def layer_norm(p, x):
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["offset"]


@mp.autocast
def model(params, x):
    h = layer_norm(params["norm"], jax.nn.relu(dense(params["fc"], x)))
    return dense(params["head"], h)


def loss_fn(params, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(params, x), y).mean()


def init(key, sizes=(64, 128, 10)):
    fc, head = (
        {"kernel": jax.random.normal(k, (m, n)) * m**-0.5, "bias": jnp.zeros(n)}
        for k, m, n in zip(jax.random.split(key), sizes, sizes[1:], strict=False)
    )
    return {"fc": fc, "norm": {"scale": jnp.ones(sizes[1]), "offset": jnp.zeros(sizes[1])}, "head": head}


opt = mp.optimizer(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3)))


@partial(jax.jit, donate_argnums=(0, 1))
def train_step(params, opt_state, x, y):
    loss, grads = mp.value_and_grad(loss_fn)(params, x, y, loss_scale=opt_state.loss_scale)
    updates, opt_state = opt.update(grads, opt_state, params)  # skips what is not finite, moves the scale
    return optax.apply_updates(params, updates), opt_state, loss


params = init(jax.random.key(0))  # float32: the master weights
opt_state = opt.init(params)
rng = np.random.default_rng(0)
for epoch in range(5):
    losses = []
    for batch in rng.permutation(1500).reshape(-1, 50):
        params, opt_state, loss = train_step(params, opt_state, images[batch], labels[batch])
        losses.append(loss)
    print(f"epoch {epoch}: loss {np.mean(losses):.3f}, loss scale {opt_state.loss_scale.scale:g}")

accuracy = np.mean(np.argmax(model(params, images[test]), -1) == labels[test])
print(f"accuracy {accuracy:.3f}, skipped steps {opt_state.loss_scale.skipped}")
print(", ".join(f"{name}: {next(iter(p.values())).dtype}" for name, p in mp.cast_to_compute(params).items()))
