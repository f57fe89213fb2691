"""Scripts behind every performance claim: python -m benchmarks.NAME prints one JSON object on its last line."""

import platform

from draftlab import provenance


def environment(threads: int) -> dict[str, object]:
    """The machine and the versions that a result comes from."""
    return {"threads": threads, "machine": platform.platform(), "versions": provenance.versions()}
