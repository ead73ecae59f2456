"""Services of systemd with the units of Debian's packages and README's additions to them, in a guest of scripts/rdma-vm: a systemd of its own,
in namespaces, starts redis-server, memcached and PostgreSQL.

    services.py LIBRARY THALLUS README
"""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

LIBRARY = "/usr/local/lib/thallus/libthallus_shim.so"
THALLUS = "/usr/local/bin/thallus"
UNITS = Path("/etc/systemd/system")
OUTPUT = Path("/var/tmp/thallus-services")
DEADLINE = 240
# Of all together: some two minutes on a quiet machine.
LIMIT = 900
REDIS, MEMCACHED = ("redis-server", 6379, b"PING\r\n", b"+PONG\r\n"), ("memcached", 11211, b"mn\r\n", b"MN\r\n")

TEST = f"""[Unit]
DefaultDependencies=no
[Service]
Type=oneshot
ExecStart=/usr/bin/python3 {__file__} within
StandardOutput=file:{OUTPUT}
StandardError=inherit
TimeoutStartSec={LIMIT}
"""


def addition() -> list[str]:
    """The lines of README's file for Redis, behind [Service]."""
    [block] = re.findall(r"```ini\n\[Service\]\n(.*?)```", (UNITS / "README.md").read_text(), re.DOTALL)
    return block.splitlines()


def ask(port: int, question: bytes, answer: bytes) -> None:
    """A connection that is long enough to leave TCP. Prints its port, and keeps it until standard input ends."""
    with socket.create_connection(("127.0.0.1", port)) as connection:
        for _ in range(64):
            connection.sendall(question)
            assert connection.recv(64) == answer
        print(connection.getsockname()[1], flush=True)
        sys.stdin.read()
        connection.sendall(question)
        assert connection.recv(64) == answer


def meet(service: tuple, user: str) -> str:
    """Has `user` connect: the fabric of the server's end, or its reason. Empty if the server does not have the library."""
    name, port, *words = service
    client = ["setpriv", "--reuid", user, "--clear-groups", "env", f"LD_PRELOAD={LIBRARY}", "python3", __file__, "ask", str(port)]
    client = subprocess.Popen([*client, *(word.decode() for word in words)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    own = client.stdout.readline().strip()
    status = json.loads(subprocess.run([THALLUS, "status", "--json"], check=True, stdout=subprocess.PIPE).stdout)
    client.communicate(timeout=DEADLINE)
    assert client.returncode == 0, f"{name} did not answer as it should"
    ends = [end for end in status["connections"] if end["command"].startswith(name) and end["peer"].endswith(f":{own}")]
    assert len(ends) <= 1, ends
    return "".join(end["reason"] or end["fabric"] for end in ends)


def meet_postgres() -> dict[str, str]:
    """The fabrics, or reasons, of both ends of a connection of psql's over the Unix socket, by command."""
    [cluster] = Path("/etc/postgresql").glob("*/main")
    # What starts the server replaces its environment.
    with (cluster / "environment").open("a") as environment:
        environment.write(f"LD_PRELOAD = '{LIBRARY}'\n")
    restart(f"postgresql@{cluster.parent.name}-main", [])
    client = ["setpriv", "--reuid", "postgres", "--regid", "postgres", "--init-groups", "env", f"LD_PRELOAD={LIBRARY}", "psql", "-X", "-q", "-t"]
    questions = "select 'answer';\n" * 64 + f"\\! {THALLUS} status --json\n"
    output = subprocess.run(client, input=questions, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE).stdout
    answers, _, status = output.partition("{")
    assert answers.split() == ["answer"] * 64, answers
    ends = json.loads("{" + status)["connections"]
    return {re.match(r"\w+", end["command"])[0]: end["reason"] or end["fabric"] for end in ends}


def restart(unit: str, lines: list[str]) -> None:
    """Starts it anew with these lines in its [Service]."""
    folder = UNITS / f"{unit}.service.d"
    folder.mkdir(exist_ok=True)
    (folder / "thallus.conf").write_text("\n".join(["[Unit]", "DefaultDependencies=no", "[Service]", *lines, ""]))
    subprocess.run(["systemctl", "daemon-reload"], check=True)
    subprocess.run(["systemctl", "restart", unit], check=True)


def start(service: tuple, lines: list[str]) -> None:
    """Starts it anew with these lines in its [Service], and waits for it."""
    name, port, *_ = service
    restart(name, lines)
    end = time.monotonic() + DEADLINE
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < end, f"{name} does not listen"
            time.sleep(0.1)


def within() -> None:
    def of(*names: str) -> list[str]:
        return [line for line in addition() if line.partition("=")[0] in names]

    def seen(service: tuple, lines: list[str], user: str, expected: str) -> None:
        start(service, lines)
        found = meet(service, user)
        print(f"{service[0]}, {user}, {', '.join(lines)}: {found or 'not there'}", flush=True)
        assert found == expected, expected

    seen(REDIS, of("Environment"), "root", "")
    seen(REDIS, of("Environment", "ExecPaths"), "root", "no-diag")
    seen(REDIS, of("Environment", "ExecPaths", "RestrictAddressFamilies"), "root", "shm")
    seen(REDIS, of("Environment", "ExecPaths", "RestrictAddressFamilies"), "nobody", "not-owner")
    seen(REDIS, addition(), "nobody", "shm")
    seen(MEMCACHED, of("Environment"), "nobody", "no-diag")
    seen(MEMCACHED, of("Environment", "RestrictAddressFamilies"), "nobody", "shm")
    found = meet_postgres()
    print(f"PostgreSQL over its Unix socket: {found}", flush=True)
    assert found == {"psql": "shm", "postgres": "shm"}
    print("services: as README says", flush=True)


def main(library: str, thallus: str, readme: str) -> None:
    for source, target in [(library, LIBRARY), (thallus, THALLUS), (readme, UNITS / "README.md")]:
        Path(target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, target)
    (UNITS / "thallus-test.service").write_text(TEST)
    OUTPUT.touch()
    subprocess.run(["mount", "-t", "cgroup2", "none", "/sys/fs/cgroup"], check=True)
    own = ["unshare", "--fork", "--pid", "--kill-child", "--mount", "--mount-proc"]
    systemd = ["/lib/systemd/systemd", "--system", "--unit=thallus-test.service", "--log-target=console", "--log-level=warning"]
    environment = {"container": "lxc", "PATH": os.environ["PATH"]}
    running = subprocess.Popen([*own, *systemd], env=environment, stdin=subprocess.DEVNULL)
    end = time.monotonic() + LIMIT
    while not re.search(r"^(services: as README says|\w*Error.*)$", text := OUTPUT.read_text(), re.MULTILINE):
        assert running.poll() is None and time.monotonic() < end, f"systemd does not come to an end: {text}"
        time.sleep(1)
    running.kill()
    print(text, end="")
    assert text.endswith("services: as README says\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["within"]:
            within()
        case ["ask", port, question, answer]:
            ask(int(port), question.encode(), answer.encode())
        case [library, thallus, readme]:
            main(library, thallus, readme)
