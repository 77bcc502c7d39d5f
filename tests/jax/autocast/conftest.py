"""The programs of these tests run once: XLA need not optimise them."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def _compile_quickly():
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
