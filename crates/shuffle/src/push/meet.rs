//! How the processes of a cluster find each other.
//!
//! Each connects to all with higher numbers, which needs nobody's help (the kernel accepts), greets them, answers those with
//! lower numbers, and then reads the answers of the higher ones. So nobody waits for one that waits for it.

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
    let deadline = deadline::after(config.patience);
    let hello = Hello { node: me, window: config.window as u64 }.to_bytes(&cluster);
    let mut met: Vec<Option<(TcpStream, u64)>> = (0..cluster.nodes()).map(|_| None).collect();

    let mut asked = Vec::new();
    for node in (me.0 + 1..).take(cluster.nodes() - me.index() - 1).map(NodeId) {
        let mut stream = connect(&cluster, node, deadline)?;
        stream.write_all(&hello).map_err(Error::io("greet"))?;
        asked.push((node, stream));
    }
    answer(&listener, &cluster, me, &hello, deadline, &mut met)?;
    for (node, stream) in asked {
        let theirs =
            read_hello(&stream, &cluster, deadline).map_err(|why| Error::Join(format!("{node}: {why}")))?;
        if theirs.node != node {
            return Err(Error::Cluster(format!("{} is at the address of {node}", theirs.node)));
        }
        met[node.index()] = Some((stream, theirs.window));
    }
    begin(listener, cluster, me, config, met).map_err(Error::io("network thread"))
}

fn connect(cluster: &Cluster, node: NodeId, deadline: Instant) -> Result<TcpStream> {
    let address = cluster.address(node);
    loop {
        let rest = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        match socket::connect(&address, rest) {
            Ok(stream) => return Ok(stream),
            // Not there yet.
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && Instant::now() < deadline => {
                thread::sleep(PAUSE);
            }
            Err(error) => return Err(Error::Join(format!("{node} at {address}: {error}"))),
        }
    }
}

/// Answers the greetings of all with lower numbers. Strangers are sent away, and hold up nobody, whatever they say or don't.
fn answer(
    listener: &TcpListener,
    cluster: &Cluster,
    me: NodeId,
    hello: &[u8; HELLO],
    deadline: Instant,
    met: &mut [Option<(TcpStream, u64)>],
) -> Result<()> {
    let mut guests: VecDeque<Guest> = VecDeque::new();
    listener.set_nonblocking(true).map_err(Error::io("accept"))?;
    while met[..me.index()].iter().any(Option::is_none) {
        let Some(rest) = deadline.checked_duration_since(Instant::now()) else {
            return Err(Error::Join("not all processes have connected".into()));
        };
        let sockets = guests.iter().map(|guest| guest.stream.as_fd()).chain([listener.as_fd()]);
        let mut waited: Vec<_> = sockets.map(|socket| PollFd::new(socket, PollFlags::POLLIN)).collect();
        match poll(&mut waited, PollTimeout::try_from(rest).unwrap_or(PollTimeout::MAX)) {
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => continue,
            Err(error) => return Err(Error::io("accept")(error.into())),
        }
        let mut ready = waited.iter().map(|socket| socket.any() == Some(true)).collect::<Vec<_>>();
        let comes = ready.pop() == Some(true);
        for is_ready in ready {
            let mut guest = guests.pop_front().expect("as many as were waited for");
            if !is_ready || guest.read().is_ok_and(|whole| !whole) {
                guests.push_back(guest);
            } else if guest.have == HELLO
                && let Ok(theirs) = Hello::from_bytes(&guest.bytes, cluster)
                && theirs.node < me
                && met[theirs.node.index()].is_none()
                && guest.stream.write_all(hello).is_ok()
            {
                met[theirs.node.index()] = Some((guest.stream, theirs.window));
            }
        }
        if comes {
            match listener.accept().and_then(|(stream, _)| stream.set_nonblocking(true).map(|()| stream)) {
                Ok(stream) => guests.push_back(Guest { stream, bytes: [0; HELLO], have: 0 }),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(Error::io("accept")(error)),
            }
            if guests.len() > STRANGERS + cluster.nodes() {
                guests.pop_front();
            }
        }
    }
    Ok(())
}

/// Somebody who has connected, and not greeted.
struct Guest {
    stream: TcpStream,
    bytes: [u8; HELLO],
    have: usize,
}

impl Guest {
    /// Whether it has greeted now.
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

fn read_hello(stream: &TcpStream, cluster: &Cluster, deadline: Instant) -> Result<Hello> {
    let mut bytes = [0; HELLO];
    read_until(stream, &mut bytes, deadline).map_err(Error::io("greeting"))?;
    Hello::from_bytes(&bytes, cluster)
}

/// Fills `bytes`, until `deadline` in all.
fn read_until(mut stream: &TcpStream, bytes: &mut [u8], deadline: Instant) -> io::Result<()> {
    let mut have = 0;
    while have < bytes.len() {
        let rest = deadline.checked_duration_since(Instant::now()).ok_or(io::ErrorKind::TimedOut)?;
        stream.set_read_timeout(Some(rest.max(Duration::from_millis(1))))?;
        match stream.read(&mut bytes[have..]) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => have += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
        stream.set_read_timeout(None)?;
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
