"""What the table costs in PyTorch: mp.autocast against torch.autocast, on the CPU.

    python benchmarks/autocast_torch.py
    python benchmarks/autocast_torch.py --rounds 200 --threads 4

Training steps of two transformers, which take turns in one process: medians, and their ratio. (Where the CPU has no
bfloat16, torch's bfloat16 kernels are slow, and what is computed in float32 instead is not: then the ratio may be below 1.)
Then microseconds of a call of a function that is handed on, of one that is right already, and of one whose input is cast.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import precision

SIZES = {"small": (2, 64, 2, 16, 8), "mid-size": (4, 192, 4, 64, 4)}
"""Layers, width, heads, tokens, rows."""


def train_step(name: str, region: Callable[[], object]) -> Callable[[], None]:
    """A training step of a transformer in a region."""
    layers, width, heads, tokens, rows = SIZES[name]
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    model = nn.Sequential(
        nn.Embedding(512, width),
        nn.TransformerEncoder(layer, layers, enable_nested_tensor=False),
        nn.Linear(width, 512),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    ids = torch.randint(512, (rows, tokens))

    def step() -> None:
        optimizer.zero_grad()
        with region():
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        loss.backward()
        optimizer.step()

    return step


def interleaved(first: Callable[[], None], second: Callable[[], None], rounds: int) -> tuple[float, float]:
    """The medians of two steps in milliseconds."""
    times = np.empty((rounds, 2))
    for step in (first, second, first, second):
        step()
    for i in range(rounds):
        for which in (0, 1) if i % 2 else (1, 0):
            start = time.perf_counter()
            (first, second)[which]()
            times[i, which] = time.perf_counter() - start
    a, b = 1e3 * np.median(times, axis=0)
    return float(a), float(b)


def microseconds(function: Callable[[], object], calls: int = 2000, rounds: int = 15) -> float:
    """The median over rounds of a call's time."""
    found = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(calls):
            function()
        found.append((time.perf_counter() - start) / calls)
    return 1e6 * float(np.median(found))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    mp = precision.bind("mixed_bfloat16", backend="torch", device="cpu")

    def native() -> torch.autocast:
        return torch.autocast("cpu", torch.bfloat16, cache_enabled=False)

    found: dict[str, float] = {}
    for name in SIZES:
        a, b = interleaved(train_step(name, native), train_step(name, mp.autocast), options.rounds)
        found |= {f"{name} native ms": a, f"{name} ours ms": b, f"{name} ratio": b / a}
    wide, low = torch.rand(4), torch.rand(4, dtype=torch.bfloat16)
    for what, call in (
        ("handed on", lambda: torch.add(wide, wide)),
        ("right already", lambda: torch.exp(wide)),
        ("cast", lambda: torch.exp(low)),
    ):
        with native():
            before = microseconds(call)
        with mp.autocast():
            found[f"{what} us more a call"] = microseconds(call) - before
    region = microseconds(lambda: mp.autocast().__enter__().__exit__(None, None, None))
    found["a region us more"] = region - microseconds(lambda: native().__enter__().__exit__(None, None, None))
    print(json.dumps(found) if options.json else "\n".join(f"{name:28}{value:10.3f}" for name, value in found.items()))


if __name__ == "__main__":
    main()
