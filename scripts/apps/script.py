"""What the scripts have in common: their options, their folder, and how they end."""

import argparse
from pathlib import Path

from .series import tell
from .servers import Folder
from .transports import Failed


def parser(name, description):
    parser = argparse.ArgumentParser(prog=f"scripts/{name}", description=description)
    parser.add_argument("--release", type=Path, required=True, help=argparse.SUPPRESS)
    return parser


def at_least_one(text):
    """The type of an option that is a number of something."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("has to be at least 1")
    return number


def above_zero(text):
    """The type of an option that is a scale or a size."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError("has to be above 0")
    return number


def title(transport, library):
    """What tables call a transport of ours over TCP, or with the library on both sides."""
    return f"{transport}, {'Thallus' if library else 'TCP'}"


def run(name, work, arguments):
    """The exit status of `work(arguments, folder)`."""
    try:
        with Folder(f"thallus-{name}") as folder:
            return work(arguments, folder)
    except Failed as failure:
        tell(f"\n{name}: FAILED: {failure}")
        return 1
    except KeyboardInterrupt:
        return 130
