//! What idle connections hold: memory of both processes per connection.
//!
//! A few connections come first, so that what the first one costs (code, tables) is not counted. Then both
//! sides note their memory, the rest is opened, every connection is used enough to have been upgraded, and
//! both sides note their memory again.

use std::time::Duration;

use super::event_loop::{self, Clients};
use super::message::Phase;
use super::role::{Meter, Report, Session, Usage};
use super::socket::Listener;

const SIZE: usize = 64;
const FIRST: usize = 8;
/// Round trips on each connection before it is left alone.
const ROUND_TRIPS: usize = 64;

/// Echoes, and notes its memory where the client says.
pub(super) fn serve(listener: &Listener) -> anyhow::Result<Report> {
    event_loop::serve(listener, SIZE, Meter::with_memory())
}

/// Opens [`FIRST`] connections and then `connections` more.
pub(super) fn drive(session: &Session, connections: usize) -> anyhow::Result<Report> {
    let mut clients = Clients::new(SIZE)?;
    clients.open(&session.endpoint, FIRST)?;
    use_all(&mut clients)?;
    clients.say_once(Phase::Measured)?;
    let before = Usage::now(true)?;
    clients.open(&session.endpoint, connections)?;
    use_all(&mut clients)?;
    clients.say_once(Phase::End)?;
    let report = Usage::now(true)?.since(&before, connections as u64);
    Ok(Report { connections: (FIRST + connections) as u64, ..report })
}

fn use_all(clients: &mut Clients) -> anyhow::Result<()> {
    for _ in 0..ROUND_TRIPS {
        clients.run(Phase::WarmUp, Duration::ZERO)?;
    }
    Ok(())
}
