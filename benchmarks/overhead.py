"""What precision costs: a training step through it against the same step hand-written, as ratios of medians.

    python benchmarks/overhead.py                 every framework installed, three models each
    python benchmarks/overhead.py torch --rounds 400

The two steps of a case take turns within one process, in an order that alternates, so that a slow moment of the machine
falls on both. Reported are the median of each, their ratio, and a noise band: the 95 % interval of that ratio from
resampling the paired rounds, and the ratio of the native step to itself (odd rounds over even ones), which is what the
machine alone does. The bar is 1.02.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("KERAS_BACKEND", "tensorflow")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

FRAMEWORKS = ("torch", "tensorflow", "jax")
BAR = 1.02


def time_case(case, rounds: int, warm_up: int) -> dict[str, float | str]:
    """Time a case; returns medians in seconds and ratios."""
    for _ in range(warm_up):
        case.native()
        case.precision()
    times = np.empty((rounds, 2))
    gc.disable()
    try:
        for i in range(rounds):
            for which in (0, 1) if i % 2 else (1, 0):
                start = time.perf_counter()
                (case.precision if which else case.native)()
                times[i, which] = time.perf_counter() - start
    finally:
        gc.enable()
    native, ours = np.median(times, axis=0)
    rng = np.random.default_rng(0)
    draws = [np.median(times[rng.integers(0, rounds, rounds)], axis=0) for _ in range(1000)]
    low, high = np.quantile([b / a for a, b in draws], [0.025, 0.975])
    return {
        "case": case.name,
        "native_ms": 1e3 * native,
        "precision_ms": 1e3 * ours,
        "ratio": ours / native,
        "low": low,
        "high": high,
        "native_to_itself": np.median(times[::2, 0]) / np.median(times[1::2, 0]),
    }


def run_framework(framework: str, rounds: int, warm_up: int) -> list[dict]:
    """Time the cases of one framework in this process."""
    cases = importlib.import_module(f"cases_{framework}").cases()
    return [{"framework": framework, **time_case(case, rounds, warm_up)} for case in cases]


def main() -> int:
    """Time every framework in a process of its own and print the table. Returns 1 when a ratio is above the bar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("framework", nargs="*", help=f"of {', '.join(FRAMEWORKS)}; default: all")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--warm-up", type=int, default=20)
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.framework) - set(FRAMEWORKS):
        parser.error(f"unknown framework: {', '.join(sorted(unknown))}")
    if args.here:
        for row in run_framework(args.framework[0], args.rounds, args.warm_up):
            print(json.dumps(row), flush=True)
        return 0
    over = 0
    if not args.json:
        print(f"{'framework':<11} {'model':<12} {'native':>9} {'precision':>9} {'ratio':>6}  {'95 % band':<13} itself")
    for framework in args.framework or FRAMEWORKS:
        options = ["--rounds", str(args.rounds), "--warm-up", str(args.warm_up)]
        child = [sys.executable, __file__, framework, "--here", *options]
        done = subprocess.run(child, stdout=subprocess.PIPE, text=True, check=True)
        for line in done.stdout.splitlines():
            row = json.loads(line)
            over += row["ratio"] > BAR
            if args.json:
                print(line, flush=True)
                continue
            print(
                f"{row['framework']:<11} {row['case']:<12} {row['native_ms']:>7.2f}ms {row['precision_ms']:>7.2f}ms "
                f"{row['ratio']:>6.3f}  {row['low']:.3f} - {row['high']:.3f} {row['native_to_itself']:.3f}",
                flush=True,
            )
    return int(over > 0)


if __name__ == "__main__":
    sys.exit(main())
