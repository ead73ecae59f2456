//! A process of the cluster: its links, its shuffles, and the network thread that serves them.

use std::collections::HashMap;
use std::net::Shutdown;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use arrow_buffer::Buffer;
use nix::sys::epoll::{Epoll, EpollEvent, EpollTimeout};
use nix::sys::eventfd::EventFd;

use super::Config;
use super::exchange::{Exchange, Fault};
use super::inbox::Item;
use super::incoming::{Incoming, Progress};
use super::link::{Frame, Link};
use super::wire::{Head, Kind};
use crate::numbers::Numbers;
use crate::{Cluster, Error, NodeId, Pool, Result, WorkerId, deadline};

/// The eventfd among the processes' numbers.
pub(super) const STOP: u64 = u64::MAX;

#[derive(Debug, Default)]
struct Shuffles {
    live: HashMap<u64, Arc<Exchange>>,
    /// Those that are over: what still comes for them is dropped.
    over: Numbers,
    closed: bool,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) cluster: Cluster,
    pub(super) me: NodeId,
    pub(super) config: Config,
    pub(super) pool: Pool,
    /// By process; none for this one.
    pub(super) links: Vec<Option<Link>>,
    pub(super) epoll: Arc<Epoll>,
    pub(super) stop: EventFd,
    shuffles: Mutex<Shuffles>,
    over: Condvar,
}

impl Shared {
    pub(super) fn new(
        cluster: Cluster,
        me: NodeId,
        config: Config,
        links: Vec<Option<Link>>,
        epoll: Arc<Epoll>,
        stop: EventFd,
    ) -> Self {
        let pool = Pool::new(config.pool);
        let (shuffles, over) = (Mutex::default(), Condvar::new());
        Self { cluster, me, config, pool, links, epoll, stop, shuffles, over }
    }

    pub(super) fn links(&self) -> impl Iterator<Item = &Link> {
        self.links.iter().flatten()
    }

    fn link(&self, node: NodeId) -> &Link {
        self.links[node.index()].as_ref().expect("another process")
    }

    /// A shuffle whose halves are about to be handed out.
    pub(super) fn open(&self, id: u64) -> Result<Arc<Exchange>> {
        let exchange = {
            let mut shuffles = self.lock();
            if shuffles.closed {
                return Err(Error::Closed);
            }
            if shuffles.over.contains(id) {
                return Err(Error::Taken(format!("shuffle {id}")));
            }
            shuffles.get(id, self)
        };
        if !exchange.open() {
            return Err(Error::Taken(format!("shuffle {id}")));
        }
        for link in self.links() {
            if let Some(error) = link.ended()
                && exchange.needs(&self.cluster, link.node)
            {
                self.fail(&exchange, &error);
            }
        }
        Ok(exchange)
    }

    /// Tells everybody in this process that a shuffle has failed.
    pub(super) fn fail(&self, exchange: &Exchange, error: &Error) {
        if exchange.fail(error) {
            self.links().for_each(Link::fail_lane);
            self.settle(exchange);
        }
    }

    /// A worker of this process has ended, or has given up.
    pub(super) fn sender_gone(&self, exchange: &Exchange, worker: WorkerId, gave_up: Option<&str>) {
        if let Some(why) = gave_up {
            let error = Error::GaveUp { worker, why: why.to_owned() };
            let first = exchange.failed().is_none();
            self.fail(exchange, &error);
            // Those who have failed for another reason say so as well: there may be processes that do not know yet.
            let error =
                exchange.failed().filter(|_| !first).map_or(why.to_owned(), |error| error.to_string());
            self.links().for_each(|link| link.notify(Frame::gave_up(exchange.id, worker, &error)));
        }
        if exchange.sender_gone() {
            self.links().for_each(|link| link.close_lane(exchange.id));
        }
        self.tidy(exchange);
    }

    pub(super) fn receiver_gone(&self, exchange: &Exchange) {
        exchange.receiver_gone();
        self.tidy(exchange);
    }

    /// Forgets a shuffle in which nothing will happen any more.
    fn tidy(&self, exchange: &Exchange) {
        if exchange.is_over() {
            let mut shuffles = self.lock();
            shuffles.live.remove(&exchange.id);
            shuffles.over.insert(exchange.id);
            self.over.notify_all();
        }
    }

    /// Tells a process what of its rows has been read.
    pub(super) fn credit(&self, exchange: &Exchange, node: NodeId, bytes: u64) {
        if bytes > 0 {
            self.link(node).free(exchange.id, bytes);
        }
    }

