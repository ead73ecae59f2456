//! How the processes of a cluster find each other.
//!
//! Each connects to all with higher numbers, which needs nobody's help (the kernel accepts), greets them, answers those with
//! lower numbers, and reads the answers of the higher ones, all as they come: so nobody waits for one that waits for it. Who has
//! been there and is gone ends the meeting; only who has not been there yet is waited for.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};
use nix::sys::eventfd::{EfdFlags, EventFd};

use super::incoming::Incoming;
use super::link::Link;
use super::node::{STOP, Shared};
use super::wire::{HELLO, Hello};
use super::{Config, Node};
use crate::{Cluster, Error, NodeId, Result, deadline, socket};

/// Who connect and say nothing, before the first of them is sent away.
const STRANGERS: usize = 64;

/// Between two tries to connect.
const PAUSE: Duration = Duration::from_millis(20);

pub(super) fn meet(listener: TcpListener, cluster: Cluster, me: NodeId, config: Config) -> Result<Node> {
    listener.set_nonblocking(true).map_err(Error::io("accept"))?;
    let mut meeting = Meeting {
        cluster: &cluster,
        me,
        hello: Hello { node: me, window: config.window as u64 }.to_bytes(&cluster),
        deadline: deadline::after(config.patience),
        missing: (me.0 + 1..).take(cluster.nodes() - me.index() - 1).map(NodeId).collect(),
        asked: Vec::new(),
        guests: VecDeque::new(),
        met: (0..cluster.nodes()).map(|_| None).collect(),
    };
    while meeting.met.iter().flatten().count() + 1 < cluster.nodes() {
        meeting.connect()?;
        meeting.wait(&listener)?;
        meeting.look()?;
        meeting.accept(&listener)?;
    }
    let met = meeting.met;
    begin(listener, cluster, me, config, met).map_err(Error::io("network thread"))
}

struct Meeting<'a> {
    cluster: &'a Cluster,
    me: NodeId,
    hello: [u8; HELLO],
    deadline: Instant,
    /// Those with higher numbers that are not there yet.
    missing: Vec<NodeId>,
    /// Those that were greeted, and have not answered.
    asked: Vec<(NodeId, Guest)>,
    /// Those with lower numbers, or strangers.
    guests: VecDeque<Guest>,
    /// By process, with its window.
    met: Vec<Option<(TcpStream, u64)>>,
}

impl Meeting<'_> {
    /// Greets those with higher numbers that are there now.
    fn connect(&mut self) -> Result<()> {
        for node in std::mem::take(&mut self.missing) {
            let address = self.cluster.address(node);
            let rest = self.deadline.saturating_duration_since(Instant::now());
            match socket::connect(&address, rest.max(Duration::from_millis(1))) {
                Ok(mut stream) => {
                    stream.write_all(&self.hello).map_err(|error| gone(node, &error))?;
                    stream.set_nonblocking(true).map_err(Error::io("greet"))?;
                    self.asked.push((node, Guest::new(stream)));
                }
                // Not there yet.
                Err(error) if socket::is_nobody(&error) && !rest.is_zero() => {
                    self.missing.push(node);
                }
                Err(error) => return Err(Error::Join(format!("{node} at {address}: {error}"))),
            }
        }
        Ok(())
    }

    /// Sleeps until somebody says something, comes or goes, or it is time to connect to those that are missing.
    fn wait(&self, listener: &TcpListener) -> Result<()> {
        let rest = match self.deadline.checked_duration_since(Instant::now()) {
            // Of them the next try tells that they have not come in time.
            rest if !self.missing.is_empty() => rest.unwrap_or_default().min(PAUSE),
            Some(rest) => rest,
            None => {
                let silent = self.asked.first().map(|(node, _)| format!("{node} does not answer"));
                return Err(Error::Join(silent.unwrap_or("not all processes have connected".into())));
            }
        };
        let guests = self.asked.iter().map(|(_, guest)| guest).chain(&self.guests);
        let readable = guests.map(|guest| guest.stream.as_fd()).chain([listener.as_fd()]);
        let readable = readable.map(|socket| PollFd::new(socket, PollFlags::POLLIN));
        let met = self.met.iter().flatten().map(|(stream, _)| of_end(stream));
        let mut waited: Vec<_> = readable.chain(met).collect();
        match poll(&mut waited, PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX)) {
            Ok(_) | Err(nix::errno::Errno::EINTR) => Ok(()),
            Err(error) => Err(Error::io("wait for the others")(error.into())),
        }
    }

    /// Who has said something, or is gone. Strangers are sent away, and hold up nobody, whatever they say or don't.
    fn look(&mut self) -> Result<()> {
        for (node, met) in (0..).map(NodeId).zip(&self.met) {
            if let Some((stream, _)) = met
                && poll(&mut [of_end(stream)], PollTimeout::ZERO) == Ok(1)
            {
                return Err(gone(node, &io::ErrorKind::UnexpectedEof.into()));
            }
        }
        for (node, mut guest) in std::mem::take(&mut self.asked) {
            if !guest.read().map_err(|error| gone(node, &error))? {
                self.asked.push((node, guest));
                continue;
            }
            let theirs = Hello::from_bytes(&guest.bytes, self.cluster)
                .map_err(|why| Error::Join(format!("{node}: {why}")))?;
            if theirs.node != node {
                return Err(Error::Cluster(format!("{} is at the address of {node}", theirs.node)));
            }
            self.met[node.index()] = Some((guest.stream, theirs.window));
        }
        for mut guest in std::mem::take(&mut self.guests) {
            match guest.read() {
                Ok(true) => self.answer(guest)?,
                Ok(false) => self.guests.push_back(guest),
                Err(_) => {} // it never said who it is
            }
        }
        Ok(())
    }

    /// Answers the greeting of a process with a lower number.
    fn answer(&mut self, mut guest: Guest) -> Result<()> {
        if let Ok(theirs) = Hello::from_bytes(&guest.bytes, self.cluster)
            && theirs.node < self.me
            && let met @ None = &mut self.met[theirs.node.index()]
        {
            guest.stream.write_all(&self.hello).map_err(|error| gone(theirs.node, &error))?;
            *met = Some((guest.stream, theirs.window));
        }
        Ok(())
    }

    fn accept(&mut self, listener: &TcpListener) -> Result<()> {
        match listener.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream)) {
            Ok(stream) => self.guests.push_back(Guest::new(stream)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(Error::io("accept")(error)),
        }
        if self.guests.len() > STRANGERS + self.cluster.nodes() {
            self.guests.pop_front();
        }
        Ok(())
    }
}

