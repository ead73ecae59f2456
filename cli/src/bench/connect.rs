//! A connection for each request: connect, 64 bytes there and back, close.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::message::{Author, Phase, Reader};
use super::plan::Wait;
use super::role::{Meter, Report, Session, Usage};
use super::socket::{Endpoint, Listener, receive_all, transmit_all};

const SIZE: usize = 64;

/// Answers one request on each connection, one connection after the other.
pub(super) fn serve(listener: &Listener) -> anyhow::Result<Report> {
    let mut meter = Meter::new();
    let mut message = [0; SIZE];
    while !meter.has_ended() {
        let stream = listener.accept().context("accept")?;
        ensure!(receive(&stream, &mut message)?, "a connection without a request");
        meter.observe(Reader::new(SIZE).check(&message)?)?;
        transmit_all(&stream, &message).context("send")?;
        ensure!(!receive(&stream, &mut message)?, "more than one request on a connection");
    }
    meter.finish()
}

/// Opens connections, one after the other.
pub(super) fn drive(session: &Session) -> anyhow::Result<Report> {
    let (warm, _) = run(&session.endpoint, Phase::WarmUp, session.warm_up)?;
    let before = Usage::now(false)?;
    let (operations, elapsed) = run(&session.endpoint, Phase::Measured, session.seconds)?;
    let used = Usage::now(false)?.since(&before, operations);
    one(&session.endpoint, Phase::End)?;
    Ok(Report { seconds: elapsed.as_secs_f64(), connections: warm + operations + 1, ..used })
}

fn run(endpoint: &Endpoint, phase: Phase, seconds: f64) -> anyhow::Result<(u64, Duration)> {
    let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut count = 0;
    while start.elapsed() < limit {
        one(endpoint, phase)?;
        count += 1;
    }
    Ok((count, start.elapsed()))
}

fn one(endpoint: &Endpoint, phase: Phase) -> anyhow::Result<()> {
    let stream = endpoint.connect().context("connect")?;
    let mut author = Author::new(0, SIZE);
    transmit_all(&stream, author.next(phase)).context("send")?;
    let mut echo = [0; SIZE];
    ensure!(receive(&stream, &mut echo)?, "the server closed the connection");
    author.check(&echo)
}

fn receive(stream: &OwnedFd, message: &mut [u8]) -> anyhow::Result<bool> {
    receive_all(stream, message, Wait::Blocking).context("receive")
}
