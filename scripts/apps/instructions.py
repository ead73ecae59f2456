"""scripts/count-instructions: what the calls that programs make most cost in instructions, counted one by one (hot_paths.c)."""

import argparse
import json
import os
import re
import sys
import tempfile
from pathlib import Path

from .series import markdown, tell
from .servers import Folder
from .transports import Failed, Library, call

PROGRAM = Path(__file__).parent / "hot_paths.c"
RECORDED = Path(__file__).parents[2] / "docs" / "performance.md"
BEGIN, END = "<!-- INSTRUCTIONS -->", "<!-- /INSTRUCTIONS -->"

GROWTH = 1.10
"""More than so many times the recorded count has grown. The compiler decides about some percent."""

SLACK = 10
"""Instructions that do not count as growth, however few there were."""

WAYS = {
    "without it": {},
    "on TCP": {"THALLUS_FABRIC": "off"},
    "still on TCP": {"THALLUS_UPGRADE_AFTER": "1000000"},
    "upgraded": {},
}
"""And their settings. «Still on TCP» is a connection that leaves TCP as soon as its peer can."""

CONNECTIONS = 10_000


def parse():
    parser = argparse.ArgumentParser(prog="scripts/count-instructions", description=__doc__)
    parser.add_argument("--release", type=Path, required=True, help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help="count with this library (default: the one just built)")
    parser.add_argument("--compare", action="store_true", help="fail if a count is more than 10 %% above the recorded one")
    parser.add_argument("--record", action="store_true", help=f"write the counts to {RECORDED.name}")
    parser.add_argument("--connections", type=int, default=CONNECTIONS, help="in the largest epoll set (%(default)s)")
    return parser.parse_args()


def main(arguments):
    with Folder("thallus-instructions") as folder:
        program = folder / "hot_paths"
        call(["gcc", "-O2", "-Wall", "-Werror", "-o", program, PROGRAM])
        library = Library(arguments.library or arguments.release / "libthallus_shim.so", folder)
        counts = {}
        for way in WAYS:
            # Without upgraded connections a large set is the kernel's affair.
            most = arguments.connections if way == "upgraded" else min(1000, arguments.connections)
            tell(f"{way}, up to {most:,} connections")
            for name, count in count_calls(program, library.path, way, most, folder).items():
                counts.setdefault(name, {})[way] = count
    text = describe(counts)
    print(text)
    if arguments.record:
        write(text)
    if arguments.compare:
        return compare(counts, recorded(), arguments.connections)
    return 0


def count_calls(program, library, way, connections, folder):
    """Runs `program`; name of what was called → instructions of one call."""
    with tempfile.TemporaryDirectory(dir=folder) as stats:
        settings = {"THALLUS_STATS": stats, **WAYS[way]}
        preload = [] if way == "without it" else [library]
        lines = call([program, connections, *preload], {**os.environ, **settings}, timeout=900).splitlines()
        if preload:
            check_path(Path(stats), way, connections)
        parts = (line.rpartition(" ") for line in lines)
        return {name: int(count) for name, _, count in parts}


def check_path(stats, way, connections):
    """Fails unless all connections went where the counts say: what they cost elsewhere is no news."""
    left = [json.loads(path.read_text()) for path in stats.glob("*.json")]
    # Of each connection both ends: the measured one, 12 long ones, those of the largest set. And 12 short ones, which stay.
    wanted = 2 * (1 + 12 + connections) if way == "upgraded" else 0
    upgraded = sum(one["upgraded"].get("shm", 0) for one in left)
    if upgraded != wanted or any(one["returned_to_tcp"] for one in left):
        raise Failed(f"{way}: {wanted} ends of connections should have been upgraded: {left}")


def describe(counts):
    rows = []
    for name, of in counts.items():
        rows.append([name, *(show(of.get(way)) for way in WAYS)])
    return markdown(["one call", *WAYS], rows, right=range(1, 1 + len(WAYS)))


def show(count):
    return "–" if count is None else f"{count:,.0f}"


def recorded():
    """The counts of the table in docs/performance.md."""
    table = RECORDED.read_text().partition(BEGIN)[2].partition(END)[0]
    counts = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("| ").split("|")]
        if len(cells) == 1 + len(WAYS) and re.fullmatch(r"[\d,]+|–", cells[1]):
            numbers = zip(WAYS, cells[1:])
            counts[cells[0]] = {way: int(cell.replace(",", "")) for way, cell in numbers if cell != "–"}
    if not counts:
        raise Failed(f"{RECORDED.name} has no table of instructions")
    return counts


def write(table):
    text = RECORDED.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise Failed(f"{RECORDED.name} has no place for the table: {BEGIN}")
    RECORDED.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


def compare(counts, before, connections):
    """1 if a count has grown, or is missing. What runs without the library is not ours to judge."""
    grown = []
    for name, ways in before.items():
        size = re.search(r" of (\d+) ready$", name)
        if size and int(size[1]) > connections:
            continue
        for way in list(WAYS)[1:]:
            old, new = ways.get(way), counts.get(name, {}).get(way)
            if old is None:
                continue
            if new is None:
                grown.append(f"{name}, {way}: {old:,} recorded, not counted now")
            elif new > max(old * GROWTH, old + SLACK):
                grown.append(f"{name}, {way}: {old:,} recorded, {new:,} now ({new / old:.2f}×)")
            elif new < min(old / GROWTH, old - SLACK):
                tell(f"fewer than recorded: {name}, {way}: {old:,}, {new:,} now ({new / old:.2f}×)")
    for line in grown:
        tell(f"GROWN: {line}")
    return 1 if grown else 0


def run():
    try:
        return main(parse())
    except Failed as failure:
        tell(f"\ncount-instructions: FAILED: {failure}")
        return 1


if __name__ == "__main__":
    sys.exit(run())
