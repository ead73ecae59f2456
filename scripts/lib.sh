# shellcheck shell=bash
# What the scripts in this folder share: source it. Installing asks for root or sudo, and only if something
# is missing. Build results go to CARGO_TARGET_DIR, by default outside the source folder.

# As in some containers and services; the shell knows it all the same.
[ -n "${HOME:-}" ] || { unset HOME && export HOME=~; }
root=$(CDPATH='' cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export CARGO_TARGET_DIR=${CARGO_TARGET_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/thallus-target}
# cargo would take a relative one from its own current folder.
case $CARGO_TARGET_DIR in /*) ;; *) CARGO_TARGET_DIR=$PWD/$CARGO_TARGET_DIR ;; esac

# Two source folders may share it, and cargo, which tells files apart by their times alone, would take for this one
# what it has built from the other, if that is newer. So the sources become new whenever the folder is another one.
(
    mkdir -p "$CARGO_TARGET_DIR"
    builder=$CARGO_TARGET_DIR/built-from
    if [ -e "$builder" ] && [ "$(cat "$builder")" != "$root" ]; then
        # Where that can't be, what cargo knows of its own builds is forgotten instead.
        find "$root" -name '*.rs' -exec touch {} + 2>/dev/null ||
            find "$CARGO_TARGET_DIR" -path '*/.fingerprint/*' -prune \( -name 'thallus*' -o -name 'demo-*' \) -exec rm -rf {} +
    fi
    printf '%s\n' "$root" >"$builder"
)

# Where scripts/fetch-duckdb puts the library that demo-server is linked with; read by its build.
duckdb_folder=$CARGO_TARGET_DIR/duckdb/1.5.6
export DUCKDB_LIB_DIR=${DUCKDB_LIB_DIR:-$duckdb_folder}

# A setting left over in the caller's shell must not change what is built, tested or measured.
unset LD_PRELOAD "${!THALLUS@}"

# Around what two runs at once must not both install into $CARGO_TARGET_DIR/tools.
lock_tools() {
    mkdir -p "$CARGO_TARGET_DIR/tools"
    exec 8>"$CARGO_TARGET_DIR/tools/lock"
    flock 8
}

unlock_tools() { exec 8>&-; }

# passed LOG: fails unless a test ran. That a run of tests ended well is not enough: a filter that matches nothing does, too.
passed() { grep -Eq '^test result: ok\. [1-9][0-9]* passed' "$1" || fail "no test ran"; }

say() { printf '\n== %s\n' "$*"; }

fail() {
    printf '%s: %s\n' "${0##*/}" "$*" >&2
    exit 1
}

as_root() {
    if [ "$(id -u)" = 0 ]; then
        "$@"
    else
        command -v sudo >/dev/null || fail "not root, and no sudo: can't run: $*"
        sudo "$@"
    fi
}

# install_packages PACKAGE...: installs those Debian packages that are missing, without starting services.
install_packages() {
    local package missing=()
    command -v dpkg-query >/dev/null || fail "needs Debian or Ubuntu; elsewhere install by hand: $*"
    for package in "$@"; do
        if [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" != installed ]; then
            missing+=("$package")
        fi
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    say "install ${missing[*]}"
    as_root bash -s "${missing[@]}" <<'INSTALL'
set -eu
export DEBIAN_FRONTEND=noninteractive
# One at a time: who is first takes the policy away again.
exec 9</usr/sbin
flock 9
# Asked by package scripts before they start a service (invoke-rc.d(8)); 101 forbids it. A PostgreSQL or
# Redis that nobody asked for must not occupy its port.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
apt-get -o DPkg::Lock::Timeout=300 update -qq </dev/null 9<&-
apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends "$@" </dev/null 9<&- >/dev/null
INSTALL
}

# install_rust: makes sure of a cargo that is new enough for the workspace.
install_rust() {
    local wanted have
    wanted=$(sed -n 's/^rust-version = "\(.*\)"/\1/p' "$root/Cargo.toml")
    PATH=$PATH:${CARGO_HOME:-$HOME/.cargo}/bin
    have=$(cargo --version 2>/dev/null | cut -d' ' -f2) || have=
    if [ -n "$have" ] && printf '%s\n' "$wanted" "$have" | sort -V -C; then
        return 0
    fi
    say "install Rust (needed: $wanted, found: ${have:-none})"
    if ! command -v rustup >/dev/null; then
        install_packages ca-certificates curl
        curl --proto '=https' --tlsv1.2 -sSf https://sh.rustup.rs | sh -s -- -y --profile minimal
        PATH=${CARGO_HOME:-$HOME/.cargo}/bin:$PATH
    fi
    rustup toolchain install stable --profile minimal --component clippy,rustfmt
    export RUSTUP_TOOLCHAIN=stable
}

# build_release: the library and the command as they are installed, in $CARGO_TARGET_DIR/release.
build_release() {
    case $CARGO_TARGET_DIR in
    *[[:space:]:\$]*) fail "LD_PRELOAD can't express a space, a colon or a dollar sign: set CARGO_TARGET_DIR to another folder than $CARGO_TARGET_DIR" ;;
    esac
    install_packages gcc libc6-dev
    install_rust
    say "build (in $CARGO_TARGET_DIR)"
    cargo build --manifest-path "$root/Cargo.toml" --release --locked -p thallus-shim -p thallus-cli
}

# build_demo: demo-server, with its libduckdb, and demo-client, beside what build_release makes.
build_demo() {
    install_packages ca-certificates curl g++
    build_release
    "$root/scripts/fetch-duckdb" >/dev/null
    cargo build --manifest-path "$root/Cargo.toml" --release --locked -p demo-server -p demo-client
}

# Which generates the tables of TPC-H.
tpchgen=$CARGO_TARGET_DIR/tools/tpchgen/bin/tpchgen-cli

install_tpchgen() {
    local version=4.0.0
    install_packages python3 python3-venv util-linux
    # Looked at behind the lock: who has waited finds what somebody else has installed, and is using.
    lock_tools
    if ! "$tpchgen" --version 2>/dev/null | grep -qF "$version"; then
        say "install tpchgen-cli $version"
        python3 -m venv --clear "${tpchgen%/bin/*}"
        "${tpchgen%/*}/pip" install --quiet --disable-pip-version-check "tpchgen-cli==$version"
    fi
    unlock_tools
}
