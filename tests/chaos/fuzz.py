"""A seeded fuzzer over every reader.

PYTHONPATH=tests:tests/results:tests/model python tests/chaos/fuzz.py --count 2000 --seed 0

Prints one line per failure, with the number that repeats it (--only), and JSON on its last line. Exit 1 if any failed.
"""

import argparse
import collections
import json
import random
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from damage import Damaged, damage
from readers import Reader, plain, readers

from draftlab.errors import UserError

FAILURES = ("traceback", "silent", "message")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one damaged file: refused, unchanged, changed to another good one, or one of FAILURES."""

    outcome: str
    detail: str = ""


class Fuzzer:
    """Good files of every kind, each damaged by the number of an input, the seed, and nothing else."""

    def __init__(self, root: Path, seed: int, only: Sequence[str] = ()) -> None:
        self.seed, self.readers = seed, [r for r in readers(root) if not only or r.name in only]
        self.good = {reader.name: plain(reader.read(reader.file)) for reader in self.readers}

    def input(self, number: int) -> tuple[Reader, Damaged]:
        reader, rng = self.readers[number % len(self.readers)], random.Random(f"{self.seed}:{number}")
        return reader, damage(reader.file.read_bytes(), reader.kind, rng)

    def judge(self, number: int) -> tuple[Reader, Damaged, Verdict]:
        reader, damaged = self.input(number)
        return reader, damaged, self.read(reader, damaged)

    def read(self, reader: Reader, damaged: Damaged) -> Verdict:
        """Read a damaged content in the place of the good one, which is put back."""
        content = reader.file.read_bytes()
        reader.file.write_bytes(damaged.content)
        try:
            value = plain(reader.read(reader.file))
        except UserError as error:
            return _message(str(error))
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            frame = traceback.extract_tb(error.__traceback__)[-1]
            text = " ".join(str(error).split())[:120]
            return Verdict("traceback", f"{type(error).__name__} {text} ({Path(frame.filename).name}:{frame.lineno})")
        finally:
            reader.file.write_bytes(content)
        if value == self.good[reader.name]:
            return Verdict("unchanged")
        return Verdict("silent" if damaged.certain or reader.checksum else "changed")


def _message(text: str) -> Verdict:
    """Judge a refusal: one line that a terminal shows as it is."""
    if not text.isprintable() or not 10 < len(text) < 1000:
        return Verdict("message", repr(text[:200]))
    return Verdict("refused", text)


def run(fuzzer: Fuzzer, numbers: Iterable[int], verbose: bool = False) -> dict[str, object]:
    """Judge inputs; print failures and return the counts."""
    counts, started = collections.Counter[str](), time.monotonic()
    for number in numbers:
        reader, damaged, verdict = fuzzer.judge(number)
        counts[verdict.outcome] += 1
        if verbose or verdict.outcome in FAILURES:
            print(f"{number}: {reader.name}, {damaged.name}: {verdict.outcome} {verdict.detail}", flush=True)
    order = ("refused", "unchanged", "changed", *FAILURES)
    return {
        "seed": fuzzer.seed, "inputs": counts.total(), **{name: counts[name] for name in order},
        "seconds": round(time.monotonic() - started, 1),
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description="Damage every kind of file and read it.")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--start", type=int, default=0, help="number of the first input")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", default="", help="names of those to try, by comma")
    parser.add_argument("--only", type=int, help="number of one input to repeat")
    parser.add_argument("--verbose", action="store_true")
    args = parser.parse_args()
    only = args.readers.split(",") if args.readers else []
    numbers = range(args.start, args.start + args.count) if args.only is None else [args.only]
    with tempfile.TemporaryDirectory() as root:
        result = run(Fuzzer(Path(root), args.seed, only), numbers, args.verbose or args.only is not None)
    print(json.dumps(result))
    return int(any(result[name] for name in FAILURES))


if __name__ == "__main__":
    sys.exit(main())
