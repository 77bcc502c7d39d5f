"""The ``precision`` command: demo, parity, backends, ops, show, convert, diff, schema. Each prints for people, or JSON with ``--json``."""

from __future__ import annotations

import dataclasses
import importlib.resources
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from precision._quiet import quiet_stderr
from precision._version import __version__
from precision.errors import BackendUnavailableError, PrecisionError

app = typer.Typer(
    help="One precision policy for PyTorch, TensorFlow/Keras and JAX.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
Config = Annotated[
    str | None,
    typer.Option("--config", "-c", help="A precision config file, or a policy name. Default: the demo's own file."),
]
Only = Annotated[list[str] | None, typer.Option("--backend", "-b", help="Only this backend (may be repeated).")]


def main() -> None:
    """Run the command; errors of this library become one message on standard error and exit status 2."""
    try:
        app()
    except PrecisionError as error:
        if "--json" in sys.argv:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            Console(stderr=True).print(f"[bold red]{type(error).__name__}[/]: ", end="")
            Console(stderr=True, highlight=False, markup=False).print(str(error))
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def demo(
    config: Config = None,
    backend: Only = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Only this model (may be repeated).")] = None,
    steps: Annotated[int, typer.Option(min=20, max=10_000, help="Training steps a run.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Train the same models on real data in every installed framework under one policy, and compare them."""
    from precision.demo import MODELS, run_demo, to_json
    from precision.parity.models import MODELS as KNOWN

    models = tuple(model or MODELS)
    if unknown := [name for name in models if name not in KNOWN]:
        raise PrecisionError(f"unknown model {unknown[0]!r}. Known: {', '.join(KNOWN)}.")
    name, policies = _demo_policies(config)
    with _progress(as_json) as progress:
        result = run_demo(policies, _usable(backend), models, steps, progress=progress)
    if as_json:
        print(json.dumps(to_json(result), indent=2))
    else:
        from precision._show import show_demo

        show_demo(Console(), result, name)
    raise typer.Exit(0 if result.passed else 1)


@app.command()
def parity(
    config: Config = None,
    backend: Only = None,
    model: Annotated[list[str] | None, typer.Option("--model", "-m", help="Only this model (may be repeated).")] = None,
    steps: Annotated[int, typer.Option(min=20, max=10_000, help="Training steps a run of tier T4.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Run the parity tiers T0 to T4 over the installed backends: decisions, trajectories, rounding, ops, training."""
    from precision.parity.models import MODELS as KNOWN
    from precision.parity.suite import run_suite

    _, policies = _demo_policies(config)
    with _progress(as_json) as progress:
        results = run_suite(policies, _usable(backend), tuple(model or KNOWN), steps, progress)
    passed = all(result.passed for result in results)
    if as_json:
        print(json.dumps({"passed": passed, "tiers": [dataclasses.asdict(r) for r in results]}, indent=2))
    else:
        from precision._show import show_tiers

        show_tiers(Console(), results)
    raise typer.Exit(0 if passed else 1)


@app.command()
def backends(as_json: AsJson = False) -> None:
    """List the backends: what is installed, and what each device can do in each dtype."""
    from precision.registry import get_backend, list_backends

    found: list[dict[str, Any]] = []
    for info in list_backends():
        entry: dict[str, Any] = {**dataclasses.asdict(info), "versions": {}, "capabilities": [], "problem": None}
        if not info.installed:
            entry["problem"] = f"not installed: {', '.join(info.missing)}"
        else:
            try:
                with quiet_stderr():
                    loaded = get_backend(info.name)
                    entry["versions"] = loaded.versions()
                    entry["capabilities"] = [dataclasses.asdict(c) for c in loaded.capabilities()]
            except BackendUnavailableError as error:
                entry["problem"] = str(error)
            except Exception as error:  # noqa: BLE001 - another's plugin: say what it said, and list the rest
                entry["problem"] = f"{type(error).__name__}: {error}"
        found.append(entry)
    if as_json:
        print(json.dumps({"version": __version__, "backends": found}, indent=2))
    else:
        from precision._show import show_backends

        show_backends(Console(), found)


@app.command()
def ops(
    name: Annotated[str | None, typer.Argument(help="An op, as you call it: softmax, F.gelu, dot_general.")] = None,
    backend: Only = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print all of it as a page.")] = False,
    as_json: AsJson = False,
) -> None:
    """Tell which family an op belongs to, and so what autocast does to it."""
    from precision.coverage import coverage_page, look_up
    from precision.registry import get_backend

    with quiet_stderr():
        tables = {each: get_backend(each).op_table() for each in _usable(backend)}
    if markdown:
        print(coverage_page(tables), end="")
        return
    found = look_up(tables, name or "")
    if name and not any(found.values()):
        raise PrecisionError(f"no op named {name!r} in {', '.join(tables)}. precision ops lists all.")
    if as_json:
        print(json.dumps({each: [dataclasses.asdict(entry) for entry in table] for each, table in found.items()}))
        return
    from precision._show import show_ops

    show_ops(Console(), found)


@app.command()
def show(
    policy: Annotated[str, typer.Argument(help="A policy name in any known spelling, or a config file.")],
    as_json: AsJson = False,
) -> None:
    """Explain a policy field by field."""
    from precision.config import resolve_policy
    from precision.explain import explain

    explained = explain(resolve_policy(policy))
    if as_json:
        print(json.dumps(explained, indent=2))
    else:
        from precision._show import show_policy

        show_policy(Console(), policy, explained)


@app.command()
def convert(
    source: Annotated[str, typer.Argument(help="A config file of any tool, or a policy name.")],
    to: Annotated[str, typer.Option("--to", "-t", help="Whose config to write: a tool's name, or precision.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write to this file instead; its ending picks the kind.")
    ] = None,
    tool: Annotated[str | None, typer.Option("--from", "-f", help="Whose config it is. Default: recognised.")] = None,
    base: Annotated[
        str | None, typer.Option("--base", help="A config file of the target to write into: all else in it is kept.")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail if the target cannot express all of it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write the precision config of a tool from any other's. What is lost and notes go to standard error."""
    from precision.interop.convert import convert as converted
    from precision.interop.convert import read_values, to_text, write_text

    values = None if base is None else read_values(base)
    export = converted(source, to, tool=tool, base=values, strict=strict)
    if output is not None:
        write_text(export, output)
    if as_json:
        plain = dataclasses.asdict(export)
        print(json.dumps({**plain, "output": None if output is None else str(output)}, indent=2))
        return
    if output is None:
        sys.stdout.write(to_text(export))
        sys.stdout.flush()
    from precision._show import show_losses

    show_losses(Console(stderr=True, highlight=False), export.target, export.lost, export.notes)


@app.command()
def diff(
    first: Annotated[str, typer.Argument(help="A config file of any tool, or a policy name.")],
    second: Annotated[str, typer.Argument(help="Another.")],
    first_tool: Annotated[str | None, typer.Option("--first-from", help="Whose config the first is.")] = None,
    second_tool: Annotated[str | None, typer.Option("--second-from", help="Whose config the second is.")] = None,
    as_json: AsJson = False,
) -> None:
    """Say what differs in effect between two precision configs of any tools. Exit status 1 if anything does."""
    from precision.interop.convert import differences, read

    a, b = read(first, first_tool), read(second, second_tool)
    found = differences(a.policy, b.policy)
    if as_json:
        sides = {
            name: {"config": config, "tool": side.source, "notes": list(side.notes)}
            for name, config, side in (("first", first, a), ("second", second, b))
        }
        print(json.dumps({"same": not found, "differences": [dataclasses.asdict(d) for d in found], **sides}, indent=2))
    else:
        from precision._show import show_differences, show_losses

        show_differences(Console(), (first, a.source), (second, b.source), found)
        errors = Console(stderr=True, highlight=False)
        for config, side in ((first, a), (second, b)):
            show_losses(errors, config, (), side.notes)
    raise typer.Exit(1 if found else 0)


@app.command()
def schema(
    as_json: AsJson = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write to this file instead.")] = None,
) -> None:
    """Print the JSON Schema of a precision config file (it is JSON with or without --json)."""
    from precision.config import json_schema

    text = json.dumps(json_schema(), indent=2) + "\n"
    if output is None:
        sys.stdout.write(text)
    else:
        output.write_text(text, encoding="utf-8")


def _demo_policies(config: str | None) -> tuple[str, dict[str, Any]]:
    """The policies to train under: float32, the file's own, and mixed_float16 with the file's rules."""
    from precision.config import policy_from_text, resolve_policy
    from precision.names import PRESETS

    if config is None:
        text = importlib.resources.files("precision").joinpath("precision.toml").read_text(encoding="utf-8")
        name, policy = "precision.toml", policy_from_text(text, "toml", "precision.toml")
    else:
        name, policy = Path(config).name, resolve_policy(config)
    half = policy.loss_scale if policy.loss_scale.mode != "none" else PRESETS["mixed_float16"].loss_scale
    return name, {
        "float32": policy.with_(param_dtype="float32", compute_dtype="float32", output_dtype="float32"),
        name: policy,
        "mixed_float16": PRESETS["mixed_float16"].with_(rules=policy.rules, loss_scale=half),
    }


def _usable(only: list[str] | None) -> list[str]:
    from precision.registry import get_backend, list_backends

    if only:
        with quiet_stderr():
            return list(dict.fromkeys(get_backend(name).name for name in only))
    names = [info.name for info in list_backends() if info.installed and info.origin == "built-in"]
    if not names:
        raise BackendUnavailableError("no framework is installed. Install one: pip install 'precision-policy[torch]'.")
    return names


@contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None]]:
    columns = (TextColumn("{task.description:<40}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=quiet or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def report(text: str, done: int, total: int) -> None:
            bar.update(task, description=text, completed=done, total=total)
            if not quiet and not console.is_terminal:
                console.print(f"[{done}/{total}] {text}", markup=False, highlight=False)

        yield report
