"""Round trips per second between two hosts: TCP, rsockets (librspreload), Thallus, and perftest's ib_write_lat, in turn in
one guest of scripts/rdma-vm --hosts 2. Emulation: only the ratios mean something. scripts/test-rdma rates runs it.

    rates.py LIBRARY ROUND_TRIPS-PROGRAM
"""

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SERVER = "10.0.0.2"
RSOCKETS = "/usr/lib/x86_64-linux-gnu/rsocket/librspreload.so"
TURNS = 5
LOOP_TURNS = 3
# Bytes, and rounds.
SIZES = [(8, 2000), (64 << 10, 200)]
# Bytes, rounds, and connections of one event loop on each side.
LOOP = [8, 100, 50]
DEADLINE = 120


def on(host: str, settings: dict[str, str], command: list[str]) -> list[str]:
    path = {"PATH": os.environ["PATH"]}
    return ["on", host, "env", "-i", *[f"{key}={value}" for key, value in (path | settings).items()], *command]


def round_trips(program: str, settings: dict[str, str], port: int, *load: int) -> float:
    numbers = [SERVER, str(port), *map(str, load)]
    server = subprocess.Popen(on("b", settings, [program, "serve", *numbers]))
    time.sleep(1)
    client = subprocess.run(on("a", settings, [program, "ask", *numbers]), capture_output=True, text=True, timeout=DEADLINE)
    if client.returncode != 0 or server.wait(DEADLINE) != 0:
        raise AssertionError(f"{settings}: {client.stderr}")
    return float(client.stdout)


def write_latency(size: int, rounds: int) -> float:
    """ib_write_lat tells half a round trip, in microseconds. Its round trips per second."""
    common = ["ib_write_lat", "-x", "1", "-s", str(size), "-n", str(rounds), "-F"]
    server = subprocess.Popen(on("b", {}, [*common, "-d", "rxe-b"]), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(1)
    shown = subprocess.run(on("a", {}, [*common, "-d", "rxe-a", SERVER]), capture_output=True, text=True, timeout=DEADLINE)
    server.wait(DEADLINE)
    lines = [line.split() for line in shown.stdout.splitlines() if line.split()[:1] == [str(size)]]
    if not lines:
        raise AssertionError(f"ib_write_lat: {shown.stdout}{shown.stderr}")
    # bytes, iterations, least, most, typical
    return 1e6 / (2 * float(lines[0][4]))


def verbs(folder: Path) -> int:
    files = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    return sum(file["upgraded"].get("verbs", 0) for file in files)


def main() -> None:
    library, program = sys.argv[1:]
    stats = Path(tempfile.mkdtemp(prefix="thallus-rates-"))
    peers = {"LD_PRELOAD": library, "THALLUS_PEERS": "10.0.0.0/24", "THALLUS_STATS": str(stats)}
    transports = {"TCP": {}, "rsockets": {"LD_PRELOAD": RSOCKETS}, "Thallus": peers}
    port = 7100
    print("round trips/s, median (least to most) of", TURNS)
    for size, rounds in SIZES:
        rates: dict[str, list[float]] = {}
        for _ in range(TURNS):
            for name, settings in transports.items():
                port += 1
                rates.setdefault(name, []).append(round_trips(program, settings, port, size, rounds))
            rates.setdefault("ib_write_lat", []).append(write_latency(size, rounds))
        middle = {name: statistics.median(found) for name, found in rates.items()}
        for name, found in rates.items():
            print(f"{size:6} B  {name:12}  {middle[name]:8.0f}  ({min(found):.0f} to {max(found):.0f})")
        print(f"{size:6} B  Thallus / rsockets {middle['Thallus'] / middle['rsockets']:.2f}, "
              f"latency / ib_write_lat {middle['ib_write_lat'] / middle['Thallus']:.2f}", flush=True)
    # rsockets has no epoll. Without spinning each message finds a sleeper.
    loops = {"TCP": {}, "Thallus": peers, "Thallus, which sleeps": {"THALLUS_SPIN_US": "0", **peers}}
    rates = {name: [] for name in loops}
    for _ in range(LOOP_TURNS):
        for name, settings in loops.items():
            port += 1
            rates[name].append(round_trips(program, settings, port, *LOOP))
    for name, found in rates.items():
        print(f"{LOOP[2]} connections in a loop  {name:21}  {statistics.median(found):8.0f}  ({min(found):.0f} to {max(found):.0f})", flush=True)
    wanted = 2 * TURNS * len(SIZES) + 2 * LOOP[2] * LOOP_TURNS * 2
    if verbs(stats) != wanted:
        sys.exit(f"{verbs(stats)} of {wanted} connections went over RDMA")
    shutil.rmtree(stats)


if __name__ == "__main__":
    main()
