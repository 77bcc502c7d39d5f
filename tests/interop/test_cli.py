"""``precision convert`` and ``precision diff``, as a user runs them: output that can be piped, exit status, errors."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from precision import PrecisionPolicy, cli
from precision.interop import get_target, list_targets, read
from precision.names import PRESETS

TOOLS = [target.name for target in list_targets()]
POLICY = PRESETS["mixed_bfloat16"].with_(rules=[{"module": "head", "dtype": "float32"}])


@pytest.fixture
def command(monkeypatch, capsys, tmp_path):
    """Runs the command in this process, in a folder of its own, as its script does."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("NO_COLOR", "1")
    POLICY.to_file("precision.toml")

    def run(*args, status=0):
        monkeypatch.setattr(sys, "argv", ["precision", *args])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        assert (caught.value.code or 0) == status, out + err
        return out, err

    return run


@pytest.mark.parametrize("tool", TOOLS)
def test_to_standard_output_goes_the_config_and_nothing_else(command, tool):
    out, err = command("convert", "precision.toml", "--to", tool)
    target = get_target(tool)
    export = target.export(POLICY)
    values = {"json": json.loads, "yaml": yaml.safe_load, "toml": tomllib.loads, "text": str.strip}[target.kinds[0]](
        out
    )
    assert values == export.config
    assert [line for line in err.splitlines() if line.startswith("lost")] == [
        f"lost in {tool}: {entry}" for entry in export.lost
    ]
    assert [line for line in err.splitlines() if line.startswith("note")] == [
        f"note on {tool}: {note}" for note in export.notes
    ]


@pytest.mark.parametrize("tool", [t for t in TOOLS if get_target(t).kinds != ("text",)])
def test_a_file_of_each_kind_reads_back_and_differs_in_what_was_lost_only(command, tool):
    for kind in get_target(tool).kinds:
        out, _ = command("convert", "precision.toml", "--to", tool, "-o", f"{tool}.{kind}")
        assert out == ""
        found = json.loads(command("convert", f"{tool}.{kind}", "--to", "precision", "--json")[0])
        assert found["config"] == read(f"{tool}.{kind}").policy.to_dict() and found["lost"] == []
        lost = {entry.field.split(".")[0] for entry in get_target(tool).export(POLICY).lost}
        told = json.loads(command("diff", "precision.toml", f"{tool}.{kind}", "--json", status=1 if lost else 0)[0])
        assert told["same"] is (not lost)
        assert {difference["field"].split(".")[0] for difference in told["differences"]} == lost
        assert told["second"]["tool"] == tool


def test_a_policy_comes_back_as_a_file(command):
    command("convert", "precision.toml", "--to", "deepspeed", "-o", "ds_config.json")
    command("convert", "ds_config.json", "--to", "precision", "-o", "again.toml")
    assert PrecisionPolicy.from_file("again.toml") == read("ds_config.json").policy
    out, _ = command("convert", "ds_config.json", "--to", "precision")
    assert tomllib.loads(out)["compute_dtype"] == "bfloat16"


def test_names_and_jmp_strings_are_sources_too(command):
    assert command("convert", "fp16", "-t", "jmp")[0] == "params=float32,compute=float16,output=float32\n"
    assert json.loads(command("convert", "p=f32,c=bf16", "-t", "flax")[0])["dtype"] == "bfloat16"
    command("convert", "fp16", "-t", "jmp", "-o", "policy.txt")
    assert Path("policy.txt").read_text() == "params=float32,compute=float16,output=float32\n"


def test_what_the_target_holds_besides_is_kept(command):
    with open("base.yml", "w") as file:
        yaml.safe_dump({"base_emb_dim": 64, "dtype": "float32", "weight_dtype": "float32"}, file)
    out, _ = command("convert", "precision.toml", "--to", "maxtext", "--base", "base.yml")
    assert yaml.safe_load(out)["base_emb_dim"] == 64 and yaml.safe_load(out)["dtype"] == "bfloat16"
    out, err = command("convert", "base.yml", "--to", "lightning")
    assert yaml.safe_load(out) == {"precision": "32-true"} and "left behind" in err and "base_emb_dim" in err


def test_strict_fails_and_writes_nothing(command, tmp_path):
    out, err = command("convert", "precision.toml", "--to", "huggingface", "--strict", "-o", "args.json", status=2)
    assert out == "" and "rules" in err and not (tmp_path / "args.json").exists()
    out, _ = command("convert", "precision.toml", "--to", "jmp", "--strict", "--json", status=2)
    assert json.loads(out)["error"] == "InteropError" and "rules" in json.loads(out)["message"]
    command("convert", "bf16", "--to", "jmp", "--strict")


def test_json_has_all_of_it(command):
    told = json.loads(command("convert", "precision.toml", "--to", "keras", "--json")[0])
    export = get_target("keras").export(POLICY)
    assert told["config"] == export.config and told["notes"] == list(export.notes) and told["output"] is None
    assert told["lost"] == [{"field": e.field, "value": e.value, "instead": e.instead} for e in export.lost]


def test_diff_tells_fields_values_and_tools(command):
    out, _ = command("diff", "fp16", "bf16", status=1)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:]}
    assert rows["compute_dtype"] == ['"float16"', '"bfloat16"']
    assert rows["loss_scale.initial"] == ["65536.0", "-"]
    out, _ = command("diff", "16-mixed", "mixed_float16")
    assert "the same in effect" in out


def test_a_config_of_several_tools_needs_a_name(command):
    with open("odd.json", "w") as file:
        json.dump({"something": 1}, file)
    _, err = command("diff", "odd.json", "bf16", status=2)
    assert "--from" in err and "something" in err
    command("convert", "odd.json", "--to", "jmp", "--from", "lightning")  # nothing said: Lightning's default
    out, _ = command("diff", "odd.json", "float32", "--first-from", "lightning", "--second-from", "precision")
    assert "odd.json (lightning)" in out


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["convert", "precision.toml", "--to", "kras"], "Did you mean 'keras'"),
        (["convert", "missing.toml", "--to", "keras"], "cannot be read"),
        (["convert", "nonsense", "--to", "keras"], "unknown policy"),
        (["convert", "precision.toml", "--to", "keras", "-o", "x.ini"], "unknown ending"),
        (["convert", "precision.toml", "--to", "keras", "-o", "nowhere/x.json"], "cannot be written"),
        (["convert", "precision.toml", "--to", "jmp", "-o", "x.json"], "line of text"),
        (["convert", "precision.toml", "--to", "keras", "--base", "missing.json"], "cannot be read"),
        (["diff", "precision.toml", "missing.json"], "cannot be read"),
    ],
)
def test_errors_are_one_message_and_status_2(command, args, says):
    out, err = command(*args, status=2)
    assert says in err.replace("\n", " ") and out == "" and "Traceback" not in err


def test_the_output_can_be_piped_to_what_stops_reading(tmp_path):
    code = "from precision.cli import main; main()"
    done = subprocess.run(
        ["bash", "-c", f'"{sys.executable}" -c "{code}" convert bf16 --to keras 2>err | head -c 1'],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "NO_COLOR": "1"}, check=False,
    )  # fmt: skip
    assert done.stdout == "{" and "Traceback" not in (tmp_path / "err").read_text()
