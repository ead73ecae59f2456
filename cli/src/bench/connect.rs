//! A connection for each request, or for some: connect, 64 bytes there and back, close.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::message::{Author, Phase, Reader};
use super::plan::Wait;
use super::role::{Meter, Report, Session, Usage};
use super::socket::{Endpoint, Listener, receive_all, transmit_all};

const SIZE: usize = 64;

/// Answers the requests of each connection, one connection after the other.
pub(super) fn serve(listener: &Listener) -> anyhow::Result<Report> {
    let mut meter = Meter::new();
    let mut message = [0; SIZE];
    while !meter.has_ended() {
        let stream = listener.accept().context("accept")?;
        let mut reader = Reader::new(SIZE);
        while receive(&stream, &mut message)? {
            meter.observe(reader.check(&message)?)?;
            transmit_all(&stream, &message).context("send")?;
        }
    }
    meter.finish()
}

/// Opens connections, one after the other, with `requests` on each.
pub(super) fn drive(session: &Session, requests: usize) -> anyhow::Result<Report> {
    let run = |phase, seconds| run(&session.endpoint, requests, phase, seconds);
    let (warm, _) = run(Phase::WarmUp, session.warm_up)?;
    let before = Usage::now(false)?;
    let (operations, elapsed) = run(Phase::Measured, session.seconds)?;
    let used = Usage::now(false)?.since(&before, operations);
    one(&session.endpoint, 1, Phase::End)?;
    Ok(Report { seconds: elapsed.as_secs_f64(), connections: warm + operations + 1, ..used })
}

fn run(endpoint: &Endpoint, requests: usize, phase: Phase, seconds: f64) -> anyhow::Result<(u64, Duration)> {
    let (start, limit) = (Instant::now(), Duration::from_secs_f64(seconds));
    let mut count = 0;
    while start.elapsed() < limit {
        one(endpoint, requests, phase)?;
        count += 1;
    }
    Ok((count, start.elapsed()))
}

fn one(endpoint: &Endpoint, requests: usize, phase: Phase) -> anyhow::Result<()> {
    let stream = endpoint.connect().context("connect")?;
    let mut author = Author::new(0, SIZE);
    for _ in 0..requests {
        transmit_all(&stream, author.next(phase)).context("send")?;
        let mut echo = [0; SIZE];
        ensure!(receive(&stream, &mut echo)?, "the server closed the connection");
        author.check(&echo)?;
    }
    Ok(())
}

fn receive(stream: &OwnedFd, message: &mut [u8]) -> anyhow::Result<bool> {
    receive_all(stream, message, Wait::Blocking).context("receive")
}
