//! `thallus top`: what connections do at the moment.

mod rates;
mod screen;
mod state;

use std::io::{IsTerminal, stdout};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::ValueEnum;
use libc::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use ratatui::crossterm::event::{self, Event};
use ratatui::crossterm::terminal::disable_raw_mode;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

use crate::status::Report;
use crate::status::sockets::Sockets;
use rates::Snapshot;
use state::State;

/// Show what the connections of live processes do at the moment
///
/// One line for each end of a connection, as in thallus status. A wait is one that found nothing at first: it was ended by
/// spinning (SPUN is the share of those) or by a sleep. PER WAIT is the time from one wait to the next: for a program that
/// asks and waits for the answer, a round trip with all that both sides do. Rates are means of an interval.
///
/// Keys: q ends, < and > (or the arrows) choose the column to sort by, r turns the order, / filters, p pauses, up and down scroll.
/// A terminal that is too narrow for all columns shows fewer.
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
        let mut sockets = Sockets::default();
        let before = Look::now(&mut sockets)?;
        thread::sleep(args.interval);
        state.show(Look::now(&mut sockets)?.since(&before));
        return crate::print(&if args.json { state.json()? } else { state.text() });
    }
    ensure!(stdout().is_terminal(), "standard output is no terminal: use --once");
    let signal = caught()?;
    let mut terminal = match ratatui::try_init() {
        Ok(terminal) => terminal,
        Err(error) => bail!("can't use the terminal: {error}"),
    };
    let outcome = watch(&mut terminal, &mut state, args.interval, &signal);
    ratatui::restore();
    match signal.load(Ordering::SeqCst) {
        0 => outcome,
        // As if nothing had been done in between.
        signal => emulate_default_handler(signal).context("can't end by a signal"),
    }
}

/// The number of a signal that is to end this process, once one has come. The terminal has to be restored first; whoever can't do that
/// in time ends all the same: where the terminal is gone, waiting for a key may last for ever.
fn caught() -> anyhow::Result<Arc<AtomicI32>> {
    let caught = Arc::new(AtomicI32::new(0));
    let mut signals = Signals::new([SIGTERM, SIGHUP, SIGINT, SIGQUIT]).context("can't handle signals")?;
    let by_thread = Arc::clone(&caught);
    thread::spawn(move || {
        for signal in signals.forever() {
            by_thread.store(signal, Ordering::SeqCst);
            thread::sleep(LONGEST_END);
            let _ = disable_raw_mode();
            let _ = emulate_default_handler(signal);
        }
    });
    Ok(caught)
}

/// From a signal to the end of the process.
const LONGEST_END: Duration = Duration::from_secs(1);

/// How long a signal may take to be noticed: waiting for a key goes on after it.
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// All connections, and when.
struct Look {
    report: Report,
    at: Instant,
}

impl Look {
    fn now(sockets: &mut Sockets) -> anyhow::Result<Self> {
        Ok(Self { report: Report::now(sockets)?, at: Instant::now() })
    }

    fn since(&self, before: &Self) -> Snapshot {
        Snapshot::between(&before.report, &self.report, self.at.duration_since(before.at))
    }
}

fn watch(
    terminal: &mut ratatui::DefaultTerminal,
    state: &mut State,
    interval: Duration,
    signal: &AtomicI32,
) -> anyhow::Result<()> {
    let mut sockets = Sockets::default();
    let mut last = Look::now(&mut sockets)?;
    // Something to see at once; the first rates are those since each connection began.
    state.show(Snapshot::first(&last.report));
    let mut is_drawn = false;
    while signal.load(Ordering::SeqCst) == 0 {
        if !is_drawn {
            terminal.draw(|frame| screen::draw(frame, state))?;
        }
        let pause = interval.saturating_sub(last.at.elapsed());
        is_drawn = pause > LONGEST_PAUSE;
        if event::poll(pause.min(LONGEST_PAUSE))? {
            is_drawn = false;
            if let Event::Key(key) = event::read()?
                && state.press(key)
            {
                return Ok(());
            }
        } else if !is_drawn {
            let look = Look::now(&mut sockets)?;
            if !state.is_paused() {
                state.show(look.since(&last));
            }
            last = look;
        }
    }
    Ok(())
}
