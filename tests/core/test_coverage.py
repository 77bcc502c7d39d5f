"""Looking ops up, and the page of all ops."""

import pytest

from precision.coverage import coverage_page, look_up
from precision.ops import FAMILIES, OpEntry

TABLES = {
    "one": [
        OpEntry("lib.softmax", "softmax"),
        OpEntry("lib.log_softmax", "softmax"),
        OpEntry("lib.relu", "elementwise"),
    ],
    "two": [
        OpEntry("Softmax", "softmax"),
        OpEntry("Sort", "shape", "moves values"),
        OpEntry("Bits", None, "shows bits"),
    ],
}


def names(found):
    return {backend: [entry.name for entry in entries] for backend, entries in found.items()}


def test_an_op_is_found_by_its_last_name_else_by_a_part_of_it():
    assert names(look_up(TABLES, "softmax")) == {"one": ["lib.softmax"], "two": ["Softmax"]}
    assert names(look_up(TABLES, "LIB.relu")) == {"one": ["lib.relu"], "two": []}
    assert names(look_up(TABLES, "tf.nn.softmax")) == {"one": ["lib.softmax"], "two": ["Softmax"]}
    assert names(look_up(TABLES, "soft")) == {"one": ["lib.softmax", "lib.log_softmax"], "two": ["Softmax"]}
    assert names(look_up(TABLES, "nonesuch")) == {"one": [], "two": []}


def test_the_page_counts_every_family_and_gives_each_reason():
    page = coverage_page(TABLES)
    for family in FAMILIES:
        assert f"| `{family}` |" in page
    row = next(line for line in page.splitlines() if line.startswith("| `softmax` |"))
    assert row.endswith("| 2 | 1 |")
    assert "**softmax**: `lib.log_softmax`, `lib.softmax`." in page
    assert "- moves values: `Sort`" in page and "- shows bits: `Bits`" in page
    assert page.index("## one") < page.index("## two")


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_has_a_treatment_and_a_reason(family):
    assert FAMILIES[family].treatment in ("compute", "float32", "promote", "follow") and FAMILIES[family].why