/// Waits for the end alone: who has met all others may already say what is for later. It is no flag of nix.
fn of_end(stream: &TcpStream) -> PollFd<'_> {
    PollFd::new(stream.as_fd(), PollFlags::from_bits_retain(nix::libc::POLLRDHUP))
}

fn gone(node: NodeId, error: &io::Error) -> Error {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => "it closed the connection".to_owned(),
        _ => error.to_string(),
    };
    Error::Gone { node, why }
}

/// Somebody who has not greeted, or not answered.
struct Guest {
    stream: TcpStream,
    bytes: [u8; HELLO],
    have: usize,
}

impl Guest {
    fn new(stream: TcpStream) -> Self {
        Self { stream, bytes: [0; HELLO], have: 0 }
    }

    /// Whether all that it says first is there now.
    fn read(&mut self) -> io::Result<bool> {
        match self.stream.read(&mut self.bytes[self.have..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => self.have += read,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            Err(error) => return Err(error),
        }
        Ok(self.have == HELLO)
    }
}

fn begin(
    listener: TcpListener,
    cluster: Cluster,
    me: NodeId,
    config: Config,
    met: Vec<Option<(TcpStream, u64)>>,
) -> io::Result<Node> {
    let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
    let stop = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
    epoll.add(&stop, EpollEvent::new(EpollFlags::EPOLLIN, STOP))?;
    let mut links = Vec::new();
    for (node, met) in (0..).map(NodeId).zip(met) {
        let Some((stream, window)) = met else {
            links.push(None);
            continue;
        };
        socket::prepare(&stream)?;
        stream.set_nonblocking(true)?;
        let link = Link::new(node, stream, window, config.outgoing, epoll.clone());
        epoll.add(&link.stream, link.event(false))?;
        links.push(Some(link));
    }
    let incoming = links.iter().map(|link| link.as_ref().map(|link| Incoming::new(link.node))).collect();
    let shared = Arc::new(Shared::new(cluster, me, config, links, epoll, stop));
    let network = {
        let shared = shared.clone();
        thread::Builder::new().name(format!("shuffle {}", me.0)).spawn(move || shared.serve(incoming))?
    };
    Ok(Node { shared, network: Some(network), _seat: listener })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Seat;

    #[test]
    fn a_host_that_is_gone_without_a_word_is_noticed() {
        let seats: Vec<_> = (0..2).map(|_| Seat::bind(([127, 0, 0, 1], 0).into()).unwrap()).collect();
        let processes: Vec<_> = seats.iter().map(|seat| (seat.address().unwrap(), 1)).collect();
        let cluster = Cluster::new(1, &processes).unwrap();
        let joining: Vec<_> = (0..)
            .map(NodeId)
            .zip(seats)
            .map(|(me, seat)| {
                let cluster = cluster.clone();
                thread::spawn(move || Node::join(seat, cluster, me, Config::default()).unwrap())
            })
            .collect();
        let nodes: Vec<_> = joining.into_iter().map(|joining| joining.join().unwrap()).collect();
        for node in &nodes {
            assert!(node.shared.links().all(|link| socket::is_prepared(&link.stream)));
        }
    }
}
