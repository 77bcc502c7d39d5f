"""The documentation holds: its code runs and prints what it says, its links lead somewhere, its tables are the code's."""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import yaml
from markdown.extensions.toc import slugify

from precision import DTYPES, FAMILIES, FloatFormat, LossScale, PrecisionPolicy, next_state
from precision.loss_scale import initial_state, state_to_dict
from precision.names import STYLES
from tests.docs.blocks import Block, blocks_of, groups_of

ROOT = Path(__file__).parents[2]
DOCS = sorted((ROOT / "docs").rglob("*.md"))
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
RUN = [READMES[0], *DOCS]
FRAGMENTS_ALLOWED = 6


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def code_of(page: Path) -> list[Block]:
    blocks = blocks_of(page.read_text(encoding="utf-8"))
    return [b for b in blocks if b.lang == "python" and b.title != "fragment"]


def runs() -> list[tuple[str, tuple[str, ...]]]:
    return [(name_of(page), group) for page in RUN for group in groups_of(code_of(page))]


@pytest.fixture(scope="session")
def results(tmp_path_factory):
    """What became of each page's blocks, by page and group; a process a group, started when first asked for."""
    folders = {name_of(page): tmp_path_factory.mktemp("page") for page in RUN}
    for page in RUN:
        for block in blocks_of(page.read_text(encoding="utf-8")):
            if re.fullmatch(r"[\w-]+\.(toml|json|yaml|yml)", block.title):  # a file that later blocks read
                (folders[name_of(page)] / block.title).write_text(block.code)

    @cache
    def run(group: tuple[str, ...]) -> dict[str, str | None]:
        work = []
        for page in RUN:
            blocks = code_of(page)
            if group in groups_of(blocks):
                chosen = [dataclasses.asdict(b) for b in blocks if set(b.frameworks) <= set(group)]
                work.append([name_of(page), str(folders[name_of(page)]), chosen])
        out = tmp_path_factory.mktemp("out") / "results.json"
        done = subprocess.run(
            [sys.executable, ROOT / "tests" / "docs" / "blocks.py", out],
            input=json.dumps(work), capture_output=True, text=True, timeout=280, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return json.loads(out.read_text())

    return run


@pytest.mark.parametrize(("page", "group"), runs(), ids=lambda v: v if isinstance(v, str) else "+".join(v) or "core")
def test_code_runs_and_prints_what_it_says(page, group, results):
    problem = results(group)[page]
    assert problem is None, problem


def test_fragments_are_few_and_still_python():
    fragments = [b for page in RUN for b in blocks_of(page.read_text(encoding="utf-8")) if b.title == "fragment"]
    for block in fragments:
        ast.parse(block.code)
    assert len(fragments) <= FRAGMENTS_ALLOWED


def links_of(page: Path) -> list[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    found = re.findall(r"\]\(([^)\s]+)\)", text)
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors_of(page: Path) -> set[str]:
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return {slugify(re.sub(r"[`*]", "", title), "-") for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", [*READMES, *DOCS], ids=name_of)
def test_links_lead_somewhere(page):
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        assert target.exists(), f"{link}: no such file"
        if anchor:
            assert anchor in anchors_of(target), f"{link}: no such heading"


def test_every_page_is_in_the_navigation():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(entry: object) -> list[str]:
        if isinstance(entry, str):
            return [entry]
        return [p for part in (entry.values() if isinstance(entry, dict) else entry) for p in pages(part)]

    assert sorted(pages(config["nav"])) == sorted(p.relative_to(ROOT / "docs").as_posix() for p in DOCS)


def test_the_chinese_readme_follows_the_english_one():
    english, chinese = (page.read_text(encoding="utf-8") for page in READMES)
    assert [len(h) for h in headings(english)] == [len(h) for h in headings(chinese)]
    assert [b.code for b in blocks_of(english)] == [b.code for b in blocks_of(chinese)]


def headings(text: str) -> list[str]:
    return re.findall(r"^(#+) ", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)


# ---- tables that must be the code's ------------------------------------------------------------------------------


def table_after(page: str, heading: str) -> list[dict[str, str]]:
    """The first table after a heading, a dict a row; backticks are taken off."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").partition(f"# {heading}\n")[2]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert rows, f"{page}: no table after {heading!r}"
    cells = [[c.strip().replace("`", "") for c in line.strip("| \n").split("|")] for line in rows[0].splitlines()]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def test_the_worked_trajectory_is_what_the_rule_gives():
    config = LossScale(
        mode="dynamic", initial=1024.0, growth_interval=3, minimum=512.0, maximum=2048.0, hysteresis=2
    )  # fmt: skip
    state = initial_state(config)
    rows = table_after("loss-scaling.md", "A worked trajectory")
    assert len(rows) >= 12
    for number, row in enumerate(rows, 1):
        assert (int(row["step"]), float(row["scaled with"])) == (number, float(state.scale))
        state = next_state(config, state, np.bool_(row["gradients"] == "finite"), np)
        assert row["step taken"] == ("yes" if row["gradients"] == "finite" else "no")
        told = {key: float(row[key]) for key in ("scale", "good_steps", "hysteresis_left", "skipped")}
        told["consecutive_skips"] = float(row["consecutive_skips"])
        assert {"version": 1, **told} == state_to_dict(state)


def test_the_state_shown_is_what_the_rule_gives():
    (shown,) = (b for b in blocks_of((ROOT / "docs/loss-scaling.md").read_text()) if b.title == "scale.json")
    config = LossScale(mode="dynamic")
    state = initial_state(config)
    for _ in range(3):
        state = next_state(config, state, np.bool_(True), np)
    assert json.loads(shown.code) == state_to_dict(state)


def test_the_table_of_settings_has_the_defaults():
    rows = {row["setting"]: row["default"] for row in table_after("loss-scaling.md", "Settings")}
    assert set(rows) == set(LossScale.model_fields)
    for name, field in LossScale.model_fields.items():
        told = rows[name]
        power = re.fullmatch(r"2\*\*(-?\d+)", told)
        assert (2.0 ** int(power[1]) if power else told) == (field.default if power else str(field.default))


def test_the_table_of_formats_has_the_formats_numbers():
    rows = table_after("fp16-or-bf16.md", "Ranges and spacing")
    assert [row["dtype"] for row in rows] == list(DTYPES)
    for row in rows:
        known = FloatFormat.of(row["dtype"])
        assert (int(row["bits"]), int(row["exponent"]), int(row["fraction"])) == (
            known.bits, known.exponent_bits, known.mantissa_bits,
        )  # fmt: skip
        for column, number in (
            ("largest", known.max), ("smallest normal", known.smallest_normal),
            ("smallest", known.smallest_subnormal), ("spacing at 1", known.eps), ("at 1000", known.spacing(1000.0)),
        ):  # fmt: skip
            if row[column] != "-":
                assert row[column] == f"{number:.4g}"


def test_the_table_of_spellings_resolves():
    rows = table_after("policies.md", "Spellings")
    told = {spelling: row["preset"] for row in rows for spelling in re.split(r",\s*", row["spellings"])}
    for spelling, preset in told.items():
        assert PrecisionPolicy.from_name(spelling) == PrecisionPolicy.from_name(preset)
    assert {spelling for style in STYLES.values() for spelling in style} - {"O3"} == set(told)


def test_the_table_of_op_families_is_the_code_s():
    rows = table_after("policies.md", "Op families")
    assert [(r["family"], r["treatment"]) for r in rows] == [(f.name, f.treatment) for f in FAMILIES.values()]


def test_every_fault_of_others_names_a_test_that_exists():
    text = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith(("| fault", "| ---"))]
    assert len(rows) >= 15
    for row in rows:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(?:(\w+)::)?(\w+)`", row)
        assert tests, f"no test is named in: {row}"
        for file, cls, test in tests:
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            scope = tree.body
            if cls:
                scope = next(n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls)
            assert any(isinstance(n, ast.FunctionDef) and n.name == test for n in scope), f"{file} has no {test}"
