"""Real programs between two hosts over RDMA, in a guest of scripts/rdma-vm --hosts 2. scripts/test-rdma runs it.

    programs.py LIBRARY [NAME…]

Servers run on host b (10.0.0.2), clients on host a (10.0.0.1). Each check compares results with those of the same program
without the library, or with what it must be, and the counts of connections that left TCP and of those that did not.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SERVER = "10.0.0.2"
NOBODY = 65534
PEER = Path("/run/peer.py")
# What other users can read, too.
LIBRARY = "/run/libthallus_shim.so"
PYTHON = "/usr/bin/python3"
# Emulation is slow.
DEADLINE = 300


class Scene:
    """A folder, and what runs in it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.running: list[subprocess.Popen] = []

    def environment(self, shim: bool, name: str, **more: str) -> dict[str, str]:
        kept = {"PATH": os.environ["PATH"], "LANG": "C", **more}
        if shim:
            stats = self.folder / name
            stats.mkdir(exist_ok=True)
            stats.chmod(0o777)
            kept |= {"LD_PRELOAD": LIBRARY, "THALLUS_PEERS": "10.0.0.0/24", "THALLUS_STATS": str(stats)}
        return kept

    def on(self, host: str, command: list[str], shim: bool, name: str, user: int = 0, memlock: int | None = None,
           **more: str) -> list[str]:
        """The command that runs `command` on `host`, with the library alone preloaded into it."""
        settings = [f"{key}={value}" for key, value in self.environment(shim, name, **more).items()]
        prefix = ["prlimit", f"--memlock={memlock}:{memlock}"] if memlock is not None else []
        if user:
            prefix += ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups"]
        return ["on", host, *prefix, "env", "-i", *settings, *command]

    def run(self, host: str, command: list[str], shim: bool = True, name: str = "client", **how) -> str:
        """Runs a command to its end, which must be a good one. What it printed."""
        done = subprocess.run(self.on(host, command, shim, name, **how), capture_output=True, text=True,
                              timeout=DEADLINE, stdin=subprocess.DEVNULL)
        if done.returncode != 0:
            raise AssertionError(f"{command}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, host: str, command: list[str], shim: bool = True, name: str = "server", **how) -> subprocess.Popen:
        log = open(self.folder / f"{name}.log", "wb")
        process = subprocess.Popen(self.on(host, command, shim, name, **how), stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=log, text=True, bufsize=1)
        self.running.append(process)
        return process

    def stop(self, process: subprocess.Popen, how: int = signal.SIGTERM) -> None:
        process.send_signal(how)
        process.wait(DEADLINE)
        self.running.remove(process)

    def end(self) -> None:
        for process in self.running:
            process.kill()
            process.wait()

    def counts(self, name: str) -> tuple[Counter, Counter]:
        """Connections that left TCP, by fabric, and that did not, by reason."""
        upgraded, stayed = Counter(), Counter()
        for file in (self.folder / name).glob("*.json"):
            process = json.loads(file.read_text())
            upgraded.update(process["upgraded"])
            stayed.update(process["not_upgraded"])
        return upgraded, stayed

    def expect(self, name: str, verbs: int, stayed: dict[str, int] | None = None) -> None:
        """So many connections went over RDMA, and none but these `stayed`."""
        found = self.counts(name)
        wanted = (Counter({"verbs": verbs}) if verbs else Counter(), Counter(stayed or {}))
        if found != wanted:
            raise AssertionError(f"{name}: upgraded and not: {found}, expected {wanted}")


def wait_until(ready, what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not ready():
        if time.monotonic() > end:
            raise AssertionError(f"{what} is not ready")
        time.sleep(0.1)


def listens(port: int) -> bool:
    """Whether anyone listens on the port of host b: asked of the kernel, as a connection would be counted."""
    return bool(subprocess.run(["on", "b", "ss", "-Hltn", f"sport = :{port}"], capture_output=True, text=True,
                               check=True).stdout)


def resources() -> Counter:
    """Objects of RDMA devices in use: qp, cq, pd, mr and so on."""
    shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout
    found = Counter()
    for kind, number in re.findall(r"\b(pd|cq|qp|cm_id|mr|ctx|srq) (\d+)", shown):
        found[kind] += int(number)
    return found


def postgres(scene: Scene) -> None:
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    if not programs:
        raise AssertionError("PostgreSQL is not installed")
    here = str(programs[-1])
    data = scene.folder / "data"
    data.mkdir()
    os.chown(data, NOBODY, NOBODY)
    user = {"user": NOBODY}
    scene.run("b", [f"{here}/initdb", "-D", str(data), "-A", "trust", "-U", "postgres", "--no-sync"], shim=False, **user)
    server = scene.start("b", [f"{here}/postgres", "-D", str(data), "-c", f"listen_addresses={SERVER}", "-c", "fsync=off",
                               "-c", f"unix_socket_directories={data}"], **user)

    def ask(query: str, host: str = str(data), at: str = "b", **how) -> str:
        return scene.run(at, [f"{here}/psql", "-XAt", "-h", host, "-U", "postgres", "-c", query, "postgres"], **how)

    def ready() -> bool:
        with contextlib.suppress(AssertionError):
            return ask("select 1", shim=False) == "1\n"
        return False

    (data / "pg_hba.conf").write_text("local all all trust\nhost all all 10.0.0.0/24 trust\n")
    wait_until(ready, "postgres")
    subprocess.run(["on", "b", "kill", "-HUP", (data / "postmaster.pid").read_text().split()[0]], check=True)
    where = ["-h", SERVER, "-U", "postgres", "postgres"]
    off = {"PGSSLMODE": "disable", "PGGSSENCMODE": "disable"}
    scene.run("a", [f"{here}/pgbench", "-i", "-q", *where], name="init", **off)
    scene.run("a", [f"{here}/pgbench", "-n", "-c", "4", "-t", "25", *where], name="pgbench", **off)
    sums = "select (select sum(abalance) from pgbench_accounts), (select sum(bbalance) from pgbench_branches), " \
           "(select sum(tbalance) from pgbench_tellers), (select sum(delta) from pgbench_history), " \
           "(select count(*) from pgbench_history)"
    totals = ask(sums, shim=False).strip().split("|")
    assert len(set(totals[:4])) == 1 and totals[4] == "100", totals
    long = "select repeat(md5(i::text), 40) from generate_series(1, 1500) i"
    assert ask(long, SERVER, "a", name="psql", **off) == ask(long, shim=False), "psql prints something else"
    scene.stop(server, signal.SIGTERM)
    # Four clients, and one connection to ask for the scale.
    scene.expect("pgbench", 5)
    scene.expect("psql", 1)
    assert scene.counts("server")[0]["verbs"] == 5 + 1 + scene.counts("init")[0]["verbs"], scene.counts("server")


def redis(scene: Scene) -> None:
    server = scene.start("b", ["redis-server", "--bind", SERVER, "--save", "", "--protected-mode", "no"])
    wait_until(lambda: listens(6379), "redis-server")
    printed = scene.run("a", ["redis-benchmark", "-h", SERVER, "-t", "set,get", "-n", "2000", "-c", "10", "-d", "300", "-q"],
                        name="benchmark")
    assert printed.count("requests per second") == 2, printed
    commands = ["SET", "greeting", "hello"], ["GET", "greeting"], ["STRLEN", "key:__rand_int__"]
    answers = [scene.run("a", ["redis-cli", "-h", SERVER, *command], shim=False) for command in commands]
    assert answers == ["OK\n", "hello\n", "300\n"], answers
    scene.stop(server)
    upgraded, _ = scene.counts("benchmark")
    # Besides the ten of each test it makes one to ask for the configuration.
    assert upgraded["verbs"] >= 20 and set(upgraded) == {"verbs"}, upgraded


def iperf3(scene: Scene) -> None:
    server = scene.start("b", ["iperf3", "-s", "-1", "-B", SERVER])
    wait_until(lambda: listens(5201), "iperf3")
    report = json.loads(scene.run("a", ["iperf3", "-R", "-c", SERVER, "-n", "20M", "-J"]))
    sent, received = (report["end"][side]["bytes"] for side in ("sum_sent", "sum_received"))
    # Whoever receives stops counting when the other says that it has sent all.
    assert 20 << 20 <= sent >= received > 0, (sent, received)
    server.wait(DEADLINE)
    scene.expect("client", 2)
    scene.expect("server", 2)


def curl(scene: Scene) -> None:
    body = os.urandom(1 << 20) * 50
    (scene.folder / "served").mkdir()
    (scene.folder / "served" / "file").write_bytes(body)
    server = scene.start("b", [PYTHON, "-m", "http.server", "-b", SERVER, "-d", str(scene.folder / "served"), "8000"])
    wait_until(lambda: listens(8000), "http.server")
    got = scene.folder / "got"
    scene.run("a", ["curl", "-sS", "-o", str(got), f"http://{SERVER}:8000/file"])
    assert hashlib.sha256(got.read_bytes()).digest() == hashlib.sha256(body).digest(), "another file"
    scene.stop(server, signal.SIGINT)
    scene.expect("client", 1)


class Pair:
    """Two processes of peer.py."""

    def __init__(self, scene: Scene, shim: bool = True, port: int = 7000, **how):
        self.scene = scene
        peer = [PYTHON, str(PEER)]
        self.server = scene.start("b", [*peer, "serve", SERVER, str(port)], shim=shim)
        assert self.server.stdout.readline() == "listening\n"
        self.client = scene.start("a", [*peer, "ask", SERVER, str(port)], shim=shim, name="client", **how)

    def tell(self, command: str) -> None:
        self.client.stdin.write(command + "\n")

    def heard(self) -> str:
        return self.client.stdout.readline().strip()

    def do(self, *commands: str) -> None:
        for command in commands:
            self.tell(command)
            answer = self.heard()
            assert answer == "done", (command, answer, (self.scene.folder / "client.log").read_text())

    def end(self) -> None:
        self.tell("quit")
        self.client.wait(DEADLINE)
        self.scene.running.remove(self.client)
        self.scene.stop(self.server)


def leaks(scene: Scene) -> None:
    """200 connections one after the other, and 64 at once, in processes that live on."""
    before = resources()
    pair = Pair(scene)
    for _ in range(10):
        pair.do(*["open 20", "echo 100 6", "close"])
    wait_until(lambda: resources()["qp"] <= before["qp"], "the end of 200 connections")
    after = resources()
    pair.do("open 64", "echo 100 6")
    live = resources()
    assert live["qp"] - after["qp"] == 2 * 64, (after, live)
    pair.do("close")
    wait_until(lambda: resources() == after, f"as many objects as before, {after}; there are {resources()}: all")
    pair.end()
    wait_until(lambda: resources() == before, f"as many objects as at the start, {before}; there are {resources()}: all")
    scene.expect("client", 264)


def streaming(scene: Scene, shim: bool, port: int) -> Pair:
    """A pair in the middle of a stream that lasts longer than anybody waits for it."""
    pair = Pair(scene, shim, port=port)
    pair.do("open 1", "echo 100 10")
    pair.tell("stream 120")
    time.sleep(3)
    return pair


def killed(scene: Scene) -> None:
    """Either side is killed while both are busy."""
    before = resources()
    outcomes = {}
    for shim in (False, True):
        pair = streaming(scene, shim, port=7000 + shim)
        scene.stop(pair.server, signal.SIGKILL)
        outcomes[shim] = pair.heard()
        scene.stop(pair.client, signal.SIGKILL)
    # What the dead side had not read decides.
    assert set(outcomes.values()) <= {"end", "ECONNRESET", "EPIPE"}, outcomes
    pair = streaming(scene, True, port=7002)
    scene.stop(pair.client, signal.SIGKILL)
    # It serves on.
    other = scene.start("a", [PYTHON, str(PEER), "ask", SERVER, "7002"], name="other")
    pair.client = other
    pair.do("open 1", "echo 100 10", "close")
    pair.end()
    scene.expect("other", 1)
    wait_until(lambda: resources() == before, f"as many objects as before, {before}: all")


def unreachable(scene: Scene) -> None:
    """The other host is gone, without a word."""
    link = lambda state: subprocess.run(["on", "b", "ip", "link", "set", "eth0", state], check=True)
    outcomes = {}
    for shim in (False, True):
        pair = streaming(scene, shim, port=7010 + shim)
        link("down")
        outcomes[shim] = pair.heard()
        link("up")
        scene.stop(pair.client, signal.SIGTERM)
        scene.stop(pair.server, signal.SIGKILL)
    assert outcomes[True] == outcomes[False], outcomes


def memlock(scene: Scene) -> None:
    """An unprivileged client that may lock little memory, or hardly any."""
    for number, limit in enumerate([8 << 20, 1 << 20, 64 << 10]):
        name = f"{limit >> 10}-KiB"
        pair = Pair(scene, port=7020 + number, user=NOBODY, memlock=limit)
        pair.do("open 1", "echo 5000 20", "close")
        pair.end()
        upgraded, stayed = scene.counts("client")
        assert sum(upgraded.values()) + sum(stayed.values()) == 1, (upgraded, stayed)
        assert upgraded in (Counter(verbs=1), Counter()) and set(stayed) <= {"memlock"}, (upgraded, stayed)
        if limit >= 1 << 20:
            assert upgraded["verbs"] == 1, (name, stayed)
        print(f"   memlock {name}: {dict(upgraded) or dict(stayed)}", flush=True)
        for file in (scene.folder / "client").glob("*.json"):
            file.unlink()


CHECKS = [postgres, redis, iperf3, curl, leaks, killed, unreachable, memlock]


def main() -> int:
    names = {check.__name__: check for check in CHECKS}
    unknown = [name for name in sys.argv[2:] if name not in names]
    if unknown:
        print(f"there are: {' '.join(names)}", file=sys.stderr)
        return 2
    shutil.copy(sys.argv[1], LIBRARY)
    shutil.copy(Path(__file__).resolve().parent / "peer.py", PEER)
    failed = []
    for name in sys.argv[2:] or names:
        started = time.monotonic()
        folder = Path(tempfile.mkdtemp(prefix="thallus-rdma-"))
        folder.chmod(0o755)
        scene = Scene(folder)
        try:
            names[name](scene)
            outcome = "ok"
        except Exception as error:  # Each check reports; the others still run.
            outcome = f"FAILED\n{type(error).__name__}: {error}"
            for log in sorted(folder.glob("*.log")):
                outcome += f"\n--- {log.name}\n{log.read_text()[-3000:]}"
            failed.append(name)
        finally:
            scene.end()
            shutil.rmtree(folder, ignore_errors=True)
        print(f"{name} ({time.monotonic() - started:.0f} s): {outcome}", flush=True)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
