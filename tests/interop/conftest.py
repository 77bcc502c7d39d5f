"""Launchers write into the environment (ranks, addresses), where the next tool takes it for its own: it is put back."""

import os

import pytest


@pytest.fixture(autouse=True)
def environment():
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
