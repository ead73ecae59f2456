//! How a connection with another host leaves TCP: the greetings go in front of the application's bytes, and no reader
//! that has the library hands them on.
//!
//! Only where a rule names the peer ([`crate::peers`]). The client's first bytes carry HELLO. A server whose client may
//! say HELLO is active from its first call on, so that every read looks for it first; its own first bytes carry the
//! reply. The client is ready when it has read the reply, and tells the server so by RDMA.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::BorrowedFd;
use std::sync::MutexGuard;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::arena::{Role, State, flag};
use crate::buffers::Buffers;
use crate::connection::Connection;
use crate::failover::{Unread, has_switched};
use crate::greeting::{self, Kind, LENGTH, Nonce, Opening, Seal};
use crate::reason::Reason;
use crate::segment::{Greeting, Segment};
use crate::settings::settings;
use crate::settle::{PATIENCE, SHORT_PATIENCE, lock_until, nap};
use crate::stream::transmit;
use crate::uninterrupted::Uninterrupted;
use crate::verbs::board::Memory;
use crate::verbs::link::Link;
use crate::verbs::{Endpoint, Progress, routes};
use crate::waiting::add;
use crate::{process, tcp};

/// How long a byte by which greetings begin, too, may be all there is of one.
const LONE_BYTE: Duration = Duration::from_millis(50);

/// Whether a rule names the peer.
pub(crate) const UNKNOWN: u8 = 0;
/// As [`UNKNOWN`].
pub(crate) const NO: u8 = 1;
/// As [`UNKNOWN`].
pub(crate) const YES: u8 = 2;

impl Connection {
    /// Whether a rule names the peer, as far as its address is known.
    pub(crate) fn is_covered(&self, fd: i32) -> bool {
        match self.covered.load(Ordering::Relaxed) {
            UNKNOWN => self.look_up_rule(fd),
            answer => answer == YES,
        }
    }

    #[cold]
    fn look_up_rule(&self, fd: i32) -> bool {
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        let Ok((local, peer)) = tcp::addresses(unsafe { BorrowedFd::borrow_raw(fd) }) else { return false };
        let server = if self.block.role() == Role::Client { peer } else { local };
        let covered =
            settings().selects(server.port()) && settings().verbs.covers(local, peer, server.port());
        self.covered.store(if covered { YES } else { NO }, Ordering::Relaxed);
        if covered {
            self.block.set_addresses(local, peer);
        }
        covered
    }

    /// Whether the first bytes that the kernel gives may be a HELLO, which no application must read. While the connection is
    /// active [`Self::greet`] takes care.
    pub fn may_hear_hello(&self) -> bool {
        self.covered.load(Ordering::Relaxed) == YES
            && self.block.role() == Role::Server
            && !self.block.has(flag::HEARD)
            && self.block.state() != State::Active
    }

    /// Whether the hooks see all reads of a connection that stays on TCP for `reason`.
    fn stays_in_sight(reason: Reason) -> bool {
        matches!(
            reason,
            Reason::Exclusive
                | Reason::Oob
                | Reason::ZeroCopy
                | Reason::RcvLowat
                | Reason::ShutdownBeforeUpgrade
                | Reason::NoMemory
        )
    }

    /// Whether the connection may be kept on TCP for `reason`: not where a HELLO could come to somebody who does not know
    /// of it.
    pub(crate) fn may_pin(&self, reason: Reason) -> bool {
        !self.may_hear_hello() || Self::stays_in_sight(reason)
    }

    /// A call on a connection with a peer that a rule names, while it is on TCP: from now on every read looks for a
    /// greeting first.
    #[cold]
    pub(crate) fn await_greeting(&self, fd: i32) {
        let _uninterrupted = Uninterrupted::begin();
        let block = self.block;
        if !block.advance(State::Plain, State::Switching) {
            return;
        }
        let greeting = match block.role() {
            Role::Client => Greeting::OwesHello,
            Role::Server => Greeting::AwaitsHello,
        };
        let Ok(segment) = Segment::create_alone(block.role(), greeting) else {
            if block.role() == Role::Client {
                block.pin_switching(Reason::NoMemory);
            } else {
                // A HELLO may be under way, so it must be tried again before anybody reads.
                block.advance(State::Switching, State::Plain);
            }
            return;
        };
        block.owner_pid.store(process::id(), Ordering::Relaxed);
        block.owner_fd.store(fd.cast_unsigned(), Ordering::Relaxed);
        // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
        self.enter(unsafe { BorrowedFd::borrow_raw(fd) }, segment);
        block.note(Reason::PeerWithoutThallus);
        block.advance(State::Switching, State::Active);
    }

