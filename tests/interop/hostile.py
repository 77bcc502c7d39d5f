"""Hostile and malformed config files: the ones people have made up, and mutations of valid ones. For tests and the fuzzer."""

import json
import random

import tomli_w
import yaml

from precision.config import policy_to_text
from precision.interop import list_targets
from precision.interop.convert import to_text
from precision.names import PRESETS

NESTED = 20_000

CRAFTED = {
    # name: (kind, content)
    "empty": ("json", b""),
    "only a BOM": ("toml", b"\xef\xbb\xbf"),
    "a BOM in front": ("json", b'\xef\xbb\xbf{"bf16": {"enabled": true}}'),
    "UTF-16": ("json", '{"a": 1}'.encode("utf-16")),
    "no UTF-8": ("toml", b'preset = "\xff\xfe"'),
    "NUL in text": ("yaml", b"preset: mixed\x00float16\n"),
    "NUL in JSON": ("json", b'{"preset": "float32\\u0000"}'),
    "half a character": ("json", b'{"preset": "\\ud800"}'),
    "half a key": ("json", b'{"\\udfff": 1}'),
    "NaN": ("json", b'{"loss_scale": {"mode": "dynamic", "initial": NaN}}'),
    "NaN in TOML": ("toml", b'loss_scale = {mode = "dynamic", initial = nan}'),
    "infinity": ("yaml", b"fp16: {enabled: true, loss_scale: .inf}\n"),
    "a number beyond float64": ("json", b'{"fp16": {"enabled": true, "loss_scale": 1e999}}'),
    "a number of 10000 digits": ("json", b'{"fp16": {"enabled": true, "loss_scale": ' + b"9" * 10_000 + b"}}"),
    "the same in TOML": ("toml", b"compute_dtype = " + b"9" * 10_000),
    "the same in YAML": ("yaml", b"compute_dtype: " + b"9" * 10_000),
    "a key twice in JSON": ("json", b'{"bf16": {"enabled": true}, "bf16": {"enabled": false}}'),
    "a key twice in YAML": ("yaml", b"precision: 16-mixed\nprecision: bf16-mixed\n"),
    "a key twice in TOML": ("toml", b"preset = 'float32'\npreset = 'float16'\n"),
    "many keys and one twice": ("json", ("{" + ",".join(f'"k{i}":1' for i in range(60_000)) + ',"k0":2}').encode()),
    "deep JSON lists": ("json", b'{"a":' + b"[" * NESTED + b"]" * NESTED + b"}"),
    "deep JSON tables": ("json", b'{"a":' * NESTED + b"1" + b"}" * NESTED),
    "deep YAML": ("yaml", b"a: " + b"[" * NESTED),
    "deep YAML tables": ("yaml", b"".join(b" " * i + b"a:\n" for i in range(900))),
    "deep TOML": ("toml", b"a = " + b"[" * NESTED + b"]" * NESTED),
    "deep TOML tables": ("toml", b"a = " + b"{b = " * 5000 + b"1" + b"}" * 5000),
    "a TOML key of many parts": ("toml", b"a." * NESTED + b"a = 1"),
    "a TOML header of many parts": ("toml", b"[" + b"a." * NESTED + b"a]"),
    "alias bomb": ("yaml", b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
        f"{chr(98 + i)}: &{chr(98 + i)} [{','.join([f'*{chr(97 + i)}'] * 9)}]\n".encode() for i in range(9))),
    "merge bomb": ("yaml", b"a: &a {k: 1}\n" + b"".join(
        f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join([f'*{chr(97 + i)}'] * 9)}]}}\n".encode() for i in range(9))),
    "an alias of itself": ("yaml", b"a: &a [*a]\n"),
    "an alias of nothing": ("yaml", b"a: *b\n"),
    "code in YAML": ("yaml", b"a: !!python/object/apply:os.system ['touch hacked']\n"),
    "code in YAML, as a name": ("yaml", b"a: !!python/name:os.system\n"),
    "an unknown tag": ("yaml", b"a: !mine {b: 1}\n"),
    "tags that do not fit": ("yaml", b"a: !!bool perhaps\n"),
    "an empty integer": ("yaml", b"a: !!int ''\n"),
    "no timestamp": ("yaml", b"a: !!timestamp soon\n"),
    "a date": ("yaml", b"compute_dtype: 2026-02-30\n"),
    "a date in TOML": ("toml", b"compute_dtype = 1979-05-27T07:32:00Z"),
    "a set": ("yaml", b"a: !!set {b, c}\n"),
    "binary": ("yaml", b"a: !!binary gIGC\n"),
    "pairs": ("yaml", b"a: !!pairs [b: 1]\n"),
    "base 60": ("yaml", b"a: 1" + b":1" * 200_000),
    "base 60 with a tag": ("yaml", b"a: !!int '1" + b":1" * 200_000 + b"'"),
    "keys that are no text": ("yaml", b"1: 2\ntrue: 3\n"),
    "a key that is a list": ("yaml", b"? [a, b]\n: 1\n"),
    "two documents": ("yaml", b"a: 1\n---\nb: 2\n"),
    "quotes without an end": ("json", b'"' + b'\\"' * 300_000),
    "a list at the top": ("json", b"[1, 2]"),
    "text at the top": ("yaml", b"bf16"),
    "a large file": ("json", b'{"a": "' + b"x" * 1_100_000 + b'"}'),
    "many values": ("json", b'{"a": [' + b"1," * 300_000 + b"1]}"),
    "blank lines like headers": ("toml", b'x = """\n' + (b"[" + b" " * 390 + b"\n") * 2000 + b'"""'),
    "many rules": ("toml", b"".join(b'[[rules]]\nmodule = "a%d"\ndtype = "float32"\n' % i for i in range(5000))),
    "many keys in a map": ("json", json.dumps({"class_name": "DTypePolicyMap", "config": {"default_policy": None, "policy_map": {
        f"a{i}": "float32" for i in range(8000)}}}).encode()),
    "a pattern that backtracks": ("toml", b'[[rules]]\nmodule = "' + b"**a" * 200 + b'"\ndtype = "float32"\n'),
    "another tool's nesting": ("json", b'{"trainer": {"trainer": {"precision": "16-mixed"}}}'),
    "tables where values belong": ("json", b'{"precision": {"a": 1}, "fp16": [], "bf16": {"enabled": {}}}'),
}  # fmt: skip

