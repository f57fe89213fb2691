"""Servers started here for as long as a block lasts: vLLM and llama.cpp's llama-server. No torch."""

import contextlib
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import httpx

from draftlab.console import heartbeat
from draftlab.errors import UserError
from draftlab.servers.client import SILENT_SECONDS, Server

START_SECONDS = 1800
STOP_SECONDS = 60
HOST = "127.0.0.1"


@contextlib.contextmanager
def running(
    command: Sequence[object], environ: Mapping[str, str] | None = None
) -> Iterator[tuple[Server, subprocess.Popen[bytes]]]:
    """Start a server on a free port, and yield its client and its process; it ends with the block.

    command: without host and port.

    Raises:
        UserError: it does not start.
    """
    with socket.socket() as free:
        free.bind((HOST, 0))
        port = free.getsockname()[1]
    words = [str(word) for word in (*command, "--host", HOST, "--port", port)]
    with tempfile.TemporaryFile("w+") as log:
        try:
            process = subprocess.Popen(words, stdout=log, stderr=log, env=environ)
        except OSError as error:
            raise UserError(f"{words[0]} cannot be run: {error.strerror}") from None
        name = Path(words[0]).name
        try:
            with heartbeat(f"waiting for {name} to start", SILENT_SECONDS):
                _wait_for(f"http://{HOST}:{port}/health", process, log, name)
            yield Server.connect(f"http://{HOST}:{port}", workers=1), process
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_SECONDS)
            process.kill()
            process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: IO[str], name: str) -> None:
    for _ in range(START_SECONDS):
        if process.poll() is not None:
            log.seek(0)
            raise UserError(f"{name} did not start: {reason(log.read())}")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(url, timeout=10).status_code == 200:
                return
        time.sleep(1)
    raise UserError(f"{name} did not start within {START_SECONDS} s")


def reason(log: str) -> str:
    """Return the line of a server's log that says why it ended: vLLM repeats the cause's error as its own."""
    errors = [line.strip() for line in log.splitlines() if "rror" in line]
    causes = [line for line in errors if not any(text in line for text in ENVELOPES)]
    return ((causes or errors or ["it printed no error"])[-1])[-300:]


ENVELOPES = ("Engine core initialization failed", "EngineCore failed", "See root cause above")
