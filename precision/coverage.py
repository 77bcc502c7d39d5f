"""Which op of which framework belongs to which family: looked up by name, and as the page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from precision.ops import FAMILIES, OpEntry

Tables = Mapping[str, Sequence[OpEntry]]

_TREATMENTS = {
    "compute": "inputs cast to the compute dtype",
    "float32": "inputs cast to float32",
    "promote": "inputs meet in the widest dtype",
    "follow": "left as it comes",
}


def look_up(tables: Tables, name: str) -> dict[str, list[OpEntry]]:
    """The ops of each backend that are called ``name``; else those with the same last part of their name; else those that contain it.

    Args:
        tables: a list of ops a backend, by the backend's name.
        name: as a user would say it (``softmax``, ``torch.nn.functional.gelu``); case does not matter.
    """
    wanted = name.lower()
    last = wanted.rpartition(".")[2]
    found = {}
    for backend, table in tables.items():
        exact = [e for e in table if e.name.lower() == wanted]
        same = [e for e in table if e.name.lower().rpartition(".")[2] == last]
        found[backend] = exact or same or [e for e in table if last in e.name.lower()]
    return found


def coverage_page(tables: Tables) -> str:
    """The documentation's page of all ops, in Markdown."""
    lines = [
        "# Every op and its family",
        "",
        (
            "What op-level autocast does to each op of each framework. Made by `precision ops --markdown`; tests walk the public "
            "namespaces of the frameworks and fail on an op that computes and is missing here."
        ),
        "",
        f"| family | treatment | why | {' | '.join(tables)} |",
        f"| --- | --- | --- |{' ---: |' * len(tables)}",
    ]
    for family in FAMILIES.values():
        counts = [sum(entry.family == family.name for entry in table) for table in tables.values()]
        lines.append(
            f"| `{family.name}` | {_TREATMENTS[family.treatment]} | {family.why} | {' | '.join(map(str, counts))} |"
        )
    left = [sum(entry.family is None for entry in table) for table in tables.values()]
    lines.append(f"| none | never touched | the reason stands beside each op | {' | '.join(map(str, left))} |")
    for backend, table in tables.items():
        lines += ["", f"## {backend}"]
        for name in FAMILIES:
            plain = sorted(entry.name for entry in table if entry.family == name and not entry.why)
            if plain:
                lines += ["", f"**{name}**: {', '.join(f'`{op}`' for op in plain)}."]
            lines += _reasons([entry for entry in table if entry.family == name and entry.why], name)
        lines += _reasons([entry for entry in table if entry.family is None], "never touched")
    return "\n".join(lines) + "\n"


def _reasons(entries: Sequence[OpEntry], title: str) -> list[str]:
    """A list of ops that share a reason, a reason a line."""
    by_reason: dict[str, list[str]] = {}
    for entry in entries:
        by_reason.setdefault(entry.why, []).append(entry.name)
    lines = [f"- {why}: {', '.join(f'`{op}`' for op in sorted(ops))}" for why, ops in sorted(by_reason.items())]
    return ["", f"**{title}**, with a reason:", "", *lines] if lines else []
