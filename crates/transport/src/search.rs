//! How a connection looks for its peer, and leaves TCP if it finds it: what is asked of the kernel and of the program first, and how
//! often. How the two meet is the business of [`crate::rendezvous`].

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::TryLockError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::arena::{Role, State};
use crate::connection::Connection;
use crate::experience;
use crate::reason::Reason;
use crate::rendezvous::{self, Ends, Failure, Service};
use crate::segment::Segment;
use crate::settings::settings;
use crate::uninterrupted::{Descriptor, Uninterrupted};
use crate::unix::{self, Name};
use crate::{arena::flag, process, tcp};

/// So many times as many calls as before the first look for the server's announcement come before the second and last.
const SECOND_LOOK: u32 = 8;
/// Calls after an offer during which each call looks for the answer.
const EAGER_CALLS: u32 = 64;
/// Calls after which an offer that nobody answered is withdrawn.
const PATIENT_CALLS: u32 = 4096;
/// Calls after which a server expects no offer any more. Far more than those after which a client makes one, because a server may
/// read in many pieces what its client has sent in one.
const HOPEFUL_CALLS: u32 = 1 << 16;

/// What the search for the peer has led to.
#[derive(Debug, Default)]
pub(crate) struct Bargain {
    ends: Option<Ends>,
    pub(crate) offer: Option<Descriptor>,
    /// The server's answer to it, before the segment.
    pub(crate) arrived: Option<Descriptor>,
    /// The segment that it has answered with, while it is in a call that moves bytes.
    met: Option<Segment>,
    offered_at: u32,
    /// The server's port was not announced when this client looked.
    unannounced: bool,
    /// Age of the connection at the first attempt, and calls before it.
    pub(crate) begun: Option<(Duration, u32)>,
    /// Time that all attempts took.
    spent: Duration,
}

impl Bargain {
    pub(crate) fn withdraw(&mut self) {
        self.offer = None;
        self.arrived = None;
        self.met = None;
    }
}

/// How a process waits for a connection to become readable, or writable, as far as the hooks have seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// By poll, select or an epoll set.
    Seen,
    /// It is in an epoll set, on which nobody has waited.
    Registered,
    /// Neither.
    None,
}

impl Waits {
    /// Whether the program may wait for the socket `fd` by system calls of its own, which bytes in memory would not end. Who
    /// blocks in its reads need not wait otherwise; who only tries, again and again, can't be told from such a program.
    fn escape(self, fd: BorrowedFd<'_>) -> bool {
        match self {
            Self::Seen => false,
            Self::Registered => true,
            // Asked each time: what made it so may not have been seen either.
            Self::None => {
                rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.contains(rustix::fs::OFlags::NONBLOCK))
            }
        }
    }
}

