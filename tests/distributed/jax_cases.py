"""A launch of JAX processes runs many checks; each is a function here or in a neighbour, and a test that looks at its outcome."""

import time
import traceback

import jax
import pytest

DEVICES = {  # four devices, and less time spent compiling
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0",
}


class Cases(dict):
    """Functions by name; used as their decorator."""

    def __call__(self, function):
        self[function.__name__] = function
        return function

    def run(self, *args):
        """Run all; None for each that passed, or how it failed."""
        outcomes = {}
        for name, function in self.items():
            start = time.perf_counter()
            try:
                function(*args)
                outcomes[name] = None
            except (Exception, pytest.fail.Exception):  # pytest.raises that saw nothing raised fails by the latter
                outcomes[name] = traceback.format_exc()
            print(f"{time.perf_counter() - start:6.2f} s {name}", flush=True)
        return outcomes


def replicas_of(array):
    """What each device of this process holds of an array."""
    return [jax.device_get(shard.data) for shard in array.addressable_shards]
