"""Source packages of Debian, unpacked and built in a folder that is kept."""

import re
import shutil
from pathlib import Path

from apps.series import tell
from apps.transports import Failed, call

from .suite import once

LISTS = ("/etc/apt/sources.list", "/etc/apt/sources.list.d")


class Source:
    """`build(folder)` is called once, with the unpacked source."""

    def __init__(self, package, cache, build):
        cache = Path(cache) / package

        def make():
            tell(f"\n== build {package}")
            fetch(package, cache)
            build(unpacked(cache))

        once(cache, make)
        self.folder = unpacked(cache)
        self.version = next(cache.glob("*.dsc")).name.removesuffix(".dsc").partition("_")[2]


def unpacked(cache):
    (folder,) = (path for path in cache.iterdir() if (path / "debian").is_dir())
    return folder


def fetch(package, cache):
    """Where apt has its packages from, it gets their sources, too; with lists of its own, so not as root."""
    apt = cache / "apt"
    (apt / "parts").mkdir(parents=True)
    (apt / "lists/partial").mkdir(parents=True)
    for place in map(Path, LISTS):
        for path in place.iterdir() if place.is_dir() else [place] if place.exists() else []:
            if path.suffix in (".list", ".sources"):
                text = re.sub(r"^(Types:\s*)deb\b", r"\1deb-src", path.read_text(), flags=re.MULTILINE)
                (apt / "parts" / path.name).write_text(re.sub(r"^deb(?=\s)", "deb-src", text, flags=re.MULTILINE))
    settings = {
        "Dir::Etc::sourcelist": "/dev/null",
        "Dir::Etc::sourceparts": apt / "parts",
        "Dir::State::lists": apt / "lists",
        "Dir::Cache::srcpkgcache": "",
        "Dir::Cache::pkgcache": "",
        "APT::Sandbox::User": "",
    }
    command = ["apt-get", "-qq", *(word for name, value in settings.items() for word in ("-o", f"{name}={value}"))]
    call([*command, "update"])
    try:
        call([*command, "source", f"{package}={installed(package)}"], folder=cache)
    except Failed:
        call([*command, "source", package], folder=cache)
    shutil.rmtree(apt)


def installed(package):
    """The version of the source that an installed package was built from. Programs and tests are to be of one age."""
    return call(["dpkg-query", "-W", "-f=${source:Version}", package])