    /// Tells all processes, before a worker sleeps: one that waits for room for a large frame needs all of it.
    pub(super) fn settle(&self, exchange: &Exchange) {
        for link in self.links() {
            self.credit(exchange, link.node, exchange.settle(link.node));
        }
    }

    /// Refuses new shuffles, and waits until those that were opened here are over, or until `deadline`.
    pub(super) fn wind_down(&self, deadline: Instant) -> bool {
        let mut shuffles = self.lock();
        shuffles.closed = true;
        while shuffles.live.values().any(|exchange| exchange.opened()) {
            let Some(rest) = deadline.checked_duration_since(Instant::now()) else { return false };
            shuffles = self.over.wait_timeout(shuffles, rest).expect("nobody panics with it").0;
        }
        true
    }

    /// Ends all connections, and with them every shuffle.
    pub(super) fn shut(&self) {
        self.lock().closed = true;
        self.links().for_each(|link| link.end(&Error::Closed, Shutdown::Both));
        let live: Vec<_> = self.lock().live.values().cloned().collect();
        live.iter().for_each(|exchange| self.fail(exchange, &Error::Closed));
    }

    fn lock(&self) -> MutexGuard<'_, Shuffles> {
        self.shuffles.lock().expect("nobody panics with it")
    }

    /// The network thread. Returns when it is told to, or when all processes have left and this one is leaving.
    pub(super) fn serve(&self, incoming: Vec<Option<Incoming>>) {
        let mut incoming = incoming;
        let mut events = vec![EpollEvent::empty(); incoming.len() + 1];
        let mut leaving = None;
        loop {
            let timeout = match leaving {
                None => EpollTimeout::NONE,
                Some(deadline) if incoming.iter().any(Option::is_some) => {
                    let rest = Instant::now();
                    let Some(rest) = Instant::checked_duration_since(&deadline, rest) else { return };
                    EpollTimeout::try_from(rest + Duration::from_millis(1)).unwrap_or(EpollTimeout::NONE)
                }
                Some(_) => return,
            };
            let count = match self.epoll.wait(&mut events, timeout) {
                Ok(count) => count,
                Err(nix::errno::Errno::EINTR) => 0,
                Err(error) => return self.broken(&format!("epoll_wait: {error}")),
            };
            for event in &events[..count] {
                if event.data() == STOP {
                    let _ = self.stop.read(); // written once
                    leaving = Some(deadline::after(self.config.patience));
                    continue;
                }
                let node = event.data() as usize;
                let Some(Some(of_node)) = incoming.get_mut(node) else { continue };
                let link = of_node.link(self);
                if event.events().contains(nix::sys::epoll::EpollFlags::EPOLLOUT) {
                    link.writable();
                }
                let readable = !(event.events() - nix::sys::epoll::EpollFlags::EPOLLOUT).is_empty();
                if readable && let Err(error) = self.receive(of_node) {
                    let _ = self.epoll.delete(&link.stream); // closing would do it, too
                    self.lost(link.node, &error);
                    incoming[node] = None;
                }
            }
        }
    }

    /// What a link has, up to a bound. An error if nothing more will come from it.
    fn receive(&self, incoming: &mut Incoming) -> Result<()> {
        self.receive_some(incoming, super::STEPS)
    }

    fn receive_some(&self, incoming: &mut Incoming, steps: usize) -> Result<()> {
        let node = incoming.node();
        let mut step = 0;
        // Of a head that has been read with the frame before it no event will tell.
        while step < steps || incoming.has_head() {
            step += 1;
            match incoming.progress(self)? {
                Progress::Empty => break,
                Progress::Some => {}
                Progress::Frame(head, memory) => {
                    self.frame(node, head, memory).map_err(|fault| match fault {
                        Some(why) => Error::Protocol { node, why },
                        None => Error::Left(node),
                    })?;
                }
            }
        }
        Ok(())
    }

    /// One frame. An error of None is the process' farewell.
    fn frame(&self, node: NodeId, head: Head, memory: Buffer) -> std::result::Result<(), Option<Fault>> {
        match head.kind {
            Kind::Goodbye => return Err(None),
            Kind::Credit => {
                return match self.link(node).credit(head.shuffle, head.value) {
                    true => Ok(()),
                    false => Err(Some(format!("credit for {} bytes that it never got", head.value))),
                };
            }
            Kind::Rows | Kind::End | Kind::GaveUp => {}
        }
        if !self.cluster.workers_of(node).contains(&head.source.0) {
            return Err(Some(format!("a frame of {}", head.source)));
        }
        let exchange = {
            let mut shuffles = self.lock();
            if shuffles.over.contains(head.shuffle) {
                drop(shuffles);
                if head.kind == Kind::Rows {
                    self.link(node).free(head.shuffle, memory.len() as u64);
                }
                return Ok(());
            }
            if !shuffles.live.contains_key(&head.shuffle) && shuffles.live.len() >= super::SHUFFLES {
                return Err(Some("too many shuffles at a time".into()));
            }
            shuffles.get(head.shuffle, self)
        };
        match head.kind {
            Kind::Rows => {
                let item = Item::Frame { source: head.source, node, memory };
                let free = exchange.rows(item, head.target, self.config.window as u64)?;
                self.credit(&exchange, node, free);
            }
            Kind::End => {
                exchange.source_ended(head.source)?;
                self.tidy(&exchange);
            }
            _ => {
                let why = String::from_utf8_lossy(&memory).into_owned();
                self.fail(&exchange, &Error::GaveUp { worker: head.source, why });
                self.tidy(&exchange);
            }
        }
        Ok(())
    }

    /// Nothing will come from a process any more, and nothing can be sent to it.
    fn lost(&self, node: NodeId, error: &Error) {
        let how = if matches!(error, Error::Left(_)) { Shutdown::Write } else { Shutdown::Both };
        self.link(node).end(error, how);
        let live: Vec<_> = self.lock().live.values().cloned().collect();
        for exchange in live {
            if exchange.needs(&self.cluster, node) {
                self.fail(&exchange, error);
                self.tidy(&exchange);
            }
        }
    }

    fn broken(&self, why: &str) {
        for link in self.links() {
            self.lost(link.node, &Error::Gone { node: self.me, why: why.to_owned() });
        }
    }
}

