"""Whole networks under op-level autocast: their weights, the exact maths every backend implements, and how alike they must be.

Every backend builds them as its users would (modules, layers, functions with named scopes). Names below are canonical; ``W``
are the weights, ``conv(n)`` and ``dense(n)`` use ``W[n.kernel]`` (HWIO, ``(in, out)``) and ``W[n.bias]`` where there is one, ``norm(n)``
uses ``W[n.scale]`` and ``W[n.offset]``, epsilon 1e-5. Convolutions are 3x3 with zero padding 1 but where said. What each module gives
is recorded under its name, in the dtype it leaves in.

``resnet`` (ResNet-18, He et al., 2015, with the 3x3 stem used on small images), x ``(4, 16, 16, 3)``:
    ``stem = relu(norm(conv(x)))`` with ``stem.conv``, ``stem.norm``; then for stage s in 0..3 and block b in 0..1, ``n = stage{s}.block{b}``:
    ``y = relu(norm(conv(x, n.conv1), n.norm1)); y = norm(conv(y, n.conv2), n.norm2); n = relu(y + shortcut)``, the first convolution of stages
    1 to 3 with stride 2 (explicit padding 1), where the shortcut is ``norm(conv1x1(x, n.proj), n.projnorm)`` with stride 2, else ``x``.
    ``pool`` = mean over height and width; ``head`` = dense. No biases but the head's. Batch norm in training mode (batch statistics;
    running ones start at 0 and 1, ``W[n.mean]``, ``W[n.var]``, and are not compared).

``transformer`` (pre-norm decoder, masked), x int ``(2, 16)``:
    ``embed = W[embed.table][x] + W[position]``; for block i in 0..1: ``h = h + attention(norm1(h)); h = h + mlp(norm2(h))``, named
    ``block{i}.norm1``, ``block{i}.attention``, ``block{i}.norm2``, ``block{i}.mlp``, ``block{i}``; then ``norm``, ``head`` (dense to the vocabulary).
    ``attention``: ``q, k, v = split(dense(x, block{i}.qkv), 3)``, each into 2 heads of 16 features, scaled by 1/4, causal mask, by the framework's fused or
    own attention; heads joined; ``dense(o, block{i}.proj)``. ``mlp``: ``dense(gelu(dense(x, block{i}.fc1)), block{i}.fc2)``, exact gelu. Layer norms.

``lstm``, x ``(4, 6, 8)``:
    ``h, c`` start as float32 zeros ``(4, 16)``; at each of the 6 steps ``i, f, g, o = split(x_t @ W[cell.wx] + h @ W[cell.wh] + W[cell.bias], 4)``;
    ``c = sigmoid(f) * c + sigmoid(i) * tanh(g); h = sigmoid(o) * tanh(c)``; ``cell`` = the last ``h``; ``head`` = dense. The framework's cell and loop
    (a scan, a while loop, an RNN layer) are to be used.

``unet``, x ``(2, 16, 16, 1)``, a label a pixel:
    ``down1 = relu(conv(x)); down2 = relu(conv(maxpool2x2(down1))); bottom = relu(conv(maxpool2x2(down2)));``
    ``up2 = bilinear2x(bottom); dec2 = relu(conv(concat(up2, down2))); up1 = bilinear2x(dec2); dec1 = relu(conv(concat(up1, down1)));``
    ``head = conv1x1(dec1)``. All with biases. Bilinear with half-pixel centres.

The loss is the mean softmax cross-entropy of the head's result with integer labels, float32. Module rules of the policy apply by
these names (``block0.mlp``, ``stage1.*.conv1``), as module, layer or scope names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

import numpy as np

from precision.errors import PrecisionError
from precision.parity.adapter import Array, NetworkResult, NetworkSpec, ParityAdapter
from precision.parity.tiers import TierResult
from precision.policy import PrecisionPolicy

NETWORKS = ("resnet", "transformer", "lstm", "unet")
CHANNELS, HEADS, WIDTH, VOCABULARY, CONTEXT = 8, 2, 32, 32, 16


def network_modules(network: str) -> dict[str, str]:
    """Every module's name, and what its result is by default: ``"compute"`` (the compute dtype) or ``"float32"``."""
    if network == "resnet":
        found = {"stem.conv": "compute", "stem.norm": "float32", "stem": "float32"}
        for name, stride in _blocks():
            for i in (1, 2):
                found |= {f"{name}.conv{i}": "compute", f"{name}.norm{i}": "float32"}
            if stride == 2:
                found |= {f"{name}.proj": "compute", f"{name}.projnorm": "float32"}
            found[name] = "float32"
        return found | {"pool": "float32", "head": "compute"}
    if network == "transformer":
        found = {"embed": "float32"}
        for i in range(2):
            for part, dtype in (
                ("norm1", "float32"),
                ("attention", "compute"),
                ("norm2", "float32"),
                ("mlp", "compute"),
            ):
                found[f"block{i}.{part}"] = dtype
            found[f"block{i}"] = "float32"
        return found | {"norm": "float32", "head": "compute"}
    if network == "lstm":
        return {"cell": "float32", "head": "compute"}
    if network == "unet":
        found = dict.fromkeys(("down1", "down2", "bottom", "dec2", "dec1", "head"), "compute")
        return found | {"up2": "float32", "up1": "float32"}
    raise PrecisionError(f"unknown network {network!r}. Known: {', '.join(NETWORKS)}.")


