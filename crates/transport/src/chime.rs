//! A bell that costs less than a byte on the connection, for who sleeps on several descriptors anyway.
//!
//! A bell on TCP goes through the kernel's whole stack and back, which takes both processors' caches with it. So each process has a
//! pair of `AF_UNIX` sockets: its *ear*, on which a thread may sleep beside the connection, and its *mouth*, of which every process
//! on this host that has met it holds a copy. A byte into the mouth wakes the thread.
//!
//! One thread of a process at a time [`Claim`]s the ear. Only it takes bytes out of it, so nobody takes the one that is to wake it;
//! whoever else goes to sleep is woken over TCP. A sleeper that listens is woken over TCP as well: it is the ringer's choice, who has to
//! take TCP if it has no mouth, if the mouth is full, or if anybody sleeps who does not listen ([`crate::waiting::ring`]).
//!
//! A mouth is shared by all to whom it was given. Any of them can fill it, or shut it: then the others ring over TCP. None can read what
//! the others wrote, make them wait, or raise a signal in them, as a holder of a pipe or an eventfd could.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, Weak};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair, sockopt,
};

use crate::rendezvous::{Place, dismiss};
use crate::settings::settings;
use crate::stream::BELL;
use crate::uninterrupted::{Descriptor, Uninterrupted};
use crate::{process, tcp};

/// Bells that may be left in an ear, of some 270 for which there is room by default (`net.core.wmem_default`).
const MOST_LEFT: u32 = 32;

const MAGIC: [u8; 8] = *b"THALLUSc";

/// Other processes' mouths that one process holds, at most.
const MOST_MOUTHS: u64 = 256;
/// And the part of its descriptors that these may be (`RLIMIT_NOFILE`).
const PART_OF_DESCRIPTORS: u64 = 16;
/// With fewer descriptors a process has no ear either.
const FEW_DESCRIPTORS: u64 = 256;

/// A process's own pair.
#[derive(Debug)]
struct Pair {
    pid: u32,
    ear: Descriptor,
    mouth: Descriptor,
    claimed: AtomicBool,
    /// Bells that [`Claim::hear_edge`] has left in the ear.
    left: AtomicU32,
    /// Somebody has shut the mouth, or put something in that can't be taken out.
    is_broken: AtomicBool,
}

/// Null before there is one. A fork's is its parent's until [`forked`].
static OWN: AtomicPtr<Pair> = AtomicPtr::new(std::ptr::null_mut());

/// Those of other processes, by the inode numbers of their sockets.
static MOUTHS: Mutex<Mouths> = Mutex::new(Vec::new());
type Mouths = Vec<(u64, Weak<Mouth>)>;

fn own() -> Option<&'static Pair> {
    // SAFETY: null, or leaked by `made`, and never freed.
    let pair = unsafe { OWN.load(Ordering::Acquire).as_ref() };
    pair.filter(|pair| pair.pid == process::id() && !pair.is_broken.load(Ordering::Relaxed))
}

fn descriptors() -> u64 {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current.unwrap_or(u64::MAX)
}

/// The process's pair, made now if there is none.
fn made(place: Place) -> Option<&'static Pair> {
    if OWN.load(Ordering::Acquire).is_null() && descriptors() >= FEW_DESCRIPTORS {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (ear, mouth) = socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None).ok()?;
        let (ear, mouth) = (place(ear).ok()?.into(), place(mouth).ok()?.into());
        let pair = Box::into_raw(Box::new(Pair {
            pid: process::id(),
            ear,
            mouth,
            claimed: AtomicBool::new(false),
            left: AtomicU32::new(0),
            is_broken: AtomicBool::new(false),
        }));
        let null = std::ptr::null_mut();
        if OWN.compare_exchange(null, pair, Ordering::AcqRel, Ordering::Acquire).is_err() {
            // SAFETY: made above, and nobody has seen it.
            drop(unsafe { Box::from_raw(pair) });
        }
    }
    own()
}

