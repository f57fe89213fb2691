"""Damage to files, by a seeded random generator: of their bytes, of their values, and of their tensors."""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Damaged:
    """A damaged content. certain: it is no file of its kind any more, so that reading the same from it is an error."""

    name: str
    content: bytes
    certain: bool


def damage(content: bytes, kind: str, rng: random.Random) -> Damaged:
    """Return a content with one kind of damage. kind: json, jsonl, yaml, tensors, text or binary."""
    trees = {"json": of_values, "jsonl": of_line, "yaml": of_values}
    if kind in trees and rng.random() < 0.65:
        return trees[kind](content, kind, rng)
    if kind == "tensors" and rng.random() < 0.75:
        return of_tensors(content, rng)
    return of_bytes(content, kind, rng)


def of_bytes(content: bytes, kind: str, rng: random.Random) -> Damaged:
    whole = kind in ("json", "tensors", "binary")
    at = rng.randrange(len(content))
    name = rng.choice(["cut", "cut", "flip", "flip", "flip", "zeros", "noise", "empty", "foreign", "twice"])
    if name == "cut":
        return Damaged(name, content[:at], whole)
    if name == "empty":
        return Damaged(name, b"", kind != "text")
    if name == "twice":
        return Damaged(name, content + content, whole)
    damaged = bytearray(content)
    if name == "flip":
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    elif name == "zeros":
        damaged[at : at + 64] = bytes(len(damaged[at : at + 64]))
    elif name == "noise":
        damaged[at:at] = rng.randbytes(rng.choice([1, 16, 256]))
    else:
        damaged[at:at] = b"\xff\xfe"  # in no UTF-8
    return Damaged(name, bytes(damaged), name == "foreign" and kind in ("json", "jsonl", "yaml"))


def of_line(content: bytes, kind: str, rng: random.Random) -> Damaged:
    """Damage the values of one line."""
    lines = content.splitlines(keepends=True)
    number = rng.randrange(len(lines))
    damaged = of_values(lines[number], "json", rng)
    lines[number] = damaged.content.replace(b"\n", b" ") + b"\n"
    return Damaged(damaged.name, b"".join(lines), damaged.certain)


def of_values(content: bytes, kind: str, rng: random.Random) -> Damaged:
    """Damage one value of a JSON or YAML document."""
    tree = yaml.safe_load(content) if kind == "yaml" else json.loads(content)
    places = list(_places(tree))
    numbers = [p for p in places if type(p[0][p[1]]) in (int, float)]
    name = rng.choice(["type", "type", "remove", "remove", "number", "number", "null", "nan", "text"])
    parent, at = rng.choice(numbers if name in ("number", "nan") and numbers else places) if places else ([tree], 0)
    if name == "remove" and isinstance(parent, dict):
        del parent[at]
        return Damaged(name, _dump(tree).encode(), False)
    mark = "\ue000mark\ue000"
    values: dict[str, Callable[[], str]] = {
        "type": lambda: rng.choice(['{"x": []}', "[[]]", '"x"', "true", "[1, null]", "{}", "1.5", '""']),
        "number": lambda: rng.choice(
            ["-1", "0", "1" + "0" * 12, "1" + "0" * 30, "-" + "9" * 25, "1.0e300", "2147483648", "4294967296"]
        ),
        "null": lambda: "null",
        "nan": lambda: ".nan" if kind == "yaml" else "NaN",
        "text": lambda: json.dumps("\u001b[31mred\n\u0000\u202e$(touch x)"),
    }
    value = values.get(name, values["type"])()
    parent[at] = mark
    text = _dump(tree).replace(json.dumps(mark), value, 1)
    return Damaged(name, text.encode(), name == "nan" and kind != "yaml")


def of_tensors(content: bytes, rng: random.Random) -> Damaged:
    """Damage the header or the values of a safetensors file."""
    size = struct.unpack("<Q", content[:8])[0]
    header, body = json.loads(content[8 : 8 + size]), bytearray(content[8 + size :])
    names = [name for name in header if name != "__metadata__"]
    one, other = rng.choice(names), rng.choice(names)
    entry = header[one]
    name = rng.choice(["nan", "nan", "inf", "dtype", "shape", "huge", "overlap", "beyond", "drop", "rename", "length"])
    floats = [n for n in names if header[n]["dtype"] in VALUES and header[n]["data_offsets"][1]]
    if name in ("nan", "inf") and floats:
        entry = header[rng.choice(floats)]
        value = VALUES[entry["dtype"]][name]
        start, end = entry["data_offsets"]
        at = start + len(value) * rng.randrange((end - start) // len(value))
        body[at : at + len(value)] = value
    elif name == "dtype":
        entry["dtype"] = rng.choice([d for d in ("I32", "F64", "U8", "F8_E4M3", "X9", "BOOL") if d != entry["dtype"]])
    elif name == "shape":
        entry["shape"] = [*entry["shape"], 2] if rng.random() < 0.5 else [7, *entry["shape"][1:]]
    elif name == "huge":
        entry["shape"] = [10**12, *entry["shape"][1:]]
    elif name == "overlap":
        length = entry["data_offsets"][1] - entry["data_offsets"][0]
        entry["data_offsets"] = [1, 1 + length] if one == other else header[other]["data_offsets"]
        entry["shape"] = [*entry["shape"], 1] if one == other else header[other]["shape"]
    elif name == "beyond":
        entry["data_offsets"] = [entry["data_offsets"][0], entry["data_offsets"][1] + 10**9]
    elif name == "drop":
        del header[one]
    elif name == "rename":
        header[one + ".x"] = header.pop(one)
    text = json.dumps(header).encode()
    length = len(text) if name != "length" else rng.choice([0, 1, 10**6, 1 << 40, (1 << 64) - 1])
    return Damaged(name, struct.pack("<Q", length) + text + bytes(body), True)


VALUES = {
    "F32": {"nan": struct.pack("<f", float("nan")), "inf": struct.pack("<f", float("inf"))},
    "F16": {"nan": b"\x00\x7e", "inf": b"\x00\x7c"},
    "BF16": {"nan": b"\xc0\x7f", "inf": b"\x80\x7f"},
}


def _places(tree: Any) -> Any:
    """Yield every container with every place in it."""
    for at in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, at
        yield from _places(tree[at])


def _dump(tree: Any) -> str:
    return json.dumps(tree, default=str)