impl Connection {
    #[cold]
    pub(crate) fn attempt(&self, fd: i32, calls: u32, sole: impl Fn() -> bool, waits: impl Fn() -> Waits) {
        // A server that has read nothing may not be the one that reads, and answers no client. Neither loses time over that.
        let is_vain = match self.block.role() {
            Role::Client => {
                let has_offered = self.block.reason() == Reason::NoAnswer;
                has_offered && calls < PATIENT_CALLS && self.block.tcp_sent.load(Ordering::Relaxed) == 0
            }
            Role::Server => self.block.tcp_received.load(Ordering::Relaxed) == 0,
        };
        if is_vain && self.block.held_only_by(process::id()) {
            if self.block.role() == Role::Server {
                self.block.note(Reason::NothingRead);
            }
            return;
        }
        // A signal handler that read from this very connection would wait for the decision that it interrupts.
        let _uninterrupted = Uninterrupted::begin();
        let mut bargain = match self.bargain.try_lock() {
            Ok(bargain) => bargain,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return,
        };
        // Before the state says so: whoever is killed while it decides leaves others waiting for the decision.
        if !self.block.held_only_by(process::id()) {
            self.block.note(Reason::SharedBeforeUpgrade);
            self.next_attempt.store(calls.saturating_mul(2), Ordering::Relaxed);
            return;
        }
        if !self.block.advance(State::Plain, State::Switching) {
            return;
        }
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let borrowed = unsafe { BorrowedFd::borrow_raw(fd) };
        self.next_attempt.store(calls.saturating_add(1), Ordering::Relaxed);
        self.block.owner_pid.store(process::id(), Ordering::Relaxed);
        self.block.owner_fd.store(fd.cast_unsigned(), Ordering::Relaxed);
        let began = self.block.age();
        bargain.begun.get_or_insert((began, calls));
        let result = if !self.block.held_only_by(process::id()) {
            self.block.note(Reason::SharedBeforeUpgrade);
            self.next_attempt.store(calls.saturating_mul(2), Ordering::Relaxed);
            Err(Failure::NotYet)
        } else if !sole() {
            Err(Failure::NotYet)
        } else if self.block.uncounted.load(Ordering::SeqCst) != 0 {
            // A process was killed in it, and the kernel of an `AF_UNIX` socket can't be asked.
            Err(Failure::Stay(Reason::UnseenBytes))
        } else if waits().escape(borrowed) {
            self.block.note(Reason::UnseenWait);
            self.next_attempt.store(calls.saturating_mul(2), Ordering::Relaxed);
            Err(Failure::NotYet)
        } else {
            match self.block.role() {
                Role::Client => self.attempt_client(borrowed, calls, &mut bargain),
                Role::Server => self.attempt_server(borrowed, calls, &mut bargain),
            }
        };
        bargain.spent += self.block.age().saturating_sub(began);
        match result {
            Ok(()) => {
                bargain.withdraw();
                experience::left(self.block.role(), bargain.spent);
                self.block.advance(State::Switching, State::Active);
            }
            Err(Failure::NotYet) => {
                self.block.advance(State::Switching, State::Plain);
            }
            Err(Failure::Stay(reason)) => {
                bargain.withdraw();
                self.block.pin_switching(reason);
            }
        }
    }

    fn ends(&self, fd: BorrowedFd<'_>, bargain: &mut Bargain) -> Result<Ends, Failure> {
        if let Some(ends) = bargain.ends {
            return Ok(ends);
        }
        let is_client = self.block.role() == Role::Client;
        let ends = if self.is_unix() {
            if unix::tells_senders(fd) {
                return Err(Failure::Stay(Reason::ControlData));
            }
            let own = unix::inode(fd).map_err(|_| Failure::NotYet)?;
            if is_client {
                Ends::Unix { client: own, server: None }
            } else {
                let known = unix::look_up(own).map_err(rendezvous::no_diag)?;
                // What accept(2) gives is of the network namespace from which the client has connected.
                let client = known.map(|known| known.peer).ok_or_else(|| {
                    let is_here = tcp::is_of_this_network(fd);
                    Failure::Stay(if is_here { Reason::NoDiag } else { Reason::Remote })
                })?;
                Ends::Unix { client, server: Some(own) }
            }
        } else {
            // Not connected yet, or no longer: some later call will know.
            let (local, peer) = tcp::addresses(fd).map_err(|_| Failure::NotYet)?;
            // Names and owners are looked up in the network namespace of the process: the same addresses may be somebody else's there.
            if !tcp::is_of_this_network(fd) {
                return Err(Failure::Stay(Reason::Remote));
            }
            let (client, server) = if is_client { (local, peer) } else { (peer, local) };
            Ends::Internet { client, server }
        };
        // Set before the connection was ours, or by the listener; from now on the hooks see it.
        if let Some(reason) = tcp::unsupported(fd) {
            return Err(Failure::Stay(reason));
        }
        match ends {
            Ends::Internet { client, server } if is_client => self.block.set_addresses(client, server),
            Ends::Internet { client, server } => self.block.set_addresses(server, client),
            Ends::Unix { .. } => {
                let name = if is_client { Name::of_peer(fd) } else { Name::of_socket(fd) };
                self.block.set_name(name.as_ref());
            }
        }
        bargain.ends = Some(ends);
        Ok(ends)
    }

    /// Where the server listens.
    fn service(fd: BorrowedFd<'_>, ends: Ends) -> Result<Service, Failure> {
        match ends {
            Ends::Internet { server, .. } => Ok(Service::Port(server.port())),
            Ends::Unix { .. } => {
                let name = Name::of_peer(fd).ok_or(Failure::Stay(Reason::PeerWithoutThallus))?;
                Ok(Service::Unix(name))
            }
        }
    }

