"""What the benchmark has to reach, as ratios to TCP in the same placement unless it says otherwise."""

from dataclasses import dataclass

from .series import markdown
from .transports import CLIENT_ONLY, SERVER_ONLY, THALLUS, UNIX

KIB = 1024

BARE = "bare"
"""How `thallus bench` names a ring without anything around it, which is no transport of the applications."""


@dataclass
class Target:
    what: str
    bound: float
    measured: float = None
    """None: not measured, or not claimed because the connections were not upgraded."""
    unit: str = "×"
    at_most: bool = False

    def verdict(self):
        if self.measured is None:
            return "not claimed"
        reached = self.measured < self.bound if self.at_most else self.measured >= self.bound
        return "reached" if reached else "missed"

    def show(self, value):
        if value is None:
            return "–"
        if self.at_most:
            return f"{value:.0f} {self.unit}"
        # Below one it is about a loss of some percent.
        return f"{value:.{3 if self.bound < 1 else 2}f}{self.unit}"

    def row(self):
        sign = "under" if self.at_most else "at least"
        return [self.what, f"{sign} {self.show(self.bound)}", self.show(self.measured), self.verdict()]

    def as_json(self):
        return {"what": self.what, "bound": self.bound, "measured": self.measured, "verdict": self.verdict()}


def table(targets):
    return markdown(["target", "", "measured", ""], [target.row() for target in targets], right=(1, 2))


def of_sockets(results):
    """`results`: what `thallus bench --json` wrote. Targets on workloads that it did not measure are left out."""
    measured = {result["name"]: result["transports"] for result in results["results"]}

    def ratio(name, transport=THALLUS):
        return measured[name].get(transport.name, {}).get("ratio_to_tcp")

    def one_sided(name):
        sides = [ratio(name, side) for side in (CLIENT_ONLY, SERVER_ONLY)]
        return None if None in sides else min(sides)

    targets = []
    for what, name, bound in (
        ("64 B ping-pong, two cores, blocking", "ping-pong/64/blocking/cores", 150),
        ("64 B ping-pong, two cores, poll", "ping-pong/64/poll/cores", 120),
        ("64 B ping-pong, two cores, epoll", "ping-pong/64/epoll/cores", 120),
        ("64 B ping-pong, two cores, 50 connections in one epoll loop", "ping-pong/64/epoll-50/cores", 10),
        ("64 B ping-pong, one core, blocking", "ping-pong/64/blocking/one-core", 1.5),
        ("64 B ping-pong, one core, poll", "ping-pong/64/poll/one-core", 1.5),
        ("64 B ping-pong, one core, epoll", "ping-pong/64/epoll/one-core", 1.5),
        ("stream from one 64 KiB buffer, two cores", "stream/64KiB/cores", 6),
        ("stream over 64 MiB of memory, two cores", "stream/64MiB/cores", 2.5),
        ("one request per connection, two cores", "connect/64/cores", 0.95),
        ("one request per connection, one core", "connect/64/one-core", 0.95),
        ("one request per connection, unpinned", "connect/64/unpinned", 0.95),
    ):
        if name in measured:
            targets.append(Target(what, bound, ratio(name)))
    for what, name, bound in (
        ("64 B ping-pong, two cores, share of a bare ring", "ping-pong/64/blocking/cores", 0.5),
        ("stream from one 64 KiB buffer, two cores, share of a bare ring", "stream/64KiB/cores", 0.85),
    ):
        if BARE in measured.get(name, {}):
            # Not claimed beside TCP: not claimed beside anything.
            of_bare = ratio(name) and measured[name][THALLUS.name]["median"] / measured[name][BARE]["median"]
            targets.append(Target(what, bound, of_bare))
    for what, name in (
        ("a peer without it, 64 B ping-pong, two cores", "one-sided/ping-pong/64/blocking/cores"),
        ("a peer without it, 64 B ping-pong, one core", "one-sided/ping-pong/64/blocking/one-core"),
        ("a peer without it, 50 connections, one core", "one-sided/ping-pong/64/epoll-50/one-core"),
        ("a peer without it, stream, two cores", "one-sided/stream/64KiB/cores"),
        ("a peer without it, one request per connection, one core", "one-sided/connect/64/one-core"),
    ):
        if name in measured:
            targets.append(Target(what + " (worse side)", 0.97, one_sided(name)))
    if "idle/200/unpinned" in measured:
        idle = measured["idle/200/unpinned"].get(THALLUS.name, {})
        upgraded = idle.get("ratio_to_tcp") is not None
        resident = idle["median"] / KIB if upgraded else None
        targets.append(Target("an idle upgraded connection, both sides", 64, resident, "KiB", at_most=True))
    return targets


def of_applications(workloads):
    """`workloads`: name → Workload. Targets on those that were not measured are left out."""
    targets = []
    for name, bound in (
        ("pgbench -S -M prepared -c1", 8),
        ("pgbench TPC-B -c1", 5),
        ("pgbench -S -M prepared -c8", 1.1),
        ("replay through psql", 1.55),
        ("Redis GET -c1", 5),
        ("Redis GET -c50", 1.3),
        ("Redis GET -c1, one request per connection", 0.95),
        ("pgbench -S -c1, one transaction per connection", 0.95),
    ):
        if name in workloads:
            targets.append(Target(f"{name}, unpinned", bound, workloads[name].ratio(THALLUS)))
    if eight := workloads.get("pgbench -S -M prepared -c8"):
        to_unix = eight.median(THALLUS) / eight.median(UNIX) if eight.was_upgraded() else None
        targets.append(Target(f"{eight.name}, unpinned, over a Unix socket", 1, to_unix))
    for name in ("one core, pgbench -S -M prepared -c1", "one core, Redis GET -c1"):
        if name not in workloads:
            continue
        worse = min(workloads[name].ratio(side) for side in (CLIENT_ONLY, SERVER_ONLY))
        targets.append(Target(f"a peer without it, {name} (worse side)", 0.97, worse))
    return targets


def of_processes(start_up, memory):
    """What a program pays that has no connection at all."""
    return [
        Target("start-up time of /bin/true", 0.97, start_up["true"]["ratio"]),
        Target("memory of an idle process", 1024, memory["rss_growth"] / KIB, "KiB", at_most=True),
    ]
