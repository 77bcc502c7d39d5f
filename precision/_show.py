"""How the command prints results for people, with rich."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from precision.demo import DemoResult
from precision.interop.base import Lost
from precision.interop.convert import Difference
from precision.ops import FAMILIES, OpEntry
from precision.parity.tiers import TierResult


def new_table(title: str, *columns: str) -> Table:
    """A table in the style of all of them; columns that start with ``>`` are right-aligned."""
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def verdict(ok: bool) -> str:
    """A coloured yes or no."""
    return "[green]yes[/]" if ok else "[bold red]NO[/]"


def show_demo(console: Console, result: DemoResult, name: str) -> None:
    """Print the demo's table, the verdicts and how to go on."""
    console.print(f"The same models, weights and data in each framework, under {name}\n", style="bold", markup=False)
    groups = itertools.groupby(result.rows, key=lambda row: (row.model, row.policy))
    for number, ((model, policy), group) in enumerate(groups):
        rows = list(group)
        first = rows[0]
        agree = "[green]agree[/]" if first.agrees else "[bold red]DO NOT AGREE[/]"
        console.print(f"[bold]{model}[/], {escape(policy)}: {agree} (gap {first.gap:.1e}, bar {first.bar:.1e})")
        table = Table(box=None, pad_edge=False, show_header=number == 0, header_style="bold")
        for column in ("  backend", "loss", "accuracy", "scale", "skipped", "time", "memory"):
            table.add_column(column, justify="left" if "backend" in column else "right", min_width=8, no_wrap=True)
        for row in rows:
            table.add_row(
                f"  {row.backend:<10}", f"{row.last_loss:.4f}", f"{100 * row.accuracy:.1f}%", f"{row.scale:g}",
                str(row.skipped), f"{row.step_ratio:.2f}x", f"{row.memory_ratio:.2f}x",
            )  # fmt: skip
        console.print(table)
    console.print(
        "\nloss: mean of the last ten steps. accuracy: on held-out digits. scale, skipped: loss scale at the end, steps "
        "skipped. time: median step against float32 on the same backend, runs taking turns; below 1 is faster. memory: "
        "peak of the process against float32's, all models.\n"
        "gap: typical difference between two backends' loss curves. bar: the largest difference of one backend from "
        "itself with its sums in another order, so what rounding alone does.",
        style="dim",
    )
    if any(row.step_ratio > 1.2 for row in result.rows):
        console.print(
            "A time above 1 means that low precision does not pay here; precision backends says what this device can do.",
            style="yellow",
        )
    for policy, tier in result.decisions.items():
        console.print(f"{policy}: {tier.checked} dtype decisions equal on all backends: {verdict(tier.passed)}")
    problems = [f for tier in (*result.decisions.values(), *result.training.values()) for f in tier.failures]
    for problem in problems:
        console.print(problem, style="red", markup=False)
    console.print("parity: all agree" if result.passed else "parity: NOT all agree", style="bold")
    console.print(
        "\nGo on: precision show mixed_bfloat16 explains a policy, precision backends says what this machine can do, "
        "examples/ has a script a framework, all reading one precision.toml, and precision demo --config FILE tries yours."
    )


def show_tiers(console: Console, results: Sequence[TierResult]) -> None:
    """Print a line a tier, then every failure."""
    table = new_table("Parity", "tier", "what", ">compared", "holds", "detail")
    for result in results:
        table.add_row(result.tier, result.what, str(result.checked), verdict(result.passed), _tier_detail(result))
    console.print(table)
    for result in results:
        for failure in result.failures:
            console.print(f"{result.tier}: {failure}", style="red", markup=False, highlight=False)


def _tier_detail(result: TierResult) -> str:
    if result.tier == "T4":
        return f"gap {result.detail['gap']:.2g}, bar {result.detail['bar']:.2g}, {result.detail['skipped']} skipped"
    if result.tier == "T3":
        return f"worst {max(result.detail['worst'].values()):.2f} of the bar"
    return ""


def show_backends(console: Console, found: Sequence[dict[str, Any]]) -> None:
    """Print each backend, then what its devices can do."""
    table = new_table("Backends", "name", "also called", "origin", "versions or problem")
    for entry in found:
        versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
        problem = f"[red]{escape(entry['problem'])}[/]" if entry["problem"] else versions
        table.add_row(entry["name"], ", ".join(entry["aliases"]), entry["origin"], problem)
    console.print(table)
    rows = [(entry["name"], c) for entry in found for c in entry["capabilities"]]
    if rows:
        devices = new_table("\nDevices", "backend", "device", "dtype", "support", "reason")
        colour = {"native": "green", "slow": "yellow", "storage": "yellow", "none": "red"}
        for name, c in rows:
            support = f"[{colour[c['support']]}]{c['support']}[/]"
            devices.add_row(name, c["device"], c["dtype"], support, escape(c["reason"]))
        console.print(devices)


def show_ops(console: Console, found: Mapping[str, Sequence[OpEntry]]) -> None:
    """The ops found in each backend's table."""
    table = new_table("Ops", "backend", "op", "family", "treatment", "why")
    for backend, entries in found.items():
        for entry in entries:
            treatment = FAMILIES[entry.family].treatment if entry.family else "untouched"
            table.add_row(backend, entry.name, entry.family or "-", treatment, escape(entry.why))
    console.print(table)


def show_policy(console: Console, name: str, explained: dict[str, Any]) -> None:
    """Print a policy field by field, then what each op family runs in, then the formats' limits."""
    fields = new_table(f"Policy {name}", "field", "value", "meaning")
    for row in explained["fields"]:
        fields.add_row(row["field"], str(row["value"]), row["meaning"])
    console.print(fields)
    families = new_table("\nOp families", "family", "runs in", "because it")
    for family, fact in explained["families"].items():
        families.add_row(family, fact["dtype"], fact["why"])
    console.print(families)
    formats = new_table("\nFormats", "dtype", ">largest", ">smallest normal", ">smallest", ">spacing at 1")
    for dtype, f in explained["formats"].items():
        numbers = (f["max"], f["smallest_normal"], f["smallest_subnormal"], f["eps"])
        formats.add_row(dtype, *(f"{number:.4g}" for number in numbers))
    console.print(formats)
    if explained["names"]:
        spelt = ", ".join(f"{style}: {spelling}" for style, spelling in explained["names"].items())
        console.print(f"\nAlso known as  {spelt}", highlight=False)


def show_losses(console: Console, name: str, lost: Sequence[Lost], notes: Sequence[str]) -> None:
    """Print what a config cannot express, and what acts differently, a line each."""
    for entry in lost:
        console.print(f"[bold red]lost[/] in {escape(name)}: {escape(str(entry))}", soft_wrap=True)
    for note in notes:
        console.print(f"[yellow]note[/] on {escape(name)}: {escape(note)}", soft_wrap=True)


def show_differences(
    console: Console, first: tuple[str, str], second: tuple[str, str], found: Sequence[Difference]
) -> None:
    """Print the fields in which two configs differ in effect; each config is a name and the tool it is of."""
    if not found:
        console.print(
            f"{first[0]} ({first[1]}) and {second[0]} ({second[1]}) are the same in effect.",
            markup=False,
            highlight=False,
        )
        return
    table = new_table(
        "Differences in effect", "field", f"{escape(first[0])} ({first[1]})", f"{escape(second[0])} ({second[1]})"
    )
    for difference in found:
        values = ("-" if value is None else json.dumps(value) for value in (difference.first, difference.second))
        table.add_row(difference.field, *(escape(value) for value in values))
    console.print(table)
