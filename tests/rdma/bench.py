"""`thallus bench verbs` between two hosts of scripts/rdma-vm --hosts 2: what it reports, and how it refuses.

    bench.py THALLUS rxe|siw
"""

import json
import os
import socket
import subprocess
import sys
import tempfile

SERVER = "10.0.0.2"
PORT = 18625
ROUNDS = 2
DEADLINE = 240
# Each with the bytes that a request carries of a message beyond its own: None if it carries nothing.
PATHS = {"tcp": None, "plain": None, "framed": None, "framed-inline": 8, "two-writes-inline": 4}
# Bytes that a request may carry: soft-RoCE has as many, Soft-iWARP has 80 and grants 64 after larger ones were refused.
INLINE = {"rxe": 512, "siw": 64}
SIZES = [64, 128, 184, 192, 200, 256, 424, 432, 504]


def on(host: str, command: list[str]) -> list[str]:
    return ["on", host, "env", "-i", f"PATH={os.environ['PATH']}", *command]


def check(condition: bool, what: object) -> None:
    if not condition:
        sys.exit(f"thallus bench verbs: {what}")


class Listener:
    """A server that waits for its client when this has been made."""

    def __init__(self, thallus: str, host: str, *address: str) -> None:
        command = on(host, [thallus, "bench", "verbs", "--listen", *address])
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.said = self.process.stderr.readline()
        check(self.said.startswith("waiting for"), self.said)

    def finish(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, said


def measure(thallus: str, device: str) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        file = os.path.join(folder, "report.json")
        server = Listener(thallus, "b")
        command = [thallus, "bench", "verbs", "--peer", SERVER, "--rounds", str(ROUNDS), "--seconds", "0.2", "--json", file]
        client = subprocess.run(on("a", command), capture_output=True, text=True, timeout=DEADLINE)
        status = server.finish()
        check(client.returncode == 0 and status == (0, ""), (client.returncode, client.stderr, status))
        with open(file, encoding="utf-8") as stream:
            report = json.load(stream)
    print(client.stdout)
    devices = [report[side]["device"]["name"] for side in ("client", "server")]
    check(devices == [f"{device}-a", f"{device}-b"], devices)
    check(all(report[side]["device"]["inline_bytes"] >= INLINE[device] for side in ("client", "server")), report["client"])
    measured = {(result["path"], result["bytes"]): result for result in report["results"]}
    wanted = {(path, 64) for path, more in PATHS.items() if more is None or 64 + more <= INLINE[device]}
    wanted |= {(path, size) for path in ("framed", "framed-inline") for size in SIZES if size + 8 <= INLINE[device]}
    check(wanted <= set(measured), wanted - set(measured))
    for name, result in measured.items():
        rates = result["rounds"]
        check(len(rates) == ROUNDS and min(rates) > 0, (name, rates))
        check(min(rates) <= result["median"] <= max(rates), (name, result))
    for shown in ["| TCP |", "| + inline |", *devices]:
        check(shown in client.stdout, f"{shown} is not shown")


def refuse(thallus: str, wanted: str, *, peer: str, listens: bool) -> None:
    server = Listener(thallus, "a", "127.0.0.1") if listens else None
    client = subprocess.run(on("a", [thallus, "bench", "verbs", "--peer", peer]), capture_output=True, text=True, timeout=DEADLINE)
    check(client.returncode == 1 and wanted in client.stderr and not client.stdout, (wanted, client))
    if server:
        status, said = server.finish()
        check(status == 1 and "left" in said, (status, said))


def mapped(address: str) -> list[int]:
    return [*bytes(10), 255, 255, *socket.inet_aton(address)]


def refuse_liar(thallus: str, wanted: str, *, seconds: float = 0.2, **lie: object) -> None:
    """A client on host a that says what can't be. Without a device, for the server does not get so far as to use it."""
    server = Listener(thallus, "b")
    introduction = {"number": 17, "psn": 1, "mtu": 3, "gid": mapped("10.0.0.1"), "manager": None}
    introduction |= {"inbox": 0, "inbox_key": 0, "ring": 64 << 10}
    hello = {"version": 1, "introduction": introduction | lie, "nonce": [0] * 16, "inline_bytes": 0}
    order = {"case": {"path": "tcp", "size": 64}, "seconds": seconds}
    with socket.create_connection((SERVER, PORT)) as connection, connection.makefile("rw") as lines:
        print(json.dumps({"hello": hello}), file=lines, flush=True)
        if lines.readline():
            with socket.create_connection((SERVER, PORT)):
                print(json.dumps({"measure": order}), file=lines, flush=True)
                lines.readline()
    status = server.finish()
    check(status[0] == 1 and wanted in status[1], (wanted, status))


def main() -> None:
    thallus, device = sys.argv[1:]
    measure(thallus, device)
    # iWARP's connection manager looks at neither, and lets no such client in.
    if device == "rxe":
        for lie in [{"mtu": 0}, {"number": 1 << 24}, {"psn": 1 << 24}, {"gid": mapped(SERVER)}]:
            refuse_liar(thallus, "(bad-offer)", **lie)
        refuse_liar(thallus, "nobody measures for", seconds=-1)
    refuse(thallus, "is thallus bench verbs --listen running there?", peer=SERVER, listens=False)
    # Of the addresses of a host with a device, one that no port has. iWARP has no GIDs by which that could be told.
    if device == "rxe":
        refuse(thallus, "no RDMA port has the address 127.0.0.1 (no-device)", peer="127.0.0.1", listens=True)
    for host in "ab":
        subprocess.run(on(host, ["rdma", "link", "delete", f"{device}-{host}"]), check=True)
    refuse(thallus, "there is no RDMA device on this host", peer=SERVER, listens=False)
    alone = subprocess.run(on("b", [thallus, "bench", "verbs", "--listen"]), capture_output=True, text=True, timeout=DEADLINE)
    check(alone.returncode == 1 and "there is no RDMA device on this host" in alone.stderr, alone)
    print("thallus bench verbs: measured and refused as it should")


if __name__ == "__main__":
    main()
