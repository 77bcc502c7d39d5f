"""One worker process a backend for the whole parity suite, as ``precision parity`` and the demo use them."""

import pytest

from precision.parity.remote import RemoteAdapter

BACKENDS = ("torch", "tensorflow", "jax")


@pytest.fixture(scope="session")
def adapters():
    """The adapters of all three backends, each in a process of its own."""
    workers = [RemoteAdapter(name) for name in BACKENDS]
    yield workers
    for worker in workers:
        worker.close()


@pytest.fixture(scope="session", params=BACKENDS)
def adapter(request, adapters):
    """One backend's adapter at a time."""
    return adapters[BACKENDS.index(request.param)]