/// The mouth of this process, to be given to another one.
pub(crate) fn mouth(place: Place) -> Option<BorrowedFd<'static>> {
    made(place).map(|pair| pair.mouth.as_fd())
}

/// The right to sleep on this process's ear, of one thread.
#[derive(Debug)]
pub struct Claim(&'static Pair);

impl Claim {
    /// If the process has an ear, and no other thread sleeps on it. To be taken before anybody is announced who listens: what was left in
    /// the ear is thrown away, for a sleep that lasts as long as it is not readable.
    pub fn take() -> Option<Self> {
        let claim = Self::take_for_edges()?;
        claim.hush();
        Some(claim)
    }

    /// As [`Self::take`], for who is woken by each bell as it comes (`EPOLLET`), whatever was left.
    pub fn take_for_edges() -> Option<Self> {
        let pair = own()?;
        match pair.claimed.compare_exchange(false, true, Ordering::Acquire, Ordering::Relaxed) {
            Ok(_) => Some(Self(pair)),
            Err(_) => None,
        }
    }

    /// Throws away what [`Self::hear_edge`] has left. As [`Self::take`], before anybody is announced: a bell for them must not be lost.
    pub fn hush(&self) {
        if self.0.left.load(Ordering::Relaxed) > 0 {
            self.drain();
        }
    }

    /// What becomes readable when somebody rings.
    pub fn fd(&self) -> i32 {
        self.0.ear.as_fd().as_raw_fd()
    }

    /// Takes what has been rung. To be called when the ear is readable, and nobody counts on this sleeper any more, or before it
    /// looks for what it has been rung for.
    pub fn hear(&self) {
        if !self.drain() {
            // It would be readable for ever.
            self.0.is_broken.store(true, Ordering::Relaxed);
        }
    }

    /// As [`Self::hear`], after [`Self::take_for_edges`]: bells may be left, as long as there is room for the next. If several connections
    /// may ring they are taken: the next sleep would end with the bell of the second.
    pub fn hear_edge(&self, several: bool) {
        let left = self.0.left.fetch_add(1, Ordering::Relaxed);
        if several || left >= MOST_LEFT {
            self.drain();
        }
    }

    /// Whether there was anything.
    fn drain(&self) -> bool {
        self.0.left.store(0, Ordering::Relaxed);
        let (mut bells, mut any) = ([0u8; 256], false);
        loop {
            // SAFETY: `bells` is writable.
            match unsafe { tcp::recv(self.fd(), bells.as_mut_ptr(), bells.len(), libc::MSG_DONTWAIT) } {
                Ok(count) if count == bells.len() => any = true,
                Ok(1..) | Err(Errno::INTR) => return true,
                _ => return any,
            }
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.0.claimed.store(false, Ordering::Release);
    }
}

/// Wakes the thread of this process that sleeps on its ear, if one does.
pub fn rouse() {
    if let Some(pair) = own() {
        ring(&pair.mouth);
    }
}

fn ring(mouth: &Descriptor) -> bool {
    let fd = mouth.as_fd().as_raw_fd();
    // SAFETY: one readable byte.
    unsafe { tcp::send(fd, &BELL, 1, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }.is_ok()
}

/// By which another process is woken.
#[derive(Debug)]
pub struct Mouth(Descriptor);

impl Mouth {
    /// True if it will wake.
    pub(crate) fn ring(&self) -> bool {
        ring(&self.0)
    }

    /// Takes a descriptor for what the peer, of user `uid`, says it is. `None` if it is something else, or one too many.
    pub(crate) fn adopt(fd: OwnedFd, uid: u32, place: Place) -> Option<Arc<Self>> {
        let is_mouth = sockopt::socket_domain(&fd) == Ok(AddressFamily::UNIX)
            && sockopt::socket_type(&fd) == Ok(SocketType::STREAM)
            // Of a pair both ends name who made it. No byte of ours goes to anybody else.
            && tcp::user_of_peer(fd.as_fd()) == Ok(uid);
        if !is_mouth {
            dismiss(fd);
            return None;
        }
        let number = rustix::fs::fstat(&fd).ok()?.st_ino;
        let held = {
            let mut mouths = MOUTHS.lock().ok()?;
            mouths.retain(|(_, mouth)| mouth.strong_count() > 0);
            let known = mouths.iter().find(|(known, _)| *known == number);
            if let Some(mouth) = known.and_then(|(_, mouth)| mouth.upgrade()) {
                return Some(mouth);
            }
            mouths.len() as u64
        };
        if held >= MOST_MOUTHS.min(descriptors() / PART_OF_DESCRIPTORS) {
            return None;
        }
        // Not under the lock: to close the old number may ask whether it is one of ours.
        let mouth = Arc::new(Self(place(fd).ok()?.into()));
        MOUTHS.lock().ok()?.push((number, Arc::downgrade(&mouth)));
        Some(mouth)
    }
}

/// How the two ends of a connection give each other their mouths.
#[derive(Debug, Default)]
pub(crate) struct Exchange {
    /// The user at the other end.
    uid: u32,
    /// By which the peer's process is woken, once it is known whether it can be.
    mouth: OnceLock<Option<Arc<Mouth>>>,
    /// Where the peer sends its mouth, or is to be sent this process's.
    mail: Mutex<Option<Descriptor>>,
    /// The process that has given the peer its mouth; 0 if none has.
    given_by: AtomicU32,
}

impl Exchange {
    /// Client: the peer's mouth has come with the segment, and over `mail` it waits for this process's.
    pub(crate) fn of_client(uid: u32, mouth: Option<Arc<Mouth>>, mail: Descriptor) -> Self {
        Self { uid, mouth: OnceLock::from(mouth), mail: Mutex::new(Some(mail)), given_by: AtomicU32::new(0) }
    }

    /// Server: the peer has been given this process's mouth, or not, and its own will come over `mail`.
    pub(crate) fn of_server(uid: u32, given: bool, mail: Descriptor) -> Self {
        let given_by = AtomicU32::new(if given { process::id() } else { 0 });
        Self { uid, mouth: OnceLock::new(), mail: Mutex::new(Some(mail)), given_by }
    }

    /// Client: gives the server this process's mouth, if it is to have one. To be called before the server may see that the client
    /// is ready.
    pub(crate) fn give(&self, place: Place) {
        let mail = self.mail.try_lock().ok().and_then(|mut mail| mail.take());
        if let Some(mail) = mail
            && give(mail.as_fd(), place)
        {
            self.given_by.store(process::id(), Ordering::Relaxed);
        }
    }

    /// Whether the peer can wake this process by its ear.
    pub(crate) fn has_given(&self) -> bool {
        self.given_by.load(Ordering::Relaxed) == process::id()
    }

    /// By which the peer's process is woken, if it has given that.
    pub(crate) fn mouth(&self) -> Option<&Mouth> {
        match self.mouth.get() {
            Some(mouth) => mouth.as_deref(),
            None => self.fetch(),
        }
    }

    #[cold]
    fn fetch(&self) -> Option<&Mouth> {
        let _uninterrupted = Uninterrupted::begin();
        // In a fork the parent's thread may have it for ever.
        let mut mail = self.mail.try_lock().ok()?;
        let socket = mail.take()?;
        match receive(socket.as_fd(), self.uid, settings().place) {
            Ok(mouth) => {
                let _ = self.mouth.set(mouth);
            }
            Err(_) => *mail = Some(socket),
        }
        drop(mail);
        self.mouth.get()?.as_deref()
    }

    /// The descriptor over which mouths are exchanged.
    pub(crate) fn mail_fd(&self) -> Option<i32> {
        self.mail.try_lock().ok()?.as_ref().map(|mail| mail.as_fd().as_raw_fd())
    }
}

/// Sends this process's mouth over `socket`, or that it has none. True if it has gone.
fn give(socket: BorrowedFd<'_>, place: Place) -> bool {
    let mouth = mouth(place);
    let fds = mouth.as_slice();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() {
        control.push(SendAncillaryMessage::ScmRights(fds));
    }
    let message = [std::io::IoSlice::new(&MAGIC)];
    sendmsg(socket, &message, &mut control, SendFlags::NOSIGNAL).is_ok() && mouth.is_some()
}

/// What has been [`give`]n by the peer, of user `uid`. `Err` if nothing has come yet.
fn receive(socket: BorrowedFd<'_>, uid: u32, place: Place) -> Result<Option<Arc<Mouth>>, Errno> {
    let mut message = [0; MAGIC.len()];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut list = [std::io::IoSliceMut::new(&mut message)];
    let count = match recvmsg(socket, &mut list, &mut control, RecvFlags::CMSG_CLOEXEC) {
        Ok(received) => received.bytes,
        Err(errno @ (Errno::AGAIN | Errno::INTR)) => return Err(errno),
        Err(_) => return Ok(None),
    };
    let fd = control.drain().find_map(|part| match part {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    let is_greeting = count == MAGIC.len() && message == MAGIC;
    Ok(match fd {
        Some(fd) if is_greeting => Mouth::adopt(fd, uid, place),
        fd => {
            fd.into_iter().for_each(dismiss);
            None
        }
    })
}

/// This process's descriptors of this kind: its own pair's, and other processes' mouths.
pub fn internal_fds() -> Vec<i32> {
    // SAFETY: as for `own`.
    let pair = unsafe { OWN.load(Ordering::Acquire).as_ref() };
    let own = pair.into_iter().flat_map(|pair| [&pair.ear, &pair.mouth]).map(|fd| fd.as_fd().as_raw_fd());
    let mouths = MOUTHS.lock().map(|mouths| {
        let held = mouths.iter().filter_map(|(_, mouth)| mouth.upgrade());
        held.map(|mouth| mouth.0.as_fd().as_raw_fd()).collect::<Vec<_>>()
    });
    own.chain(mouths.unwrap_or_default()).collect()
}

/// What a fork must not find locked by a thread that the child does not have.
#[derive(Debug)]
pub struct Quiet(#[expect(dead_code, reason = "held")] MutexGuard<'static, Mouths>);

/// See [`Quiet`].
pub fn quiesce() -> Option<Quiet> {
    MOUTHS.lock().ok().map(Quiet)
}

/// To be called in a forked child: its parent's ear is not for it.
pub fn forked() {
    let _uninterrupted = Uninterrupted::begin();
    let parents = OWN.swap(std::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: null, or leaked by `made`, and never freed: a signal handler may have forked in a call that has a [`Claim`] on it, and that
    // ends in the child, too.
    let Some(parents) = (unsafe { parents.as_ref() }) else { return };
    for fd in [&parents.ear, &parents.mouth] {
        // SAFETY: nobody reaches the pair any more but by that claim, which only gives itself back; nothing drops it.
        drop(unsafe { std::ptr::read(fd) });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::{UnixDatagram, UnixStream};

    fn place(fd: OwnedFd) -> Result<OwnedFd, Errno> {
        Ok(fd)
    }

    fn own_uid() -> u32 {
        rustix::process::geteuid().as_raw()
    }

    fn adopt(fd: impl Into<OwnedFd>) -> Option<Arc<Mouth>> {
        Mouth::adopt(fd.into(), own_uid(), place)
    }

    fn is_readable(fd: BorrowedFd<'_>) -> bool {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        poll(&mut [PollFd::from_borrowed_fd(fd, PollFlags::IN)], Some(&Timespec::default())) == Ok(1)
    }

    #[test]
    fn only_a_stream_of_the_peers_own_user_is_a_mouth() {
        let (stream, _ear) = UnixStream::pair().unwrap();
        assert!(Mouth::adopt(stream.try_clone().unwrap().into(), own_uid() + 1, place).is_none());
        assert!(adopt(stream).is_some());

        let (datagram, _other) = UnixDatagram::pair().unwrap();
        assert!(adopt(datagram).is_none());
        assert!(adopt(std::net::TcpListener::bind("127.0.0.1:0").unwrap()).is_none());
        assert!(adopt(std::fs::File::open("/dev/zero").unwrap()).is_none());
        assert!(adopt(std::io::pipe().unwrap().1).is_none());
    }

    #[test]
    fn the_same_mouth_twice_is_one_descriptor() {
        let (stream, _ear) = UnixStream::pair().unwrap();
        let first = adopt(stream.try_clone().unwrap()).unwrap();
        let second = adopt(stream).unwrap();
        assert!(Arc::ptr_eq(&first, &second));
        assert!(internal_fds().contains(&first.0.as_fd().as_raw_fd()));
    }

    #[test]
    fn a_mouth_that_is_full_or_shut_says_so() {
        let (stream, ear) = UnixStream::pair().unwrap();
        let mouth = adopt(stream).unwrap();
        let rings = (0..100_000).take_while(|_| mouth.ring()).count();
        assert!((1..100_000).contains(&rings), "{rings}");
        drop(ear);
        assert!(!mouth.ring());
    }

    /// All about the one pair that the process has.
    #[test]
    fn a_claimed_ear_hears_what_is_rung_until_somebody_breaks_it() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(give(theirs.as_fd(), place));
        let mouth = receive(ours.as_fd(), own_uid(), place).unwrap().unwrap();

        let claim = Claim::take().unwrap();
        assert!(Claim::take().is_none());
        assert!(Claim::take().is_none(), "who was refused gives nothing back");
        // SAFETY: open as long as the pair, which is never freed.
        let ear = unsafe { BorrowedFd::borrow_raw(claim.fd()) };
        assert!(!is_readable(ear));
        assert!(mouth.ring());
        // Until it is full: more than are taken at a time.
        while mouth.ring() {}
        assert!(is_readable(ear));
        claim.hear();
        assert!(!is_readable(ear));
        drop(claim);

        // What is left by who sleeps by edges is gone when the next one is announced, and not thrown away later.
        let claim = Claim::take_for_edges().unwrap();
        assert!(mouth.ring());
        claim.hear_edge(false);
        assert!(is_readable(ear));
        drop(claim);
        drop(Claim::take_for_edges().unwrap());
        assert!(is_readable(ear));
        let claim = Claim::take().unwrap();
        assert!(!is_readable(ear));
        assert!(mouth.ring());
        claim.hear_edge(true);
        assert!(!is_readable(ear));
        for _ in 0..=MOST_LEFT {
            assert!(mouth.ring());
            claim.hear_edge(false);
        }
        assert!(!is_readable(ear));
        drop(claim);

        // What a hostile holder may do: its end is everybody's.
        let claim = Claim::take().unwrap();
        rustix::net::shutdown(mouth.0.as_fd(), rustix::net::Shutdown::Both).unwrap();
        assert!(is_readable(ear));
        claim.hear();
        drop(claim);
        assert!(Claim::take().is_none());
        assert!(!give(theirs.as_fd(), place));
        assert!(receive(ours.as_fd(), own_uid(), place).unwrap().is_none());
    }

    #[test]
    fn nothing_or_garbage_in_the_mail_is_no_mouth() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        assert_eq!(receive(ours.as_fd(), own_uid(), place).err(), Some(Errno::AGAIN));
        rustix::net::send(&theirs, b"whatever", SendFlags::empty()).unwrap();
        assert!(receive(ours.as_fd(), own_uid(), place).unwrap().is_none());
        drop(theirs);
        assert!(receive(ours.as_fd(), own_uid(), place).unwrap().is_none());
    }
}
