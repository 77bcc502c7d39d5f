"""The command, as a user runs it: what it prints, its JSON, its exit status and its errors."""

import importlib.metadata
import importlib.resources
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from precision import FAMILIES, LossScale, PrecisionPolicy, Rule
from precision.config import json_schema
from precision.names import PRESETS


def command(*args, ok=True):
    env = {**os.environ, "COLUMNS": "160", "NO_COLOR": "1"}
    code = "from precision.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *args], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode == 0) is ok, done.stdout + done.stderr
    return done


@pytest.mark.parametrize("name", [*PRESETS, "16-mixed", "O3", "p=f32,c=bf16"])
def test_show_explains_every_field(name):
    policy = PrecisionPolicy.from_name(name)
    told = json.loads(command("show", name, "--json").stdout)
    assert PrecisionPolicy(**{**told["policy"], "loss_scale": LossScale(**told["policy"]["loss_scale"])}) == policy
    fields = {row["field"]: row["value"] for row in told["fields"]}
    assert fields["compute_dtype"] == policy.compute_dtype and fields["loss_scale.mode"] == policy.loss_scale.mode
    assert all(row["meaning"] for row in told["fields"]) and set(told["families"]) == set(FAMILIES)
    assert all(PrecisionPolicy.from_name(spelling) == policy for spelling in told["names"].values())


def test_show_a_file_for_people(tmp_path):
    path = tmp_path / "p.toml"
    PRESETS["mixed_float16"].with_(rules=[Rule(module="head", dtype="float32")]).to_file(path)
    text = command("show", str(path)).stdout
    for part in ("module head", "loss_scale.growth_interval", "2000", "softmax", "6.55e+04"):
        assert part in text


def test_schema_to_stdout_and_to_a_file(tmp_path):
    assert json.loads(command("schema").stdout) == json.loads(command("schema", "--json").stdout) == json_schema()
    command("schema", "-o", str(tmp_path / "s.json"))
    assert json.loads((tmp_path / "s.json").read_text()) == json_schema()


def test_errors_are_one_message_and_status_2(tmp_path):
    done = command("show", "mixed_bfloat", ok=False)
    assert done.returncode == 2 and done.stdout == ""
    assert "PolicyError" in done.stderr and "Did you mean 'mixed_bfloat16'" in done.stderr
    assert "Traceback" not in done.stderr
    done = command("show", "mixed_bfloat", "--json", ok=False)
    assert json.loads(done.stdout)["error"] == "PolicyError" and "Traceback" not in done.stderr
    (tmp_path / "bad.toml").write_text("compute_dtyp = 'f16'\n")
    assert "bad.toml:1: compute_dtyp" in command("show", str(tmp_path / "bad.toml"), ok=False).stderr.replace("\n", "")
    assert "unknown model 'mpl'" in command("demo", "-m", "mpl", ok=False).stderr
    assert "unknown backend 'touch'" in command("demo", "-b", "touch", ok=False).stderr


def test_what_a_worker_refuses_is_told_as_itself(tmp_path):
    (tmp_path / "p.toml").write_text("preset = 'mixed_bfloat16'\nemulate = true\n")
    done = command("demo", "-c", str(tmp_path / "p.toml"), "-b", "torch", "-m", "mlp", "--steps", "20", ok=False)
    assert done.returncode == 2 and "UnsupportedError: emulate = true" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_demo_s_file_is_the_examples_file():
    ours = importlib.resources.files("precision").joinpath("precision.toml").read_text()
    assert (Path(__file__).parents[2] / "examples" / "precision.toml").read_text() == ours


def test_version_and_help():
    assert command("--version").stdout.strip() == __import__("precision").__version__
    text = command("--help").stdout
    for name in ("demo", "parity", "backends", "show", "schema"):
        assert name in text


def public(version):
    return version.partition("+")[0]  # a build's own suffix (+cpu, +cu130) is not always in its metadata


def test_backends_tells_versions_devices_and_reasons():
    told = {entry["name"]: entry for entry in json.loads(command("backends", "--json").stdout)["backends"]}
    for name, framework in (("torch", "torch"), ("tensorflow", "tensorflow"), ("jax", "jax")):
        entry = told[name]
        assert entry["installed"] and entry["problem"] is None
        assert public(entry["versions"][framework]) == public(importlib.metadata.version(framework))
        assert {c["dtype"] for c in entry["capabilities"]} >= {"float32", "float16", "bfloat16"}
        assert all(c["reason"] and c["support"] in ("native", "slow", "storage", "none") for c in entry["capabilities"])
    assert "keras" in command("backends").stdout
