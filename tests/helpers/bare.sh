#!/usr/bin/env bash
# The demo on a machine with nothing but a Python, then with a compiler too: bash tests/helpers/bare.sh PYTHON
#
# In a copy of the tree, with an empty environment: no git, no make, no home. Installs from the package registry, with
# what PIP_* says; some gigabytes of disk and twenty minutes.
set -euo pipefail
python=$("${1:?which Python?}" -c 'import sys; print(sys.executable)')
tree=$(cd "$(dirname "$0")/.." && pwd)
room=$(mktemp -d)
trap 'rm -rf "$room"' EXIT
mkdir "$room/tree" "$room/bin" "$room/home"
tar -C "$tree" --exclude=./.venv --exclude=./.git --exclude=./runs -cf - . | tar -C "$room/tree" -xf -
cd "$room/tree"

bare() {
    local kept
    mapfile -t kept < <(env | grep -E '^(PIP_[A-Z_]+|SSL_CERT_FILE|REQUESTS_CA_BUNDLE|https?_proxy)=' || true)
    env -i PATH="$room/bin" HOME="$room/home" OMP_NUM_THREADS=1 "${kept[@]}" "$@"
}

demo() { # MODE: runs the recipe and checks what it left
    bare .venv/bin/draftlab run quickstart 2>&1 | tee "$room/log"
    ! grep -q Traceback "$room/log"
    bare .venv/bin/python - "$1" <<'END'
import json, pathlib, sys
scores = [json.loads(file.read_text()) for file in pathlib.Path("runs/quickstart/score").glob("*/score.json")]
assert len(scores) == 4 and {score["conditions"]["mode"] for score in scores} == set(sys.argv[1:]), "mode"
records = [json.loads(file.read_text()) for file in pathlib.Path("runs").rglob("draftlab.json")]
assert len(records) == 6 and not any("git" in record["versions"] for record in records), "records"
assert pathlib.Path("runs/quickstart/report/report.html").stat().st_size > 10_000
END
}

bare "$python" -m venv .venv
bare .venv/bin/pip install -q -c constraints.txt torch
bare .venv/bin/pip install -q -c constraints.txt -e .
demo eager
grep -q "mode eager, .*: mode native needs a C++ compiler" "$room/log"
for tool in c++ as ld; do ln -s "$(readlink -f "$(command -v "$tool")")" "$room/bin/$tool"; done
rm -r runs/quickstart/score runs/quickstart/report
demo native
echo "bare: the demo ran without git and make, eagerly without a compiler, natively with one"
