"""Damage to the bytes, values and tensors of files, by a seeded random generator."""

import json
import random
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml


@dataclass(frozen=True, slots=True)
class Damaged:
    """A damaged content. certain: Whether the file is invalid, so that a command must not use it."""

    name: str
    content: bytes
    certain: bool


def damage(content: bytes, kind: str, rng: random.Random) -> Damaged:
    """Return a content with one damage. kind: json, jsonl, yaml, tensors, text or binary."""
    trees = {"json": of_values, "jsonl": of_line, "yaml": of_values}
    if kind in trees and rng.random() < 0.65:
        return trees[kind](content, kind, rng)
    if kind == "tensors" and rng.random() < 0.75:
        return of_tensors(content, rng)
    return of_bytes(content, kind, rng)


def of_bytes(content: bytes, kind: str, rng: random.Random) -> Damaged:
    whole = kind in ("json", "tensors", "binary")
    at = rng.randrange(len(content))
    name = rng.choice(["cut", "cut", "flip", "flip", "noise", "empty", "foreign"])
    if name == "cut":
        return Damaged(name, content[:at], whole)
    if name == "empty":
        return Damaged(name, b"", kind != "text")
    damaged = bytearray(content)
    if name == "flip":
        for _ in range(rng.choice([1, 1, 2, 8])):
            damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    elif name == "noise":
        damaged[at:at] = rng.randbytes(rng.choice([1, 16, 256]))
    else:
        damaged[at:at] = b"\xff\xfe"  # invalid in UTF-8
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
            [
                "-1",
                "0",
                "1" + "0" * 12,
                "1" + "0" * 30,
                "-" + "9" * 25,
                "1.0e300",
                "2147483648",
                "4294967296",
            ]
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
    floats = [name for name in names if header[name]["dtype"] in WIDTHS and header[name]["data_offsets"][1]]
    entry = header[rng.choice(names)]
    name = rng.choice(["nan", "nan", "dtype", "shape", "overlap", "beyond", "drop", "length"])
    if name == "nan" and floats:
        entry = header[rng.choice(floats)]
        width = WIDTHS[entry["dtype"]]
        start, end = entry["data_offsets"]
        at = start + width * rng.randrange((end - start) // width)
        body[at : at + width] = b"\xff" * width
    elif name == "dtype":
        entry["dtype"] = rng.choice([dtype for dtype in ("I32", "F64", "X9", "BOOL") if dtype != entry["dtype"]])
    elif name == "shape":
        entry["shape"] = rng.choice([[*entry["shape"], 2], [10**12, *entry["shape"][1:]]])
    elif name in ("overlap", "beyond"):
        by = 1 if name == "overlap" else 10**9
        entry["data_offsets"] = [offset + by for offset in entry["data_offsets"]]
    else:
        del header[rng.choice(names)]
    text = json.dumps(header).encode()
    length = len(text) if name != "length" else rng.choice([0, 1, 10**6, 1 << 40, (1 << 64) - 1])
    return Damaged(name, struct.pack("<Q", length) + text + bytes(body), True)


WIDTHS = {"F32": 4, "F16": 2, "BF16": 2}  # bytes; all ones are NaN


def _places(tree: Any) -> Any:
    """Yield every container with each of its keys."""
    for at in tree if isinstance(tree, dict) else range(len(tree)) if isinstance(tree, list) else ():
        yield tree, at
        yield from _places(tree[at])


def _dump(tree: Any) -> str:
    return json.dumps(tree, default=str)