    fn seal(&self) -> Option<Seal<'static>> {
        let (local, peer) = (self.block.local()?, self.block.peer()?);
        let (client, server): (SocketAddr, SocketAddr) =
            if self.block.role() == Role::Client { (local, peer) } else { (peer, local) };
        Some(Seal { key: settings().verbs.key.as_deref(), client, server })
    }

    /// Sends the greeting that this side owes, and what the application sends behind it, in one piece. The caller holds
    /// the send lock.
    pub(crate) fn send_with_greeting(
        &self,
        fd: i32,
        segment: &Segment,
        source: &mut Buffers<'_>,
        flags: i32,
    ) -> Result<usize, Errno> {
        let _uninterrupted = Uninterrupted::begin();
        let Some(seal) = self.seal() else { return Err(Errno::NOTCONN) };
        let (greeting, refused) = match segment.greeting() {
            Greeting::OwesReply => self.reply(segment, seal),
            _ => match self.hello() {
                Ok(hello) => (Some(hello), None),
                Err(reason) => {
                    segment.set_greeting(Greeting::Done);
                    self.give_up(fd, reason);
                    return self.send_tcp(fd, source, flags);
                }
            },
        };
        let Some(greeting) = greeting else { return Err(Errno::CONNRESET) };
        let mut bytes = greeting.encode(seal);
        let mut parts = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; 16];
        // Little enough that the kernel takes it whole: a new socket has room for it.
        let count = source.window(4096, &mut parts);
        let mut list = [libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: LENGTH }; 17];
        list[1..].copy_from_slice(&parts);
        let sent = transmit(fd, &mut list[..=count], flags | libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL)?;
        let Some(sent) = sent.checked_sub(LENGTH) else {
            // Half a greeting has gone: nothing can follow it.
            self.block.raise(flag::PEER_GONE | flag::RESET);
            return Err(Errno::CONNRESET);
        };
        self.greeting_has_gone(segment);
        add(&self.block.tcp_sent, sent as u64);
        source.advance_over(sent);
        match refused {
            None => self.block.note(Reason::NoAnswer),
            Some(reason) => self.give_up(fd, reason),
        }
        if source.left() == 0 {
            return Ok(sent);
        }
        Ok(sent + self.send_tcp(fd, source, flags).unwrap_or(0))
    }

    /// This side does not owe a greeting any more.
    fn greeting_has_gone(&self, segment: &Segment) {
        segment.note_greeting_sent(LENGTH as u32);
        let next = if self.block.role() == Role::Client { Greeting::AwaitsReply } else { Greeting::Done };
        segment.set_greeting(next);
    }

    /// A process was killed that held the send lock, and the kernel has been given `sent` bytes in all: if the greeting that
    /// was owed is among them, it is not owed again.
    pub(crate) fn inherit_greeting(&self, segment: &Segment, sent: u64) {
        let owed = matches!(segment.greeting(), Greeting::OwesHello | Greeting::OwesReply);
        // It goes out with the first bytes.
        if owed && sent >= self.block.tcp_sent.load(Ordering::Relaxed) + LENGTH as u64 {
            self.greeting_has_gone(segment);
        }
    }

    /// The greeting has been taken that was awaited.
    fn greeting_has_come(&self, segment: &Segment) {
        segment.note_greeting_taken(LENGTH as u32);
        self.block.raise(flag::HEARD);
        segment.set_greeting(Greeting::Done);
    }

    /// A process was killed that held the receive lock, and `read` bytes have been taken from the kernel in all: if they are
    /// the greeting that was awaited, what it said is lost, and the connection stays on TCP.
    pub(crate) fn inherit_hearing(&self, segment: &Segment, read: u64) {
        let awaited = matches!(segment.greeting(), Greeting::AwaitsHello | Greeting::AwaitsReply);
        // Nothing else is taken before it.
        if awaited && read >= LENGTH as u64 {
            self.greeting_has_come(segment);
        }
    }

    /// Client: what to say, with a queue pair made for it. The caller holds the send lock.
    fn hello(&self) -> Result<greeting::Greeting, Reason> {
        let hello = |(link, nonce): &(Link, Nonce)| {
            let (endpoint, memory) = link.introduction();
            greeting::Greeting { kind: Kind::Hello, nonce: *nonce, endpoint, memory }
        };
        // It is there already if it could not be sent before.
        if let Some(pending) = self.pending().and_then(|pending| pending.as_ref().map(hello)) {
            return Ok(pending);
        }
        let local = self.block.local().ok_or(Reason::NoDevice)?;
        self.check_route()?;
        let mut nonce = Nonce::default();
        rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty())
            .map_err(|_| Reason::NoVerbs)?;
        let made = (Link::create(local)?, nonce);
        let greeting = hello(&made);
        *self.pending().ok_or(Reason::Refused)? = Some(made);
        Ok(greeting)
    }

    /// What this side offers as a client, to be held for a moment: a fork leaves it locked in the child if another thread has it then. What
    /// is there is not for the child anyway, which so waits for it no longer than any thread must.
    fn pending(&self) -> Option<MutexGuard<'_, Option<(Link, Nonce)>>> {
        lock_until(&self.pending, Instant::now() + SHORT_PATIENCE)
    }

    /// Server: the answer to the HELLO that waits in the segment, and if it is no, why. Else the segment has a queue pair that
    /// is connected to the client's from now on: as soon as the client has the reply, it may leave TCP, and another thread
    /// that reads here must see that before it takes a bell for the application's.
    fn reply(&self, segment: &Segment, seal: Seal<'_>) -> (Option<greeting::Greeting>, Option<Reason>) {
        let mut bytes = [0u8; LENGTH];
        // SAFETY: room for a greeting, which nobody writes to now.
        unsafe { std::ptr::copy_nonoverlapping(segment.hello().as_ptr(), bytes.as_mut_ptr(), LENGTH) };
        let Opening::Whole(hello) = greeting::Greeting::decode(&bytes, seal, None) else {
            return (None, Some(Reason::BadOffer));
        };
        // It is there already if the reply could not be sent before.
        let refused = if segment.link().is_some() {
            None
        } else {
            let local = self.check_route().and_then(|()| self.block.local().ok_or(Reason::NoDevice));
            let link = local.and_then(Link::create).and_then(|mut link| {
                link.connect(hello.endpoint, hello.memory, Role::Server, seal.client, hello.nonce)?;
                Ok(link)
            });
            link.map(|link| segment.attach(link)).err()
        };
        let (kind, (endpoint, memory)) = match (refused, segment.link()) {
            (None, Some(link)) => (Kind::Reply, link.introduction()),
            (reason, _) => {
                let reason = reason.unwrap_or(Reason::Refused);
                (Kind::Refusal(reason), (Endpoint::default(), Memory::default()))
            }
        };
        (Some(greeting::Greeting { kind, nonce: hello.nonce, endpoint, memory }), refused)
    }

    /// Before a read: takes a greeting that precedes the application's bytes. True if what is there now, and comes, is
    /// the application's. The caller holds the receive lock.
    pub(crate) fn greet(&self, fd: i32, segment: &Segment) -> bool {
        if self.block.has(flag::BELLS_FIRST | flag::LOST) {
            self.let_writers_hear();
            return !self.block.has(flag::LOST) && self.skip_last_bells(fd, segment);
        }
        match segment.greeting() {
            Greeting::Done | Greeting::OwesReply => true,
            Greeting::Connects => {
                self.go_on_connecting(fd, segment);
                true
            }
            Greeting::AwaitsDown | Greeting::Skips => self.take_down_frame(fd, segment, Unread::Stays),
            Greeting::OwesHello | Greeting::AwaitsHello | Greeting::AwaitsReply => {
                self.look_for_greeting(fd, segment, None)
            }
        }
    }

    /// As [`Self::greet`], where a greeting may come. If this side `declines`, for that reason, it is not answered.
    #[cold]
    pub(crate) fn look_for_greeting(&self, fd: i32, segment: &Segment, declines: Option<Reason>) -> bool {
        let _uninterrupted = Uninterrupted::begin();
        let awaited = segment.greeting();
        let declines = declines.or_else(|| self.block.has(flag::DECLINES).then(|| self.block.reason()));
        let nonce = match awaited {
            Greeting::AwaitsReply => self.pending().and_then(|pending| Some(pending.as_ref()?.1)),
            _ => None,
        };
        if self.is_closed() {
            return true;
        }
        let mut bytes = [0u8; LENGTH];
        let Some(opening) = self.opening(fd, nonce, &mut bytes) else { return false };
        if self.is_closed() {
            // While the rest was waited for: the number may be somebody else's.
            return true;
        }
        if awaited == Greeting::OwesHello {
            // The server has spoken first: the client keeps its greeting to itself, unless it goes out at this moment.
            if let Ok(_guard) = self.lock_sending(fd)
                && segment.greeting() == Greeting::OwesHello
            {
                segment.set_greeting(Greeting::Done);
                self.give_up(fd, Reason::PeerSpokeFirst);
            }
            return segment.greeting() == Greeting::Done;
        }
        take(fd, opening);
        if opening == Opening::Foreign {
            self.block.raise(flag::HEARD);
            segment.set_greeting(Greeting::Done);
        } else {
            self.greeting_has_come(segment);
        }
        let result = match (awaited, opening) {
            _ if let Some(reason) = declines => Err(reason),
            (_, Opening::Foreign | Opening::Partial) => Err(Reason::PeerWithoutThallus),
            (Greeting::AwaitsHello, Opening::Whole(_)) => self.keep_hello(fd, segment, &bytes),
            (Greeting::AwaitsHello, Opening::Unusable(reason)) => Err(reason),
            (_, Opening::Whole(reply)) => self.agree(fd, segment, &reply),
            (_, Opening::Unusable(reason)) => Err(reason),
        };
        if let Err(reason) = result {
            self.give_up(fd, reason);
        }
        true
    }

    /// What the first bytes are that have come on TCP: see [`opening_of`].
    fn opening(&self, fd: i32, nonce: Option<Nonce>, bytes: &mut [u8; LENGTH]) -> Option<Opening> {
        let Some(seal) = self.seal() else { return Some(Opening::Foreign) };
        opening_of(fd, seal, nonce, bytes)
    }

    /// Before the kernel serves a read with `flags`, of a connection that stays on TCP although a HELLO may come, or for
    /// which there was no memory: waits as that read does, and takes a HELLO. Fails as the read would.
    pub fn pass_hello_by(&self, fd: i32, flags: i32) -> Result<(), Errno> {
        while self.may_hear_hello() {
            let mut byte = 0u8;
            let peek = libc::MSG_PEEK | flags & libc::MSG_DONTWAIT;
            // SAFETY: one writable byte.
            unsafe { (settings().sleep.recv)(fd, &raw mut byte, 1, peek) }?;
            let _uninterrupted = Uninterrupted::begin();
            let _guard = self.lock_receiving(fd)?;
            if !self.may_hear_hello() {
                break;
            }
            match self.opening(fd, None, &mut [0u8; LENGTH]) {
                None => {}
                Some(opening) => {
                    take(fd, opening);
                    self.block.raise(flag::HEARD);
                    self.block.pin(Reason::NoMemory);
                }
            }
        }
        Ok(())
    }

    /// Server: keeps the client's HELLO for the process that is the first to send. That is often not the first to read.
    fn keep_hello(&self, fd: i32, segment: &Segment, bytes: &[u8; LENGTH]) -> Result<(), Reason> {
        let _guard = self.lock_sending(fd).map_err(|_| Reason::Refused)?;
        // The client takes what comes first for the reply.
        if self.block.tcp_sent.load(Ordering::Relaxed) > 0 || self.block.has(flag::SHUT_WR | flag::SHUT_RD) {
            return Err(Reason::PeerSpokeFirst);
        }
        // SAFETY: room for a greeting, used under this lock.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), segment.hello().as_ptr(), LENGTH) };
        segment.set_greeting(Greeting::OwesReply);
        self.block.note(Reason::NoAnswer);
        Ok(())
    }

    /// Client: connects to the server that replied, or begins to.
    fn agree(&self, fd: i32, segment: &Segment, reply: &greeting::Greeting) -> Result<(), Reason> {
        if reply.kind != Kind::Reply {
            return Err(Reason::Refused);
        }
        let pending = self.pending().and_then(|mut pending| pending.take());
        let (mut link, nonce) = pending.ok_or(Reason::Refused)?;
        if !link.is_ours() {
            return Err(Reason::SharedBeforeUpgrade);
        }
        // Another connection may have found out meanwhile.
        self.check_route()?;
        let server = self.block.peer().ok_or(Reason::NoRoute)?;
        link.connect(reply.endpoint, reply.memory, Role::Client, server, nonce)?;
        if link.progress() == Progress::Connected {
            return self.enter_fabric(fd, segment, link);
        }
        *self.pending().ok_or(Reason::Refused)? = Some((link, nonce));
        segment.set_greeting(Greeting::Connects);
        Ok(())
    }

    /// Client: goes on connecting. The caller holds the receive lock, so that nobody reads a frame of the server's before the
    /// queue pair is in use.
    #[cold]
    pub(crate) fn go_on_connecting(&self, fd: i32, segment: &Segment) {
        let _uninterrupted = Uninterrupted::begin();
        // Another thread is at it, or will be.
        let Ok(mut pending) = self.pending.try_lock() else { return };
        let result = match pending.as_ref().map(|(link, _)| link.progress()) {
            None | Some(Progress::Pending) => return,
            Some(Progress::Failed) if tcp::peer_has_closed(fd) => Err(Reason::ShutdownBeforeUpgrade),
            Some(Progress::Failed) => Err(Reason::NoRoute),
            Some(Progress::Connected) => pending.take().map(|(link, _)| link).ok_or(Reason::NoRoute),
        };
        drop(pending);
        segment.set_greeting(Greeting::Done);
        if let Err(reason) = result.and_then(|link| self.enter_fabric(fd, segment, link)) {
            self.give_up(fd, reason);
        }
    }

    /// Client, before a fork, which can't use what this process offers or connects: stays on TCP.
    pub(crate) fn stop_introduction(&self, fd: i32, segment: &Segment) {
        // Most need no lock.
        if !matches!(segment.greeting(), Greeting::OwesHello | Greeting::AwaitsReply | Greeting::Connects) {
            return;
        }
        let Ok(_receiving) = self.lock_receiving(fd) else { return };
        // Also for a HELLO that goes out at this moment.
        let Ok(_sending) = self.lock_sending(fd) else { return };
        match segment.greeting() {
            Greeting::OwesHello | Greeting::Connects => {
                segment.set_greeting(Greeting::Done);
                self.give_up(fd, Reason::SharedBeforeUpgrade);
            }
            // Whichever process takes the reply does not heed it.
            Greeting::AwaitsReply => {
                self.block.note(Reason::SharedBeforeUpgrade);
                self.block.raise(flag::DECLINES);
            }
            _ => {}
        }
    }

    /// Client: tells the server that both are connected, and uses the queue pair from now on.
    fn enter_fabric(&self, fd: i32, segment: &Segment, link: Link) -> Result<(), Reason> {
        // A server that sends nothing more can't wake this side's sleepers.
        if tcp::peer_has_closed(fd) || segment.is_refused() {
            return Err(Reason::ShutdownBeforeUpgrade);
        }
        if link.announce_ready(tcp::closed_unanswered(fd)).is_err() {
            if let (true, Some((local, peer))) = (link.was_unanswered(), self.hosts())
                && !tcp::peer_has_closed(fd)
            {
                routes::note_blocked(local, peer);
            }
            // From here on nothing reaches this side. Whether the server has left TCP before that can be seen.
            link.fail();
            let incoming = segment.incoming();
            link.inbox().scan(incoming);
            if !has_switched(incoming) {
                return Err(Reason::NoRoute);
            }
        }
        // First: a segment that is ready without it is one that both sides share.
        segment.attach(link);
        if segment.set_ready() {
            self.block.raise(flag::READY | flag::VERBS);
        } else {
            // Refused just now, but the server believes otherwise.
            self.fabric_failed(segment);
        }
        Ok(())
    }

    fn hosts(&self) -> Option<(IpAddr, IpAddr)> {
        Some((self.block.local()?.ip(), self.block.peer()?.ip()))
    }

    /// Fails where RDMA is known not to get through: it would take a call as long again to find that out.
    fn check_route(&self) -> Result<(), Reason> {
        match self.hosts() {
            Some((local, peer)) if routes::is_blocked(local, peer) => Err(Reason::NoRoute),
            _ => Ok(()),
        }
    }

    /// Stays on TCP for good: nothing has left it.
    pub(crate) fn give_up(&self, fd: i32, reason: Reason) {
        // Ended after the lock has been given back: that takes a device's time.
        drop(self.pending().and_then(|mut pending| pending.take()));
        // Bytes in the side buffer come first: then the hooks stay in between.
        if self.side_length() == 0 && self.block.advance(State::Active, State::Switching) {
            self.restore_options(fd);
            self.block.pin_switching(reason);
        } else {
            self.block.note(reason);
        }
    }
}

