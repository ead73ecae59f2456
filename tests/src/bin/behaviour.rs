//! Runs one side of one behaviour; the harness starts two of these. See `thallus_tests`.

use thallus_tests::behaviours::{self, helpers};
use thallus_tests::calls::{Family, default_action};
use thallus_tests::side::Side;

fn main() {
    // Rust's runtime ignores SIGPIPE; behaviours want a C program's world.
    default_action(libc::SIGPIPE);
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments.as_slice() {
        ["--helper", name, rest @ ..] => helpers::run(name, rest),
        [name, side @ ("left" | "right"), listens @ ("listens" | "connects"), family, rounds] => {
            let behaviour = behaviours::find(name).unwrap_or_else(|| panic!("no behaviour is called {name}"));
            let side_given = Side {
                family: Family::named(family)
                    .unwrap_or_else(|| panic!("no address family is called {family}")),
                rounds: rounds.parse().expect("the number of rounds is a number"),
                listens: *listens == "listens",
            };
            behaviour.run(&side_given, *side == "left");
        }
        _ => panic!("usage: behaviour NAME left|right listens|connects v4|v6|mapped|unix ROUNDS"),
    }
}
