"""What op-level autocast costs in JAX when a function is traced: plain tracing and ours take turns in one process.

    python benchmarks/autocast_jax.py
    python benchmarks/autocast_jax.py --rounds 20

Traced are the loss of the parity suite's transformer and its gradient, as they are and by an author who casts to float32 by hand
(such code is traced twice). Nothing is compiled: autocast costs nothing after tracing. Processor time, medians, and their ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import precision
from precision import PrecisionPolicy
from precision.parity.networks import network_spec
from precision_jax.parity_networks import loss_of, transformer


def casting(params: Any, x: Any) -> Any:
    """The network, with a cast of the author's at its end."""
    return transformer(params, x).astype(jnp.float32)


def _first(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function's first result."""
    return lambda *args: function(*args)[0]


def main() -> None:
    """Print one object for each network and what is traced of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="how often each is traced")
    rounds = parser.parse_args().rounds
    mp: Any = precision.bind("mixed_bfloat16", backend="jax")
    spec = network_spec("transformer", PrecisionPolicy())
    weights = {name: jnp.asarray(value) for name, value in spec.weights.items()}
    data = jnp.asarray(spec.inputs), jnp.asarray(spec.labels)

    def cost(make: Callable[[], Any]) -> float:
        jax.clear_caches()
        start = time.process_time()
        jax.jit(make()).trace(weights, *data)
        return time.process_time() - start

    for name, network in (("plain", transformer), ("casts by the author", casting)):
        loss = _first(loss_of(network))
        kinds: dict[str, Callable[[], Any]] = {
            "loss": lambda loss=loss: loss,
            "loss, autocast": lambda loss=loss: mp.autocast(loss),
            "gradient": lambda loss=loss: jax.grad(loss),
            "gradient, autocast": lambda loss=loss: jax.grad(mp.autocast(loss)),
        }
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(rounds):
            for kind, make in kinds.items():
                times[kind].append(cost(make))
        median = {kind: statistics.median(each) for kind, each in times.items()}
        for what in ("loss", "gradient"):
            print(
                json.dumps(
                    {"network": name, "traced": what, "ratio": round(median[f"{what}, autocast"] / median[what], 2)}
                )
            )


if __name__ == "__main__":
    main()