/// What the first bytes are that have come on TCP, which stay there in `bytes`, too. `None`: there are none yet. Never
/// [`Opening::Partial`]: the rest of a greeting comes at once, if it does, and is waited for here, where neither a poll of bytes that are there
/// already nor an edge that has been would tell of its not coming.
fn opening_of(fd: i32, seal: Seal<'_>, nonce: Option<Nonce>, bytes: &mut [u8; LENGTH]) -> Option<Opening> {
    let begun = Instant::now();
    loop {
        // Before the bytes are looked at: the rest may arrive in between, with the end.
        let is_all = tcp::peer_has_closed(fd);
        let peek = libc::MSG_PEEK | libc::MSG_DONTWAIT;
        // SAFETY: the buffer is writable for its length.
        let count = match unsafe { tcp::recv(fd, bytes.as_mut_ptr(), LENGTH, peek) } {
            Err(Errno::AGAIN | Errno::INTR) => return None,
            // The read itself will tell.
            Ok(0) | Err(_) => return Some(Opening::Foreign),
            Ok(count) => count,
        };
        let opening = greeting::Greeting::decode(&bytes[..count], seal, nonce);
        // A program may well begin with a zero, and wait for an answer, but hardly with what comes next.
        let patience = if count == 1 { LONE_BYTE } else { PATIENCE };
        if opening != Opening::Partial {
            return Some(opening);
        } else if is_all || begun.elapsed() >= patience {
            return Some(Opening::Foreign);
        }
        nap();
    }
}

