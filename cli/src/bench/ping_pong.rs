//! Ping-pong on one connection, waiting in `recv` and `send` or in `poll`.
//!
//! With `poll` the sockets are non-blocking, and a process asks `poll` before it reads: that is how a
//! program is written that also has other things to wait for.

use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::latency::{Latency, SAMPLED, Times};
use super::message::{Author, Phase, Reader};
use super::plan::Wait;
use super::role::{Meter, Report, Session, Usage};
use super::socket::{Listener, Stream, set_nonblocking};

/// Round trips between two looks at the clock. One of them is timed.
const BATCH: u64 = SAMPLED;

/// Echoes the messages of one connection.
pub(super) fn serve(listener: &Listener, wait: Wait, size: usize) -> anyhow::Result<Report> {
    let mut stream = prepare(listener.accept_stream().context("accept")?, wait)?;
    let (mut reader, mut meter) = (Reader::new(size), Meter::new());
    let mut message = vec![0; size];
    while stream.receive_all(&mut message, wait).context("receive")? {
        meter.observe(reader.check(&message)?)?;
        stream.transmit_all(&message).context("send")?;
    }
    meter.finish()
}

/// Sends a message, waits for its echo, and so on.
pub(super) fn drive(session: &Session, wait: Wait, size: usize) -> anyhow::Result<Report> {
    let stream = prepare(session.endpoint.connect_stream().context("connect")?, wait)?;
    let mut client = Client { stream, wait, author: Author::new(0, size), echo: vec![0; size] };
    client.run(Phase::WarmUp, session.warm_up, None)?;
    let before = Usage::now(false)?;
    let (operations, elapsed, times) = client.run(Phase::Measured, session.seconds, None)?;
    let used = Usage::now(false)?.since(&before, operations);
    client.round_trip(Phase::End)?;
    Ok(Report { seconds: elapsed.as_secs_f64(), connections: 1, times, ..used })
}

/// Sends `rate` messages a second, each when the clock says so or when the echo of the last one has come, whichever is later.
pub(super) fn drive_paced(session: &Session, size: usize, rate: u32) -> anyhow::Result<Report> {
    let stream = prepare(session.endpoint.connect_stream().context("connect")?, Wait::Blocking)?;
    let (author, echo) = (Author::new(0, size), vec![0; size]);
    let mut client = Client { stream, wait: Wait::Blocking, author, echo };
    // At the full rate: a connection that is used rarely would still be on TCP when the clock starts.
    client.run(Phase::WarmUp, session.warm_up / 2.0, None)?;
    client.run(Phase::WarmUp, session.warm_up / 2.0, Some(rate))?;
    let before = Usage::now(false)?;
    let (operations, elapsed, times) = client.run(Phase::Measured, session.seconds, Some(rate))?;
    let used = Usage::now(false)?.since(&before, operations);
    client.round_trip(Phase::End)?;
    Ok(Report { seconds: elapsed.as_secs_f64(), connections: 1, times, ..used })
}

struct Client {
    stream: Stream,
    wait: Wait,
    author: Author,
    echo: Vec<u8>,
}

impl Client {
    /// Round trips for at least `seconds`, as fast as they go or `rate` a second; their number, time, and how long they took.
    fn run(
        &mut self,
        phase: Phase,
        seconds: f64,
        rate: Option<u32>,
    ) -> anyhow::Result<(u64, Duration, Times)> {
        let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
        let mut latency = Latency::new();
        let mut count = 0;
        loop {
            if let Some(rate) = rate {
                let due = start + Duration::from_secs_f64(count as f64 / f64::from(rate));
                std::thread::sleep(due.saturating_duration_since(Instant::now()));
            }
            let began = Instant::now();
            self.round_trip(phase)?;
            latency.note(began);
            count += 1;
            if rate.is_none() {
                for _ in 1..BATCH {
                    self.round_trip(phase)?;
                }
                count += BATCH - 1;
            }
            let elapsed = start.elapsed();
            if elapsed >= limit {
                return Ok((count, elapsed, latency.times()));
            }
        }
    }

    fn round_trip(&mut self, phase: Phase) -> anyhow::Result<()> {
        self.stream.transmit_all(self.author.next(phase)).context("send")?;
        let open = self.stream.receive_all(&mut self.echo, self.wait).context("receive")?;
        ensure!(open, "the server closed the connection");
        self.author.check(&self.echo)
    }
}

fn prepare(stream: Stream, wait: Wait) -> anyhow::Result<Stream> {
    match stream {
        Stream::Socket(stream) if wait != Wait::Blocking => {
            Ok(Stream::Socket(set_nonblocking(stream).context("make it non-blocking")?))
        }
        stream => Ok(stream),
    }
}