TOKENS = [
    b"\x00", b"\xff", b"\xef\xbb\xbf", b"\\ud800", b"NaN", b"Infinity", b"1e999", b"-0", b"9" * 400, b"null", b"~", b"[]", b"{}",
    b"true", b'"', b"'", b"[", b"]", b"{", b"}", b":", b",", b"=", b"&a ", b"*a", b"<<: ", b"!!python/object:os ", b"!!set ", b"? ",
    b"- ", b"\n", b"\t", b"\r", b"#", b'"""', b"\\", b"%", b"|\n", b">\n", b"---\n", b"...\n", b"0x1f", b"1:2:3", b"1_000",
    b"2020-01-01", b".inf", b"auto", b"16-mixed", b"float8_e4m3fn", b"mixed_float16", b"-1", b"2.5", b"65536", b"\xe2\x80\xa8",
]  # fmt: skip


def valid_files() -> list[tuple[str, bytes]]:
    """Kind and content of a valid file of every target and of our own, in every kind they are written as."""
    files = []
    for preset in PRESETS.values():
        policy = preset.with_(rules=[{"module": "head", "dtype": "float32"}])
        files += [(kind, policy_to_text(policy, kind).encode()) for kind in ("toml", "json", "yaml")]
        for target in list_targets():
            export = target.export(policy)
            files += [(kind, to_text(export, kind).encode()) for kind in target.kinds if kind != "text"]
    return files


def mutated(source: random.Random, files: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """A file with a few changes: bytes, tokens, cuts, repeats, splices with another, values and keys of another kind."""
    kind, content = source.choice(files)
    if source.random() < 0.3:
        return kind, _restructured(source, kind, content)
    data = bytearray(content)
    for _ in range(source.choice([1, 1, 2, 3, 8])):
        at = source.randrange(len(data) + 1)
        how = source.randrange(8)
        if how == 0 and data:
            data[at % len(data)] = source.randrange(256)
        elif how == 1:
            data[at:at] = source.choice(TOKENS)
        elif how == 2:
            del data[at : at + source.choice([1, 2, 10, 100])]
        elif how == 3:
            data[at:at] = data[at : at + source.choice([1, 10, 100])] * source.choice([1, 2, 30])
        elif how == 4:
            _, other = source.choice(files)
            cut = source.randrange(len(other) + 1)
            data[at:] = other[cut:]
        elif how == 5:
            end = at + source.choice([1, 4, 12])
            data[at:end] = source.choice(TOKENS)
        elif how == 6:
            data = bytearray(data.replace(*(source.choice(TOKENS) for _ in range(2)), 1))
        else:
            kind = source.choice(["toml", "json", "yaml", kind])
    return kind, bytes(data)


ODD = [
    None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**64, 10**400, 0.5, 1e308, float("inf"), float("nan"), "", "auto", "bf16",
    "fp16", "no", "float32", "float8_e5m2", "x" * 5000, "\x00", "é", [], [[]], [1, "a", None], {}, {"a": {}}, {"enabled": True},
    {"class_path": 1}, {"class_name": "DTypePolicy", "config": {}},
]  # fmt: skip


def _restructured(source: random.Random, kind: str, content: bytes) -> bytes:
    """A valid file whose values, keys or tables were exchanged; valid in its syntax, mostly."""
    load = {"json": json.loads, "yaml": yaml.safe_load, "toml": __import__("tomllib").loads}[kind]
    values = load(content.decode())
    for _ in range(source.choice([1, 1, 2, 4])):
        part, path = values, []
        while isinstance(part, dict) and part:
            key = source.choice(list(part))
            path.append((part, key))
            if not isinstance(part[key], dict) or source.random() < 0.3:
                break
            part = part[key]
        if not path:
            break
        holder, key = path[-1]
        how = source.randrange(5)
        if how == 0:
            del holder[key]
        elif how == 1:
            holder[source.choice(["enabled", "precision", "dtype", "config", "x" * 300, ""])] = holder.pop(key)
        elif how == 2:
            holder[key] = [holder[key]] * source.choice([1, 3])
        elif how == 3:
            holder[key] = {key: holder[key]}
        else:
            holder[key] = source.choice(ODD)
    try:
        if kind == "json":
            return json.dumps(values).encode()
        return (tomli_w.dumps(values) if kind == "toml" else yaml.safe_dump(values, sort_keys=False)).encode()
    except (TypeError, ValueError, UnicodeError, AttributeError):  # TOML has no null
        return content
