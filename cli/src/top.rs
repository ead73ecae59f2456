//! `thallus top`: what connections do at the moment.

mod rates;
mod screen;
mod state;

use std::io::{IsTerminal, stdout};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{bail, ensure};
use clap::ValueEnum;
use ratatui::crossterm::event::{self, Event};

use crate::status::Report;
use rates::Snapshot;
use state::State;

/// Show what the connections of live processes do at the moment
///
/// One line for each end of a connection, as in thallus status. A wait is one that found nothing at first: it was ended by
/// spinning (SPUN is the share of those) or by a sleep. PER WAIT is the time from one wait to the next: for a program that
/// asks and waits for the answer, a round trip with all that both sides do. Rates are means of an interval.
///
/// Keys: q ends, < and > (or the arrows) choose the column to sort by, r turns the order, / filters, p pauses, up and down scroll.
///
/// Exit status: 0; 1 if /proc can't be read or there is no terminal; 2 for wrong arguments.
///
/// With --once --json: an object with
///   interval_seconds
///   connections  array: pid, command, fd, role, local, peer, fabric, reason, … as thallus status has them, and
///                sent_per_second, received_per_second (bytes), waits_per_second, doorbells_per_second,
///                spun (0 to 1, or null if there was no wait), seconds_per_wait (or null)
#[derive(clap::Args, Debug)]
#[command(verbatim_doc_comment)]
pub(crate) struct Args {
    /// Seconds between two looks, 0.1 to 3600
    #[arg(long, default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Print the table for one interval, and end
    #[arg(long)]
    once: bool,
    /// Print JSON instead of a table
    #[arg(long, requires = "once")]
    json: bool,
    /// What to sort by; most comes first, names and numbers of processes in their order
    #[arg(long, value_enum, default_value_t)]
    sort: Sort,
    /// The other way around
    #[arg(long)]
    reverse: bool,
    /// Show only lines that contain TEXT, in upper or lower case
    #[arg(long, value_name = "TEXT", default_value = "")]
    filter: String,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// Bytes per second, both ways
    #[default]
    Rate,
    Sent,
    Received,
    Waits,
    Spun,
    Bells,
    Age,
    Pid,
    Command,
    /// Fabric, then reason
    Fabric,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().map_err(|error| error.to_string())?;
    if (0.1..=3600.0).contains(&seconds) {
        Ok(Duration::from_secs_f64(seconds))
    } else {
        Err("not from 0.1 to 3600".into())
    }
}

pub(crate) fn run(args: &Args) -> anyhow::Result<()> {
    let mut state = State::new(args.sort, args.reverse, args.filter.clone());
    if args.once {
        let before = Look::now()?;
        thread::sleep(args.interval);
        state.show(Look::now()?.since(&before));
        return crate::print(&if args.json { state.json()? } else { state.text() });
    }
    ensure!(stdout().is_terminal(), "standard output is no terminal: use --once");
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => bail!("can't use the terminal: {error}"),
    };
    let outcome = watch(&mut terminal, &mut state, args.interval);
    ratatui::restore();
    outcome
}

/// All connections, and when.
struct Look {
    report: Report,
    at: Instant,
}

impl Look {
    fn now() -> anyhow::Result<Self> {
        Ok(Self { report: Report::now()?, at: Instant::now() })
    }

    fn since(&self, before: &Self) -> Snapshot {
        Snapshot::between(&before.report, &self.report, self.at.duration_since(before.at))
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    state: &mut State,
    interval: Duration,
) -> anyhow::Result<()> {
    let mut last = Look::now()?;
    // Something to see at once; the first rates are those since each connection began.
    state.show(Snapshot::first(&last.report));
    loop {
        terminal.draw(|frame| screen::draw(frame, state))?;
        let pause = interval.saturating_sub(last.at.elapsed());
        if event::poll(pause)? {
            if let Event::Key(key) = event::read()?
                && state.press(key)
            {
                return Ok(());
            }
        } else {
            let look = Look::now()?;
            if !state.is_paused() {
                state.show(look.since(&last));
            }
            last = look;
        }
    }
}
