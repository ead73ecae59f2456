"""tokio's own tests of TCP, from crates.io."""

import json
import os
import re
import shutil
from pathlib import Path

from apps.transports import Failed, call

from .suite import Suite, once
from .ways import run

VERSION = "1.54.1"

TESTS = [
    "tcp_accept",
    "tcp_accept_ready",
    "tcp_connect",
    "tcp_echo",
    "tcp_into_split",
    "tcp_into_std",
    "tcp_peek",
    "tcp_shutdown",
    "tcp_socket",
    "tcp_split",
    "tcp_stream",
    "net_bind_resource",
    "net_quickack",
]

SILENCE = 120

RESULT = re.compile(r"^test (\S+)(?: - should panic)? \.\.\. (\w+)", re.MULTILINE)


class Tokio(Suite):
    name = "tokio"

    def prepare(self, cache):
        self.folder = Path(cache) / "tokio" / VERSION
        once(self.folder, lambda: fetch(self.folder))
        names = [word for test in TESTS for word in ("--test", test)]
        environment = {**os.environ, "CARGO_TARGET_DIR": str(self.folder / "target")}
        options = ["--features", "full", "--no-run", "--message-format", "json", "-j2", "--quiet"]
        output = call(["cargo", "test", *options, *names], environment, timeout=1200, folder=self.folder / "source")
        built = [json.loads(line) for line in output.splitlines()]
        self.programs = {made["target"]["name"]: made["executable"] for made in built if made.get("executable")}

    def version(self):
        return f"tokio {VERSION}"

    def parts(self):
        return TESTS, []

    def run(self, part, way, folder, only=None):
        log = folder / "log"
        command = [self.programs[part], "--test-threads", "2"]
        status = run(way, [*command, *(["--exact", *sorted(only)] if only else [])], log, SILENCE)
        outcomes = dict(RESULT.findall(log.read_text(errors="replace")))
        if not outcomes:
            raise Failed(f"{part} ran no test: exit status {status}: {log}")
        return outcomes | {"(the run)": f"exit status {status}"} if not only else outcomes


def fetch(folder):
    """The crate's source, out of cargo's own cache."""
    call(["cargo", "init", "--quiet", "--vcs", "none", "--name", "fetched", folder])
    call(["cargo", "add", "--quiet", f"tokio@={VERSION}"], folder=folder)
    told = json.loads(call(["cargo", "metadata", "--format-version", "1"], folder=folder))
    (manifest,) = (package["manifest_path"] for package in told["packages"] if package["name"] == "tokio")
    shutil.copytree(Path(manifest).parent, folder / "source")
    # Or the folder above would be its workspace.
    (folder / "Cargo.toml").unlink()
