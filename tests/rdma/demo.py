"""demo-server on host b, demo-client on host a, over RDMA, in a guest of scripts/rdma-vm --hosts 2. scripts/test-rdma-demo runs it.

    demo.py RELEASE DATASET

RELEASE is the folder with both programs and the library, DATASET one with lineitem.parquet. Each transport must give the rows
that come without the library, over one queue pair, which must have carried most of the bytes. But for Flight: an HTTP/2 server
speaks first, so that its connections stay on TCP.
"""

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from programs import DEADLINE, LIBRARY, SERVER, Scene, wait_until

SQL = "FROM lineitem"
TRANSPORTS = ["auto", "pull", "scatter", "rpc", "ipc"]


class Demo:
    def __init__(self, scene: Scene, release: Path, dataset: Path):
        self.scene, self.release, self.dataset = scene, release, dataset

    def serve(self, shim: bool) -> subprocess.Popen:
        """The server, which listens for the scan protocol and Flight at ports of its own with the library and without."""
        self.ports = [7575 + 10 * shim, 7576 + 10 * shim]
        addresses = [f"{SERVER}:{port}" for port in self.ports]
        command = [str(self.release / "demo-server"), "--dataset", str(self.dataset), "--listen", addresses[0],
                   "--flight-listen", addresses[1]]
        server = self.scene.start("b", command, shim, f"server-{shim}")
        assert [server.stdout.readline().strip() for _ in addresses] == addresses
        return server

    def client(self, transport: str, times: int = 3) -> list[str]:
        address = f"{SERVER}:{self.ports[transport == 'flight']}"
        return [str(self.release / "demo-client"), "--connect", address, "--sql", SQL, "--transport", transport,
                "--summary", "--checksum", "--repeat", str(times)]

    def ask(self, transport: str, shim: bool) -> dict:
        return json.loads(self.scene.run("a", self.client(transport), shim, f"client-{transport}"))


def results(demo: Demo) -> None:
    """Equal rows by every transport, over RDMA."""
    server = demo.serve(shim=False)
    expected = demo.ask("rpc", shim=False)
    assert expected["rows"] > 50_000, expected
    demo.scene.stop(server)
    server = demo.serve(shim=True)
    for transport in [*TRANSPORTS, "flight"]:
        got = demo.ask(transport, shim=True)
        assert (got["rows"], got["checksum"]) == (expected["rows"], expected["checksum"]), (transport, got)
        # There is no memory to lend between hosts.
        assert got["borrowed"] == got["pulled"] == 0, got
        if transport == "flight":
            demo.scene.expect("client-flight", verbs=0, stayed={"peer-without-thallus": 1})
            continue
        demo.scene.expect(f"client-{transport}", verbs=1)
        [file] = [json.loads(path.read_text()) for path in (demo.scene.folder / f"client-{transport}").glob("*.json")]
        ring, tcp = file["ring_bytes_received"], file["tcp_bytes_received"]
        assert ring > tcp and ring + tcp > 3 * got["bytes"] / 2, (transport, file)
        print(f"   {transport}: {ring} bytes by RDMA, {tcp} by TCP; {got['bytes']} for each of 3 answers", flush=True)
    demo.scene.stop(server)
    upgraded, _ = demo.scene.counts("server-True")
    assert upgraded == {"verbs": len(TRANSPORTS)}, upgraded


def killed(demo: Demo) -> None:
    """A client that is killed while it reads: the server ends its query, and serves on."""
    server = demo.serve(shim=True)
    client = demo.scene.start("a", demo.client("scatter", times=100_000), True, "victim")
    log = demo.scene.folder / "server-True.log"
    wait_until(lambda: log.read_text().count("done; sent") >= 2, "the server's second answer")
    subprocess.run(["pkill", "-KILL", "-f", "^[^ ]*demo-client .*--repeat 100000"], check=True)
    client.wait(DEADLINE)
    demo.scene.running.remove(client)
    # How it ends depends on what was on its way; its session must, with no query left.
    wait_until(lambda: re.search(r"client 1: (?!cursor).*; 0 queries are running", log.read_text()),
               "the end of the killed client's session")
    assert demo.ask("scatter", shim=True)["rows"] > 50_000
    demo.scene.stop(server, signal.SIGTERM)


def main() -> int:
    release, dataset = map(Path, sys.argv[1:])
    shutil.copy(release / "libthallus_shim.so", LIBRARY)
    failed = False
    for check in [results, killed]:
        folder = Path(tempfile.mkdtemp(prefix="thallus-rdma-"))
        scene = Scene(folder)
        try:
            check(Demo(scene, release, dataset))
            outcome = "ok"
        except Exception as error:  # Each check reports; the others still run.
            outcome = f"FAILED\n{type(error).__name__}: {error}"
            for log in sorted(folder.glob("*.log")):
                outcome += f"\n--- {log.name}\n{log.read_text()[-3000:]}"
            failed = True
        finally:
            scene.end()
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{check.__name__}: {outcome}", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