    fn attempt_client(&self, fd: BorrowedFd<'_>, calls: u32, bargain: &mut Bargain) -> Result<(), Failure> {
        let place = settings().place;
        let ends = self.ends(fd, bargain)?;
        let Bargain { offer: Some(offer), arrived, met, .. } = &mut *bargain else {
            let service = Self::service(fd, ends)?;
            let asks = !bargain.unannounced && experience::wants_advice(service.number());
            if asks && rendezvous::take_advice(service, place) {
                let patience = experience::patience(Role::Client, service.number());
                if patience > calls {
                    self.next_attempt.store(patience, Ordering::Relaxed);
                    return Err(Failure::NotYet);
                }
            }
            if !rendezvous::is_announced(service, place)? {
                if std::mem::replace(&mut bargain.unannounced, true) {
                    return Err(Failure::Stay(Reason::PeerWithoutThallus));
                }
                // Two listeners may have a port, of which one announces it, and the other once that has gone.
                self.block.note(Reason::PeerWithoutThallus);
                self.next_attempt.store(calls.saturating_mul(SECOND_LOOK), Ordering::Relaxed);
                return Err(Failure::NotYet);
            }
            bargain.offer = Some(rendezvous::offer(ends, place).map_err(Failure::Stay)?);
            bargain.offered_at = calls;
            self.block.note(Reason::NoAnswer);
            return Err(Failure::NotYet);
        };
        let meeting = match met.take() {
            Some(segment) => Ok(segment),
            None => rendezvous::collect(offer.as_fd(), arrived, ends, place),
        };
        let meeting = meeting.and_then(|segment| {
            let ended = self.is_unix() && unix::has_ended(fd.as_raw_fd());
            // A process that is killed can't refuse.
            if ended || tcp::peer_has_closed(fd.as_raw_fd()) || segment.is_refused() {
                return Err(Failure::Stay(Reason::ShutdownBeforeUpgrade));
            }
            let counts = match self.is_unix() {
                true => self.compare_counts(fd, &segment),
                false => self.check_counts(fd),
            };
            match counts {
                Ok(()) => Ok(segment),
                Err(failure) => {
                    // Of TCP the count is the kernel's, which does not lag.
                    *met = Some(segment).filter(|_| failure == Failure::NotYet && self.is_unix());
                    Err(failure)
                }
            }
        });
        match meeting {
            Ok(segment) => {
                // Before the server sees that it is ready, and may look for it.
                segment.exchange().give(place);
                if !segment.set_ready() {
                    return Err(Failure::Stay(Reason::ShutdownBeforeUpgrade));
                }
                self.enter(fd, segment);
                self.block.raise(flag::READY);
                Ok(())
            }
            Err(Failure::NotYet) => {
                let waited = calls.saturating_sub(bargain.offered_at);
                if waited >= PATIENT_CALLS {
                    return Err(Failure::Stay(Reason::NoAnswer));
                }
                if waited >= EAGER_CALLS {
                    self.next_attempt.store(calls.saturating_add(waited), Ordering::Relaxed);
                }
                Err(Failure::NotYet)
            }
            Err(stay) => Err(stay),
        }
    }

    fn attempt_server(&self, fd: BorrowedFd<'_>, calls: u32, bargain: &mut Bargain) -> Result<(), Failure> {
        let ends = self.ends(fd, bargain)?;
        self.check_counts(fd)?;
        match rendezvous::answer(ends, |segment| self.tell_counts(segment), settings().place) {
            Ok(segment) => {
                // Until the client is ready, which it may never be: it knows others by other ids, say.
                self.block.note(Reason::NoAnswer);
                self.enter(fd, segment);
                Ok(())
            }
            Err(Failure::NotYet) if calls >= HOPEFUL_CALLS => Err(Failure::Stay(Reason::PeerWithoutThallus)),
            Err(Failure::NotYet) => {
                self.block.note(Reason::PeerWithoutThallus);
                self.next_attempt.store(calls.saturating_mul(2), Ordering::Relaxed);
                Err(Failure::NotYet)
            }
            Err(stay) => Err(stay),
        }
    }
}
