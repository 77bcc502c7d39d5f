"""What agreeing on overflows, and taking back BatchNorm's statistics, cost a step of ``DistributedDataParallel``.

    python benchmarks/agreement_torch.py                  two ranks, two models
    python benchmarks/agreement_torch.py --ranks 4 --rounds 300

The steps with and without take turns within the same processes, in an order that alternates. Reported are the ratios of
their medians on rank 0, with the 95 % interval of the ratio from resampling the rounds, and the step without to itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).parent))

import precision
from precision.testing import run_ranks

POLICY = precision.PrecisionPolicy(
    loss_scale=precision.LossScale(mode="dynamic")
)  # float32: steps as short as they get


def mlp() -> tuple[nn.Module, torch.Tensor]:
    layers = [nn.Linear(256, 512), nn.LayerNorm(512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)]
    return nn.Sequential(*layers), torch.randn(64, 256)


def cnn() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, stride=2), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ), torch.randn(64, 3, 16, 16)  # fmt: skip


def step_of(make, group, restore):
    """A training step in DDP; ``group`` is who agrees, ``restore`` what a skip restores."""
    torch.manual_seed(0)
    mp = precision.bind(POLICY, backend="torch", device="cpu", process_group=group)
    model, x = make()
    y = torch.randint(0, 10, (len(x),))
    ddp = DistributedDataParallel(model)
    ddp, optimizer = mp.prepare(ddp, torch.optim.AdamW(model.parameters(), fused=True), restore_on_skip=restore)

    def step() -> None:
        optimizer.zero_grad()
        with mp.autocast():
            loss = nn.functional.cross_entropy(ddp(x), y)
        mp.backward(loss)
        mp.step(optimizer)

    return step


def compare(rank: int, world: int, port: int, rounds: int) -> list[dict]:
    """The cases, on every rank alike."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    cases = [
        ("agreement, mlp", mlp, (None, "nothing"), ("none", "nothing")),
        ("agreement, cnn", cnn, (None, "nothing"), ("none", "nothing")),
        ("statistics, cnn", cnn, (None, "batch_norm"), (None, "nothing")),
    ]
    rows = []
    for name, make, with_it, without in cases:
        steps = [step_of(make, *without), step_of(make, *with_it)]
        for _ in range(10):
            for step in steps:
                step()
        times = np.empty((rounds, 2))
        for i in range(rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                dist.barrier()
                start = time.perf_counter()
                steps[which]()
                times[i, which] = time.perf_counter() - start
        rows.append(report(name, times))
    tiny = torch.zeros(2)
    alone = []
    for _ in range(rounds):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(tiny, op=dist.ReduceOp.MAX)
        alone.append(time.perf_counter() - start)
    rows.append({"case": "the collective alone", "with_ms": 1e3 * float(np.median(alone))})
    dist.destroy_process_group()
    return rows


def report(name: str, times: np.ndarray) -> dict:
    without, with_it = np.median(times, axis=0)
    rng = np.random.default_rng(0)
    draws = [np.median(times[rng.integers(0, len(times), len(times))], axis=0) for _ in range(1000)]
    low, high = np.quantile([b / a for a, b in draws], [0.025, 0.975])
    itself = np.median(times[::2, 0]) / np.median(times[1::2, 0])
    return {
        "case": name, "without_ms": 1e3 * without, "with_ms": 1e3 * with_it, "ratio": with_it / without, "low": low,
        "high": high, "itself": itself,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=200)
    args = parser.parse_args()
    import agreement_torch  # by name, so that the ranks can import it

    rows = run_ranks(agreement_torch.compare, args.ranks, [args.rounds], timeout=600)[0]
    print(f"{'case':<22} {'without':>9} {'with':>9} {'ratio':>6}  {'95 % band':<13} itself")
    for row in rows:
        if "ratio" not in row:
            print(f"{row['case']:<22} {'':>9} {row['with_ms']:>7.3f}ms")
            continue
        print(
            f"{row['case']:<22} {row['without_ms']:>7.2f}ms {row['with_ms']:>7.2f}ms {row['ratio']:>6.3f}  "
            f"{row['low']:.3f} - {row['high']:.3f} {row['itself']:.3f}"
        )


if __name__ == "__main__":
    main()
