"""benchmarks/gpu.sh runs every part with small shapes on whatever device there is."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PARTS = {"ceilings", "sweep", "target", "drafts", "engine", "loss", "masks"}


def test_the_script_is_sound():
    subprocess.run(["bash", "-n", str(ROOT / "benchmarks" / "gpu.sh")], check=True)


@pytest.mark.slow
def test_every_part_writes_its_json(tmp_path):
    subprocess.run(["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--small", "--out", str(tmp_path)], check=True)
    found = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    lengths = {f"predict_{length}" for length in ("2", "2.5", "3", "3.5", "4")}
    assert set(found) == PARTS | lengths
    assert len(found["sweep"]["rows"]["eager"]) == 3
    for name in lengths:
        assert [p["name"].split(",")[0] for p in found[name]["predictions"]] == ["tiny-3x256", "tiny-12x128"]