def _blocks() -> Iterator[tuple[str, int]]:
    """ResNet-18's blocks with the stride of each."""
    for stage in range(4):
        for block in range(2):
            yield f"stage{stage}.block{block}", 2 if stage and not block else 1


def network_weights(network: str, seed: int = 0) -> dict[str, Array]:
    """Initial float32 weights by canonical name: kernels normal with variance ``2 / fan_in``, norms and biases not trivial."""
    rng = np.random.default_rng(seed)
    weights: dict[str, Array] = {}

    def kernel(name: str, *shape: int, bias: bool = False, gain: float = 2.0) -> None:
        scale = np.sqrt(gain / np.prod(shape[:-1]))
        weights[f"{name}.kernel"] = (scale * rng.standard_normal(shape)).astype(np.float32)
        if bias:
            weights[f"{name}.bias"] = (0.1 * rng.standard_normal(shape[-1])).astype(np.float32)

    def norm(name: str, features: int, statistics: bool = False) -> None:
        weights[f"{name}.scale"] = rng.uniform(0.5, 1.5, features).astype(np.float32)
        weights[f"{name}.offset"] = (0.1 * rng.standard_normal(features)).astype(np.float32)
        if statistics:
            weights[f"{name}.mean"], weights[f"{name}.var"] = (
                np.zeros(features, np.float32),
                np.ones(features, np.float32),
            )

    if network == "resnet":
        kernel("stem.conv", 3, 3, 3, CHANNELS)
        norm("stem.norm", CHANNELS, True)
        fan_in = CHANNELS
        for at, (name, stride) in enumerate(_blocks()):
            fan_out = CHANNELS * 2 ** (at // 2)
            for i, ins in ((1, fan_in), (2, fan_out)):
                kernel(f"{name}.conv{i}", 3, 3, ins, fan_out)
                norm(f"{name}.norm{i}", fan_out, True)
            if stride == 2:
                kernel(f"{name}.proj", 1, 1, fan_in, fan_out)
                norm(f"{name}.projnorm", fan_out, True)
            fan_in = fan_out
        kernel("head", fan_in, 10, bias=True)
    elif network == "transformer":
        weights["embed.table"] = (0.5 * rng.standard_normal((VOCABULARY, WIDTH))).astype(np.float32)
        weights["position"] = (0.1 * rng.standard_normal((CONTEXT, WIDTH))).astype(np.float32)
        for i in range(2):
            norm(f"block{i}.norm1", WIDTH)
            kernel(f"block{i}.qkv", WIDTH, 3 * WIDTH, bias=True, gain=1.0)
            kernel(f"block{i}.proj", WIDTH, WIDTH, bias=True, gain=1.0)
            norm(f"block{i}.norm2", WIDTH)
            kernel(f"block{i}.fc1", WIDTH, 4 * WIDTH, bias=True)
            kernel(f"block{i}.fc2", 4 * WIDTH, WIDTH, bias=True, gain=1.0)
        norm("norm", WIDTH)
        kernel("head", WIDTH, VOCABULARY, bias=True, gain=1.0)
    elif network == "lstm":
        for name, ins in (("wx", 8), ("wh", 16)):
            weights[f"cell.{name}"] = (rng.standard_normal((ins, 64)) / np.sqrt(ins)).astype(np.float32)
        weights["cell.bias"] = (0.1 * rng.standard_normal(64)).astype(np.float32)
        kernel("head", 16, 10, bias=True, gain=1.0)
    else:
        network_modules(network)  # raises for an unknown one
        for name, ins, out in (
            ("down1", 1, 8),
            ("down2", 8, 16),
            ("bottom", 16, 32),
            ("dec2", 48, 16),
            ("dec1", 24, 8),
        ):
            kernel(name, 3, 3, ins, out, bias=True)
        kernel("head", 1, 1, 8, 3, bias=True, gain=1.0)
    return weights


def network_spec(network: str, policy: PrecisionPolicy, compiled: bool = True, seed: int = 0) -> NetworkSpec:
    """A network with its weights and a batch drawn from a seed."""
    rng = np.random.default_rng((seed, 1))
    inputs: Array
    labels: Array
    if network == "transformer":
        tokens = rng.integers(0, VOCABULARY, (2, CONTEXT + 1)).astype(np.int32)
        inputs, labels = tokens[:, :-1], tokens[:, 1:]
    else:
        shape = {"resnet": (4, 16, 16, 3), "lstm": (4, 6, 8), "unet": (2, 16, 16, 1)}[network]
        inputs = rng.standard_normal(shape).astype(np.float32)
        labels = rng.integers(0, 3, shape[:3]) if network == "unet" else rng.integers(0, 10, shape[0])
    return NetworkSpec(network, policy, network_weights(network, seed), inputs, labels.astype(np.int32), compiled)


def is_trained(name: str) -> bool:
    """Whether a weight is a parameter, not a running statistic."""
    return name.rpartition(".")[2] not in ("mean", "var")


def distance(a: dict[str, Array], b: dict[str, Array]) -> float:
    """Of two sets of gradients: the norm of the difference as a share of the norm of the second."""
    apart = sum(float(np.sum((a[n].astype(np.float64) - b[n]) ** 2)) for n in b)
    return float(np.sqrt(apart / sum(float(np.sum(b[n].astype(np.float64) ** 2)) for n in b)))


def tier_networks(
    adapters: Sequence[ParityAdapter],
    network: str,
    policy: PrecisionPolicy,
    compiled: bool = True,
    modules: Mapping[str, str] | None = None,
    wide: Mapping[str, NetworkResult] | None = None,
) -> TierResult:
    """A network on several backends: the same decision for every module, and gradients as near to each other as to float32's.

    In float32 the backends must agree within ``1e-4`` (relative norm of the gradients), so that only rounding is compared. In
    the low dtype, rounding moves each backend some way from its own float32. Where two backends round the same values, they
    move together; had they nothing in common, they would part by the square root of two times that way. They must stay below.

    Args:
        adapters: two or more.
        network: its name.
        policy: the policy.
        compiled: whether to compile.
        modules: dtypes of modules' results that the policy's rules make other than by default.
        wide: the float32 results by backend, if they are known.
    """
    failures: list[str] = []
    if wide is None:
        wide = float32_results(adapters, network)
    low = {a.name: a.autocast_network(network_spec(network, policy, compiled)) for a in adapters}
    expected = {n: policy.compute_dtype if d == "compute" else d for n, d in network_modules(network).items()}
    expected |= modules or {}
    trained = {n for n in network_weights(network) if is_trained(n)}
    away: dict[str, tuple[float, float]] = {}
    for name, result in low.items():
        for module, dtype in expected.items():
            if result.modules.get(module) != dtype:
                failures.append(f"{network} on {name}: {module} gave {result.modules.get(module)}, not {dtype}")
        strays = {n: d for n, d in result.gradient_dtypes.items() if d != policy.param_dtype}
        if set(result.gradients) != trained or strays:
            missing = sorted(trained ^ set(result.gradients))
            failures.append(f"{network} on {name}: gradients of {missing} differ, dtypes {strays}")
            continue
        away[name] = _apart(result, wide[name])
    for a, b in combinations(away, 2):
        for i, what in enumerate(("logits", "gradients")):
            far, bar = _apart(low[a], low[b])[i], math.sqrt(2) * max(away[a][i], away[b][i])
            if not far < bar:
                failures.append(f"{network}: {what} of {a} and {b} are {far:.2g} apart; the bar is {bar:.2g}")
            if not (far := _apart(wide[a], wide[b])[i]) <= 1e-4:
                failures.append(f"{network} in float32: {what} of {a} and {b} are {far:.2g} apart")
    detail = {
        "from float32": away,
        "apart": {f"{a}/{b}": _apart(low[a], low[b]) for a, b in combinations(away, 2)},
        "saved": {a: low[a].saved_bytes / wide[a].saved_bytes for a in low},
    }
    checked = len(adapters) * (len(expected) + 2)
    return TierResult("T4", f"{network} under autocast, {policy.compute_dtype}", checked, tuple(failures), detail)


def float32_results(adapters: Sequence[ParityAdapter], network: str) -> dict[str, NetworkResult]:
    """A network's float32 results, by backend."""
    return {a.name: a.autocast_network(network_spec(network, PrecisionPolicy())) for a in adapters}


def _apart(a: NetworkResult, b: NetworkResult) -> tuple[float, float]:
    return distance({"logits": a.logits}, {"logits": b.logits}), distance(a.gradients, b.gradients)