impl Shuffles {
    fn get(&mut self, id: u64, shared: &Shared) -> Arc<Exchange> {
        let new = || Arc::new(Exchange::new(id, &shared.cluster, shared.me, shared.config.outgoing));
        self.live.entry(id).or_insert_with(new).clone()
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::{TcpListener, TcpStream};

    use nix::sys::epoll::EpollCreateFlags;

    use super::*;

    /// The head of the last frame came with the one before it, so no event will tell of it.
    #[test]
    fn a_turn_does_not_end_before_a_head_that_has_been_read() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = listener.accept().unwrap().0;
        stream.set_nonblocking(true).unwrap();
        let cluster = Cluster::new(1, &[(([127, 0, 0, 1], 1).into(), 1); 2]).unwrap();
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let link = Link::new(NodeId(1), stream, 1 << 20, 1 << 20, epoll.clone());
        let stop = EventFd::new().unwrap();
        let shared =
            Shared::new(cluster.clone(), NodeId(0), Config::default(), vec![None, Some(link)], epoll, stop);
        let exchange = shared.open(1).unwrap();

        let rows = Head { length: 64, ..Head::new(Kind::Rows, 1, WorkerId(1)) };
        let end = Head::new(Kind::End, 1, WorkerId(1));
        peer.write_all(&[&rows.to_bytes()[..], &[0; 64], &end.to_bytes()].concat()).unwrap();
        let mut incoming = Incoming::new(NodeId(1));
        // The first head, what it means, and the body with the second head.
        shared.receive_some(&mut incoming, 3).unwrap();
        assert!(!exchange.needs(&cluster, NodeId(1)), "the end has been understood");
    }

    #[test]
    fn shuffles_that_are_over_take_no_memory() {
        let cluster = Cluster::new(1, &[(([127, 0, 0, 1], 1).into(), 1)]).unwrap();
        let epoll = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).unwrap());
        let stop = EventFd::new().unwrap();
        let shared = Shared::new(cluster, NodeId(0), Config::default(), vec![None], epoll, stop);
        for id in 0..10_000 {
            let exchange = shared.open(id).unwrap();
            exchange.source_ended(WorkerId(0)).unwrap();
            shared.receiver_gone(&exchange);
            shared.sender_gone(&exchange, WorkerId(0), None);
        }
        let shuffles = shared.lock();
        assert_eq!((shuffles.live.len(), shuffles.over.ranges()), (0, 1));
    }
}
