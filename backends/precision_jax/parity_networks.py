"""The networks of the parity suite in plain JAX, a named scope a module, and one pass of each under ``mp.autocast``.

Weights come by canonical name (``precision.parity.networks`` has the maths). Each module's result is named as the module is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jex

from precision.parity.adapter import NetworkResult, NetworkSpec
from precision.parity.networks import is_trained
from precision_jax.autocast import untouched
from precision_jax.parity_ops import QUICKLY

if TYPE_CHECKING:
    from precision_jax.bound import JaxPolicy

Weights = Mapping[str, Any]


def module(name: str, fun: Callable[..., Any], *args: Any) -> Any:
    """Run a function in the scope of a module, whose result bears its name."""
    with _scope(name):
        return checkpoint_name(fun(*args), name)


def _scope(name: str) -> Any:
    return jax.named_scope(name.replace(".", "/"))


def dense(w: Weights, name: str, x: Any) -> Any:
    """``x @ kernel + bias``."""
    return x @ w[f"{name}.kernel"] + w[f"{name}.bias"]


def conv(w: Weights, name: str, x: Any, stride: int = 1) -> Any:
    """A convolution, NHWC, zero padding of half the kernel's size, with its bias if it has one."""
    kernel = w[f"{name}.kernel"]
    pad = kernel.shape[0] // 2
    y = lax.conv_general_dilated(
        x, kernel, (stride, stride), ((pad, pad), (pad, pad)), dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return y + w[f"{name}.bias"] if f"{name}.bias" in w else y


def norm(w: Weights, name: str, x: Any, axes: tuple[int, ...] = (-1,)) -> Any:
    """Zero mean and unit variance over axes, then scale and offset."""
    return jax.nn.standardize(x, axes, epsilon=1e-5) * w[f"{name}.scale"] + w[f"{name}.offset"]


# ---- the networks ---------------------------------------------------------------------------------------------------


def resnet(w: Weights, x: Any) -> Any:
    """ResNet-18 for small images, batch norm on the batch's own statistics."""

    def convolved(name: str, x: Any, stride: int = 1) -> Any:
        return module(name, functools.partial(conv, w, name, stride=stride), x)

    def normed(name: str, x: Any) -> Any:
        return module(name, lambda x: norm(w, name, x, (0, 1, 2)), x)

    with _scope("stem"):
        x = checkpoint_name(jax.nn.relu(normed("stem.norm", convolved("stem.conv", x))), "stem")
    for stage in range(4):
        for block in range(2):
            name, stride = f"stage{stage}.block{block}", 2 if stage and not block else 1
            y = jax.nn.relu(normed(f"{name}.norm1", convolved(f"{name}.conv1", x, stride)))
            y = normed(f"{name}.norm2", convolved(f"{name}.conv2", y))
            short = normed(f"{name}.projnorm", convolved(f"{name}.proj", x, 2)) if stride == 2 else x
            x = module(name, lambda y, short: jax.nn.relu(y + short), y, short)
    x = module("pool", lambda x: x.mean((1, 2)), x)
    return module("head", functools.partial(dense, w, "head"), x)


def attention(w: Weights, x: Any) -> Any:
    """Causal attention of two heads of 16 features; ``w`` has ``qkv`` and ``proj``."""
    q, k, v = (a.reshape(*a.shape[:2], 2, 16) for a in jnp.split(dense(w, "qkv", x), 3, -1))
    out = jax.nn.dot_product_attention(q, k, v, scale=0.25, is_causal=True)
    return dense(w, "proj", out.reshape(x.shape))


def block(w: Weights, h: Any, name: str = "block") -> Any:
    """One layer of the transformer; ``w`` has its weights without the layer's own name."""
    x = module(f"{name}.norm1", functools.partial(norm, w, "norm1"), h)
    h = h + module(f"{name}.attention", functools.partial(attention, w), x)
    x = module(f"{name}.norm2", functools.partial(norm, w, "norm2"), h)

    def mlp(x: Any) -> Any:
        return dense(w, "fc2", jax.nn.gelu(dense(w, "fc1", x), approximate=False))

    return checkpoint_name(h + module(f"{name}.mlp", mlp, x), name)


def layer(w: Weights, name: str) -> dict[str, Any]:
    """The weights of one layer, without its name."""
    return {key.removeprefix(f"{name}."): value for key, value in w.items() if key.startswith(f"{name}.")}


def transformer(w: Weights, x: Any, scan: bool = False, remat: bool = False) -> Any:
    """Two pre-norm layers over embeddings; the layers scanned over or computed again in the backward pass, if asked."""
    h = module("embed", lambda x: w["embed.table"][x] + w["position"], x)
    run = jax.checkpoint(block, static_argnums=2) if remat else block
    layers = [layer(w, f"block{i}") for i in range(2)]
    if scan:
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
        h, _ = lax.scan(lambda h, weights: (run(weights, h, "block"), None), h, stacked)
    else:
        for i, weights in enumerate(layers):
            h = run(weights, h, f"block{i}")
    h = module("norm", functools.partial(norm, w, "norm"), h)
    return module("head", functools.partial(dense, w, "head"), h)


def lstm(w: Weights, x: Any) -> Any:
    """The last output of an LSTM over six steps, and a head."""

    def step(carry: Any, x: Any) -> Any:
        h, c = carry
        with _scope("cell"):
            i, f, g, o = jnp.split(x @ w["cell.wx"] + h @ w["cell.wh"] + w["cell.bias"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), None

    zeros = jnp.zeros((x.shape[0], 16), jnp.float32)
    (h, _), _ = lax.scan(step, (zeros, zeros), x.swapaxes(0, 1))
    return module("head", functools.partial(dense, w, "head"), checkpoint_name(h, "cell"))


def unet(w: Weights, x: Any) -> Any:
    """Down twice, and up again with bilinear resizes and skip connections."""

    def convolved(name: str, x: Any) -> Any:
        return module(name, lambda x: jax.nn.relu(conv(w, name, x)), x)

    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    def raised(name: str, x: Any) -> Any:
        n, height, width, channels = x.shape
        return module(name, lambda x: jax.image.resize(x, (n, 2 * height, 2 * width, channels), "bilinear"), x)

    down1 = convolved("down1", x)
    down2 = convolved("down2", pooled(down1))
    bottom = convolved("bottom", pooled(down2))
    dec2 = convolved("dec2", jnp.concatenate([raised("up2", bottom), down2], -1))
    dec1 = convolved("dec1", jnp.concatenate([raised("up1", dec2), down1], -1))
    return module("head", functools.partial(conv, w, "head"), dec1)


NETWORKS: dict[str, Callable[..., Any]] = {"resnet": resnet, "transformer": transformer, "lstm": lstm, "unet": unet}


# ---- a pass ---------------------------------------------------------------------------------------------------------


def loss_of(network: Callable[..., Any]) -> Callable[..., Any]:
    """A network's loss: of trained weights, inputs and labels, with its logits beside it."""

    def loss(w: Weights, x: Any, labels: Any) -> Any:
        logits = network(w, x)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), logits

    return loss


def autocast_network(spec: NetworkSpec) -> NetworkResult:
    """See :meth:`precision.parity.ParityAdapter.autocast_network`."""
    from precision.registry import bind

    weights = {n: jnp.asarray(a) for n, a in spec.weights.items() if is_trained(n)}
    data = jnp.asarray(spec.inputs), jnp.asarray(spec.labels)
    run = untouched(cast("JaxPolicy", bind(spec.policy, backend="jax")), loss_of(NETWORKS[spec.network]))
    grad = jax.value_and_grad(run, has_aux=True)
    (loss, logits), grads = (jax.jit(grad, compiler_options=QUICKLY) if spec.compiled else grad)(weights, *data)
    modules, saved = kept(run, weights, *data)
    return NetworkResult(
        float(loss),
        np.asarray(logits).astype(np.float64),
        {n: np.asarray(g).astype(np.float32) for n, g in grads.items()},
        {n: g.dtype.name for n, g in grads.items()},
        modules,
        saved,
    )


def kept(run: Callable[..., Any], weights: Weights, *data: Any) -> tuple[dict[str, str], int]:
    """The dtype of each named result, and the bytes of what is kept for the backward pass, arguments left out.

    Args:
        run: a function of weights and data that gives ``(loss, aux)``.
        weights, data: its arguments.
    """

    def forward(weights: Weights, *data: Any) -> list[Any]:
        _, backward, _ = jax.vjp(lambda w: run(w, *data), weights, has_aux=True)
        return jax.tree.leaves(backward)

    jaxpr = jax.make_jaxpr(forward)(weights, *data).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    outs = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)} - given
    return dict(_named(jaxpr)), sum(v.aval.size * v.aval.dtype.itemsize for v in outs)


def _named(jaxpr: Any) -> Iterator[tuple[str, str]]:
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], eqn.outvars[0].aval.dtype.name
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if isinstance(inner, jex.Jaxpr):
                yield from _named(inner)
