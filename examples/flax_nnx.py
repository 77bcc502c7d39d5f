"""Flax NNX: a convolutional network with BatchNorm on handwritten digits, in the precision of ``precision.toml``."""

from pathlib import Path

import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits

import precision

mp = precision.bind(Path(__file__).parent / "precision.toml", backend="jax")

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).astype("float32").reshape(-1, 8, 8, 1)
train, test = slice(0, 1500), slice(1500, None)


class CNN(nnx.Module):
    """The layers cast by themselves (``dtype=``); their parameters stay float32, and so does BatchNorm."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), use_bias=False, dtype=mp.compute_dtype, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.head = nnx.Linear(16 * 4 * 4, 10, dtype=mp.compute_dtype, rngs=rngs)

    def __call__(self, x):
        h = nnx.relu(self.norm(self.conv(x)))
        h = nnx.max_pool(h, (2, 2), strides=(2, 2)).reshape(len(x), -1)
        return mp.cast_to_output(self.head(h))


model = CNN(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, mp.optimizer(optax.adam(3e-3)), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, x, y):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)

    def loss_fn(params):
        net = nnx.merge(graphdef, params, rest, copy=True)
        loss = optax.softmax_cross_entropy_with_integer_labels(net(x), y).mean()
        return loss, nnx.state(net, nnx.Not(nnx.Param))

    grad = mp.value_and_grad(loss_fn, has_aux=True, cast_argnums=())  # nothing to cast: the layers do it
    (loss, new_rest), grads = grad(params, loss_scale=optimizer.opt_state.loss_scale)
    optimizer.update(model, grads)
    # A skipped step leaves BatchNorm's statistics alone, too.
    nnx.update(model, mp.select(optimizer.opt_state.finite, new_rest, rest))
    return loss


@nnx.jit
def predict(model, x):
    return model(x).argmax(-1)


rng = np.random.default_rng(0)
model.train()
for epoch in range(5):
    losses = [
        train_step(model, optimizer, images[batch], labels[batch]) for batch in rng.permutation(1500).reshape(-1, 50)
    ]
    scale = mp.loss_scaler.state_dict(optimizer.opt_state.loss_scale)
    print(f"epoch {epoch}: loss {np.mean(losses):.3f}, loss scale {scale['scale']:g}")

model.eval()
accuracy = np.mean(np.asarray(predict(model, images[test])) == labels[test])
print(f"accuracy {accuracy:.3f}, skipped steps {scale['skipped']}")
