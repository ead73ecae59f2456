//! Random programs of socket operations on the kernel and under the library: `thallus_tests::differential`.
//!
//! | variable | meaning | if not set |
//! |---|---|--:|
//! | `DIFFERENTIAL_SECONDS` | how long programs are made up | 10 |
//! | `DIFFERENTIAL_STEPS` | the most steps of a program | 40 |
//! | `DIFFERENTIAL_SEED` | the first program's seed; the others follow | from the clock |
//! | `DIFFERENTIAL_FAMILY` | programs over these connections alone: `v4`, `v6`, `mapped`, `unix` | any |
//! | `DIFFERENTIAL_ALL` | set: go on after a difference | |
//! | `DIFFERENTIAL_PROGRAM` | a file: `corpus` runs this program alone, and prints what was seen | |
//!
//! A program that differs is made smaller as long as it differs, and printed: as a file in `tests/differential/`, which
//! the test `corpus` runs, it will not be forgotten.

mod differential {
    mod campaign;
    mod generate;

    pub(crate) use campaign::Campaign;
}

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use differential::Campaign;
use thallus_tests::differential::program::Program;

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().map(|text| text.parse().expect("a number"))
}

#[test]
fn corpus() -> Result<()> {
    let mut campaign = Campaign::new()?;
    if let Some(path) = std::env::var_os("DIFFERENTIAL_PROGRAM") {
        let program = Program::of_text(&std::fs::read_to_string(path)?)?;
        return campaign.print(&program);
    }
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("differential");
    let mut count = 0;
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        let program =
            Program::of_text(&std::fs::read_to_string(&path)?).with_context(|| path.display().to_string())?;
        campaign.replay(&program).with_context(|| path.display().to_string())?;
        count += 1;
    }
    ensure!(count > 0, "there is no corpus");
    println!("corpus: {count} programs; {campaign}");
    Ok(())
}

#[test]
fn random_programs() -> Result<()> {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let seed = number("DIFFERENTIAL_SEED").unwrap_or(now.as_secs() * 1_000_000);
    let seconds = number("DIFFERENTIAL_SECONDS").unwrap_or(10);
    let steps = number("DIFFERENTIAL_STEPS").unwrap_or(40);
    let mut campaign = Campaign::new()?;
    let outcome = campaign.explore(seed, steps as usize, Duration::from_secs(seconds));
    println!("random programs from seed {seed}: {campaign}");
    outcome?;
    campaign.expect_upgrades()
}
