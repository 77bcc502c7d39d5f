"""Equinox: a small network on handwritten digits, in the precision of ``precision.toml``."""

from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax
from sklearn.datasets import load_digits

import precision

mp = precision.bind(Path(__file__).parent / "precision.toml", backend="jax")

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32")
train, test = slice(0, 1500), slice(1500, None)


class Network(eqx.Module):
    fc: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.fc = eqx.nn.Linear(64, 128, key=first)
        self.norm = eqx.nn.LayerNorm(128)
        self.head = eqx.nn.Linear(128, 10, key=second)

    def __call__(self, x):
        return self.head(self.norm(jax.nn.relu(self.fc(x))))


@mp.autocast  # products low, norms in float32; the logits come out in float32
def logits_of(network, x):
    return jax.vmap(network)(x)


def loss_fn(network, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(logits_of(network, x), y).mean()


opt = mp.optimizer(optax.adam(3e-3))


@eqx.filter_jit(donate="all-except-first")
def train_step(batch, network, opt_state):
    loss, grads = mp.value_and_grad(loss_fn)(network, *batch, loss_scale=opt_state.loss_scale)
    updates, opt_state = opt.update(grads, opt_state, eqx.filter(network, eqx.is_inexact_array))
    return loss, eqx.apply_updates(network, updates), opt_state


network = Network(jax.random.key(0))  # float32: the master weights
opt_state = opt.init(eqx.filter(network, eqx.is_inexact_array))
rng = np.random.default_rng(0)
for epoch in range(5):
    losses = []
    for rows in rng.permutation(1500).reshape(-1, 50):
        loss, network, opt_state = train_step((images[rows], labels[rows]), network, opt_state)
        losses.append(loss)
    print(f"epoch {epoch}: loss {np.mean(losses):.3f}, loss scale {opt_state.loss_scale.scale:g}")

accuracy = np.mean(np.argmax(logits_of(network, images[test]), -1) == labels[test])
print(f"accuracy {accuracy:.3f}, skipped steps {opt_state.loss_scale.skipped}")
low = mp.cast_to_compute(network)
print(f"fc: {low.fc.weight.dtype}, norm: {low.norm.weight.dtype}, head: {low.head.weight.dtype}")
