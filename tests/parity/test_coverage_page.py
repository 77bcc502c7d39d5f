"""The documentation's page of all ops is what the backends' tables say."""

from pathlib import Path

from precision import get_backend
from precision.coverage import coverage_page
from precision.ops import FAMILIES
from tests.parity.conftest import BACKENDS

PAGE = Path(__file__).parents[2] / "docs" / "autocast-coverage.md"


def test_the_page_is_the_tables():
    tables = {name: get_backend(name).op_table() for name in BACKENDS}
    assert PAGE.read_text(encoding="utf-8") == coverage_page(tables), (
        "run: precision ops --markdown > docs/autocast-coverage.md"
    )


def test_every_backend_knows_every_family_and_reasons_what_it_leaves():
    for name in BACKENDS:
        table = get_backend(name).op_table()
        names = [entry.name for entry in table]
        assert len(names) == len(set(names))
        assert {entry.family for entry in table} >= set(FAMILIES) - {"loss", "attention"}
        assert all(entry.why for entry in table if entry.family is None)