/// Takes a greeting that is `opening` the stream. It is there, and nobody else reads.
fn take(fd: i32, opening: Opening) {
    if opening != Opening::Foreign {
        let mut bytes = [0u8; LENGTH];
        // SAFETY: the buffer is writable for its length.
        let _ = unsafe { tcp::recv(fd, bytes.as_mut_ptr(), LENGTH, libc::MSG_DONTWAIT) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reason::Reason;
    use std::io::Write;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::AsRawFd;

    fn pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        client.set_nodelay(true).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// What `server` finds, and how long it has looked.
    fn found(client: &TcpStream, server: &TcpStream) -> (Option<Opening>, Duration) {
        tcp::wait_for(server.as_raw_fd(), rustix::event::PollFlags::IN, Some(LONE_BYTE));
        let [client, address] = [client, server].map(|end| end.local_addr().unwrap());
        let seal = Seal { key: None, client, server: address };
        let begun = Instant::now();
        (opening_of(server.as_raw_fd(), seal, None, &mut [0; LENGTH]), begun.elapsed())
    }

    #[test]
    fn a_lone_byte_by_which_greetings_begin_is_the_applications() {
        let (mut client, server) = pair();
        assert_eq!(found(&client, &server).0, None);
        client.write_all(&[0]).unwrap();
        let (opening, time) = found(&client, &server);
        assert_eq!(opening, Some(Opening::Foreign));
        assert!(time >= LONE_BYTE);
    }

    #[test]
    fn what_ends_is_no_greeting_that_goes_on() {
        let (mut client, server) = pair();
        client.write_all(b"\x00\xf5THALLUS").unwrap();
        client.shutdown(Shutdown::Write).unwrap();
        let (opening, time) = found(&client, &server);
        assert_eq!(opening, Some(Opening::Foreign));
        assert!(time < PATIENCE);
    }

    #[test]
    fn the_rest_of_a_greeting_is_waited_for() {
        let (mut client, server) = pair();
        let mut greeting = [0; LENGTH];
        greeting[..15].copy_from_slice(b"\x00\xf5THALLUS-RDMA\xc3");
        client.write_all(&greeting[..2]).unwrap();
        let opening = std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(2 * LONE_BYTE);
                (&client).write_all(&greeting[2..]).unwrap();
            });
            found(&client, &server).0
        });
        assert_eq!(opening, Some(Opening::Unusable(Reason::OtherVersion)));
    }
}
