"""Measurements in turn, and what may be said of them."""

import statistics
import sys
from dataclasses import dataclass, field

from .transports import Counts, TCP, THALLUS, THALLUS_UNIX, UNIX


@dataclass
class Sample:
    """One measurement; `clients` connections of it should have been upgraded under Thallus."""

    value: float
    counts: Counts
    clients: int
    cpu_seconds: float = 0.0
    operations: float = 0.0


@dataclass
class Workload:
    """A line of the table. `measure(transport, round)` gives a Sample."""

    name: str
    unit: str
    measure: object
    transports: tuple
    short: bool = False
    """Connections too short to be worth an upgrade: its cost is the point, not its gain."""
    samples: dict = field(default_factory=dict)

    def run(self, rounds, position=""):
        """Measures over each transport in turn, `rounds` times, and tells about it on standard error."""
        tell(f"{position}{self.name}:", end="")
        for number in range(rounds):
            for transport in self.transports:
                sample = self.measure(transport, number)
                self.samples.setdefault(transport, []).append(sample)
                tell(f" {transport.name} {sample.value:,.0f}", end="")
        tell("")

    def median(self, transport):
        return statistics.median(sample.value for sample in self.samples[transport])

    def counts(self, transport):
        return sum((sample.counts for sample in self.samples[transport]), Counts())

    def was_upgraded(self, transport=THALLUS):
        """Whether every connection that should have been was upgraded, and stayed so, as the clients counted.

        pgbench and redis-benchmark open one more, which may have been upgraded in place of the one that was measured: the bytes tell.
        """
        samples = [(sample.counts, sample.clients) for sample in self.samples[transport]]
        return all(
            counts.upgraded.total() - counts.returned >= clients and counts.ring_bytes > counts.tcp_bytes
            for counts, clients in samples
        )

    def ratio(self, transport):
        """Median over that of the kernel: of TCP, or for Thallus over a Unix socket of that. None if the connections did not go
        where the ratio would say they did."""
        if transport in (THALLUS, THALLUS_UNIX) and not self.short and not self.was_upgraded(transport):
            return None
        return self.median(transport) / self.median(UNIX if transport == THALLUS_UNIX else TCP)

    def show_ratio(self, transport):
        ratio = self.ratio(transport)
        return "not claimed" if ratio is None else f"{ratio:.2f}×"

    def spread(self, transport):
        """`12,400 (12,100–12,900)`."""
        values = [sample.value for sample in self.samples[transport]]
        return f"{self.median(transport):,.0f} ({min(values):,.0f}–{max(values):,.0f})"

    def cpu_per_million(self, transport):
        """CPU seconds of client and server for a million operations, or None if not measured."""
        rates = [sample.cpu_seconds / sample.operations * 1e6 for sample in self.samples[transport] if sample.operations]
        return statistics.median(rates) if rates else None

    def as_json(self):
        return {
            "name": self.name,
            "unit": self.unit,
            "transports": {transport.name: self.transport_json(transport) for transport in self.transports},
        }

    def transport_json(self, transport):
        samples = self.samples[transport]
        values = [sample.value for sample in samples]
        return {
            "median": self.median(transport),
            "min": min(values),
            "max": max(values),
            "ratio_to_tcp": self.ratio(transport),
            "cpu_seconds_per_million": self.cpu_per_million(transport),
            "samples": values,
            "client_counts": self.counts(transport).as_json() if transport.client else None,
        }


def markdown(head, rows, right=()):
    """A Markdown table, in columns of equal width; those of the numbers in `right` to the right."""
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]
    rule = ["-" * (width - 1) + (":" if column in right else "-") for column, width in enumerate(widths)]
    lines = []
    for row in [head, rule, *rows]:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tell(text, end="\n"):
    """Progress."""
    print(text, end=end, file=sys.stderr, flush=True)
