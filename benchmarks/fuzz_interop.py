"""Throws hostile config files at everything that reads one: mutations of valid files of every tool, and random bytes.

    python benchmarks/fuzz_interop.py [--inputs 20000] [--seed 0]

Each input is a file that is read (by its own tool, or by one at random) and, if it says something, exported to another tool.
Anything but a policy or an error of this library is a failure, and so is an input that takes longer than ten seconds. Prints
how many came out how; exit status 1 on a failure. The seed and number of a failure make it again.
"""

import argparse
import collections
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from precision import PrecisionError
from precision.interop import list_targets, read
from tests.interop.hostile import CRAFTED, mutated, valid_files

SECONDS = 10
MEMORY = 4 * 2**30


class TooLongError(Exception):
    """An input took longer than it may."""


def expire(*_):
    raise TooLongError


def make(seed, number, files):
    """The input of a number, and the tool to read it with (None: recognised)."""
    source = random.Random(f"{seed} {number}")
    if number < len(CRAFTED):
        kind, content = list(CRAFTED.values())[number]
    elif source.random() < 0.05:
        kind, content = source.choice(["toml", "json", "yaml"]), source.randbytes(source.choice([3, 30, 300]))
    else:
        kind, content = mutated(source, files)
    tools = [None, None, "precision", *(target.name for target in list_targets())]
    return kind, content, source.choice(tools), source.choice(list_targets())


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--inputs", type=int, default=20_000)
    parser.add_argument("--seed", default="0")
    options = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.signal(signal.SIGALRM, expire)
    files = valid_files()
    counts, failures = collections.Counter(), []
    slowest, begun = (0.0, -1), time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for number in range(options.inputs):
            kind, content, tool, target = make(options.seed, number, files)
            path = Path(folder, f"config.{kind}")
            path.write_bytes(content)
            started = time.monotonic()
            signal.alarm(SECONDS)
            try:
                found = read(path, tool)
                target.export(found.policy)
                target.export(found.policy, base=found.rest)
                counts[f"read as {found.source}"] += 1
            except PrecisionError as error:
                counts[type(error).__name__] += 1
            except BaseException as error:  # noqa: BLE001 - that is what is looked for
                counts["FAILURE"] += 1
                failures.append((number, kind, tool, target.name, traceback.format_exc()))
                if isinstance(error, KeyboardInterrupt):
                    break
            finally:
                signal.alarm(0)
            slowest = max(slowest, (time.monotonic() - started, number))
    for number, kind, tool, name, told in failures[:10]:
        print(
            f"input {number} of seed {options.seed} ({kind}, read with {tool}, written for {name}):\n{told}",
            file=sys.stderr,
        )
    total = sum(counts.values())
    print(
        f"{total} inputs, seed {options.seed}, {time.monotonic() - begun:.0f} s; slowest {slowest[0]:.2f} s (input {slowest[1]})"
    )
    for name, count in counts.most_common():
        print(f"{count:8d}  {name}")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
