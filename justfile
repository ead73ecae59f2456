# Daily commands: `just` lists them. scripts/test is what CI runs.

_default:
    @just --list --unsorted

# The library and the command, optimized
build:
    cargo build --release -p thallus-shim -p thallus-cli

# Everything that CI checks, or only the stages named (scripts/test --list)
test *STAGES:
    scripts/test {{STAGES}}

# Ten minutes of large random programs, on the kernel and under the library
nightly:
    DIFFERENTIAL_SECONDS=600 DIFFERENTIAL_STEPS=150 DIFFERENTIAL_SEED="$(date +%s)000000" scripts/test build differential

# kill -9 of servers, backends and clients at random points, 1,000 times
kills *OPTIONS:
    scripts/kills {{OPTIONS}}

# 100,000 connections over TCP, and as many over a Unix socket: nothing is left of them
connections *OPTIONS:
    scripts/connections {{OPTIONS}}

# Formatting, clippy, shell scripts
lint:
    scripts/test format lint scripts

# Format the code
fmt:
    cargo fmt --all

# PostgreSQL and Redis over TCP, Unix sockets and Thallus, side by side
demo *OPTIONS:
    scripts/demo {{OPTIONS}}

# TPC-H tables from the DuckDB server to its client, over each transport
demo-arrow *OPTIONS:
    scripts/demo-arrow {{OPTIONS}}

# Unmodified Spark, its shuffle over TCP and with the library
demo-spark *OPTIONS:
    scripts/demo-spark {{OPTIONS}}

# Measure this machine
bench *OPTIONS:
    scripts/bench {{OPTIONS}}

# Query results against Arrow Flight, Arrow IPC and serialized batches, with plots
bench-arrow *OPTIONS:
    scripts/bench-arrow {{OPTIONS}}

# TPC-H on several processes by DataFusion: its own transport and ours, over TCP and with the library
bench-sql *OPTIONS:
    scripts/bench-sql {{OPTIONS}}

# Known vulnerabilities in dependencies (needs the network, and a cargo-deny with its default features)
advisories:
    cargo deny check advisories
