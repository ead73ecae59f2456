//! What the environment asked for. Set once, before the first connection.

use std::fmt;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use libc::{pollfd, sigset_t};
use once_cell::race::OnceBox;
use rustix::event::Timespec;
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::connection::Connection;
use crate::peers::{Rule, same_host};
use crate::rendezvous::Place;
use crate::ring::{CLASSES, class_size};
use crate::tcp::{self, errno};
use crate::unix::Name;

/// Choices of the user of the library.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Whether connections may be upgraded to shared memory at all.
    pub shm: bool,
    /// Whether connections may be upgraded to RDMA, with whom, and how.
    pub verbs: Verbs,
    /// Server ports whose connections may be upgraded, as inclusive ranges; empty for all.
    pub ports: Vec<(u16, u16)>,
    /// Servers' names of `AF_UNIX` connections that may be upgraded; empty for none, as a rule all.
    pub unix: Vec<UnixRule>,
    /// I/O calls on a connection before it looks for its peer.
    pub upgrade_after: u32,
    /// Whether earlier connections may make it more.
    pub learns: bool,
    /// Longest spin before a thread sleeps, in nanoseconds.
    pub spin_ns: u64,
    /// The largest window class.
    pub largest_class: u32,
    /// Bytes that one connection may lend its peer at a time (`crate::lending`).
    pub lend_bytes: u64,
    /// Whether the program may set an io_uring up.
    pub io_uring: IoUring,
    /// Moves internal file descriptors out of the application's way.
    pub place: Place,
    /// An internal file descriptor is about to be closed.
    pub forget: fn(i32),
    /// The descriptor by which to reach a connection: the given one, while it is the connection's, else another one of it, if there is any.
    pub reach: fn(&Connection, i32) -> i32,
    /// How a thread sleeps.
    pub sleep: Sleep,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            shm: true,
            verbs: Verbs::default(),
            ports: Vec::new(),
            unix: vec![UnixRule::all()],
            upgrade_after: 8,
            learns: true,
            spin_ns: 100_000,
            largest_class: CLASSES - 1,
            lend_bytes: 256 << 20,
            io_uring: IoUring::Auto,
            place: stay,
            forget: |_| {},
            reach: |_, fd| fd,
            sleep: Sleep { recv: tcp::recv, send: tcp::send, poll },
        }
    }
}

/// Whether the program may set an io_uring up: hooks see nothing of what it does by one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoUring {
    /// It may, and its connections stay on TCP.
    Allow,
    /// It is told that it may not.
    Deny,
    /// It may, but for libuv, which then does the same by calls that hooks see; unless the program asks libuv for it.
    Auto,
}

/// Choices for the fabric between hosts.
#[derive(Clone, Debug)]
pub struct Verbs {
    /// Which peers have this library; none: no connection is upgraded to RDMA.
    pub peers: Vec<Rule>,
    /// Also with peers on this host.
    pub on_one_host: bool,
    /// The secret by which greetings are signed.
    pub key: Option<Vec<u8>>,
    /// Bytes of each ring, if as much memory may be locked.
    pub ring: u64,
    /// How messages are written; without a choice as the device needs it.
    pub order: Order,
    /// Service level of the path.
    pub service_level: u8,
    /// Acknowledgement timeout: 4.096 µs · 2ⁿ (InfiniBand Architecture, "Local ACK Timeout").
    pub timeout: u8,
    /// Retries before a queue pair fails. With 7 soft-RoCE never gives up.
    pub retries: u8,
}

/// Names of `AF_UNIX` sockets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnixRule {
    /// The name, or how it begins; empty for all.
    pub name: String,
    /// Whether more may follow.
    pub open: bool,
    /// Whether such connections are left alone.
    pub excludes: bool,
}

impl fmt::Display for UnixRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, star) = (if self.excludes { "!" } else { "" }, if self.open { "*" } else { "" });
        match self.name.is_empty() {
            true => write!(f, "{mark}all"),
            false => write!(f, "{mark}{}{star}", self.name),
        }
    }
}

impl UnixRule {
    /// Reads a list: names of servers' sockets, abstract ones behind `@`, `*` at the end of one for all that begin so, `all` for all,
    /// and `!` in front of what is left alone: of all, if the list begins with that. `off` for none.
    pub fn parse_list(text: &str) -> Option<Vec<Self>> {
        if text.trim() == "off" {
            return Some(Vec::new());
        }
        let mut rules = text.split(',').map(|part| Self::parse(part.trim())).collect::<Option<Vec<_>>>()?;
        if rules[0].excludes {
            rules.insert(0, Self::all());
        }
        Some(rules)
    }

    /// The rule that names every socket.
    fn all() -> Self {
        Self { name: String::new(), open: true, excludes: false }
    }

    fn parse(text: &str) -> Option<Self> {
        let (excludes, name) = text.strip_prefix('!').map_or((false, text), |name| (true, name));
        if name == "all" {
            return Some(Self { excludes, ..Self::all() });
        }
        let (open, name) = name.strip_suffix('*').map_or((false, name), |name| (true, name));
        let is_name = name.len() > 1 && name.starts_with(['/', '@', '.']);
        is_name.then(|| Self { name: name.to_owned(), open, excludes })
    }

    fn names(&self, name: &str) -> bool {
        if self.open { name.starts_with(&self.name) } else { name == self.name }
    }
}

/// How a message is written into the peer's ring. Whoever reads it need not know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// By one RDMA WRITE: the device places its bytes in order.
    OneWrite,
    /// Its last word by a second RDMA WRITE, unless it is short and packed (docs/wire.md): the device places one write's bytes in any
    /// order, but all of them before those of the next.
    TwoWrites,
}

impl Default for Verbs {
    fn default() -> Self {
        Self {
            peers: Vec::new(),
            on_one_host: false,
            key: None,
            ring: 2 << 20,
            order: Order::TwoWrites,
            service_level: 0,
            timeout: 14,
            retries: 6,
        }
    }
}

/// The largest and the smallest ring over RDMA, in bytes.
pub(crate) const RINGS: [u64; 2] = [8 << 20, 16 << 10];

impl Verbs {
    /// Sizes of rings in bytes, as they are tried one after the other until as much memory may be locked: powers of two
    /// from 8 MiB to 16 KiB.
    pub fn rings(&self) -> impl Iterator<Item = u64> {
        let [largest, smallest] = RINGS;
        let wanted = self.ring.clamp(smallest, largest).next_power_of_two();
        std::iter::successors(Some(wanted), move |&ring| (ring > smallest).then(|| (ring / 4).max(smallest)))
    }

    /// Whether a connection between these addresses, with this server port, is to begin with a greeting.
    pub fn covers(&self, local: SocketAddr, peer: SocketAddr, server_port: u16) -> bool {
        self.peers.iter().any(|rule| rule.names(peer.ip(), server_port))
            && (self.on_one_host || !same_host(local, peer))
    }
}

/// The system calls in which a thread sleeps. Whoever has more to do there, such as to let the thread be
/// cancelled, brings its own; `ECANCELED` then ends the call that slept, whatever it has done before.
#[derive(Clone, Copy, Debug)]
pub struct Sleep {
    /// recv(2).
    pub recv: unsafe fn(i32, *mut u8, usize, i32) -> Result<usize, Errno>,
    /// send(2).
    pub send: unsafe fn(i32, *const u8, usize, i32) -> Result<usize, Errno>,
    /// See [`Poll`].
    pub poll: Poll,
}

/// ppoll(2), without end or for as long as that, under a mask if there is one.
pub type Poll = fn(&mut [pollfd], Option<&Timespec>, Option<&sigset_t>) -> Result<(), Errno>;

fn poll(list: &mut [pollfd], limit: Option<&Timespec>, mask: Option<&sigset_t>) -> Result<(), Errno> {
    let mut time = limit.map(|time| libc::timespec { tv_sec: time.tv_sec, tv_nsec: time.tv_nsec });
    let time = time.as_mut().map_or(std::ptr::null_mut(), std::ptr::from_mut);
    let mask = mask.map_or(std::ptr::null(), std::ptr::from_ref);
    // The kernel's sigset_t: one bit a signal.
    let bytes = size_of::<u64>();
    // SAFETY: all entries are writable, the time lives, and libc's set begins with the kernel's.
    unsafe { syscall!(Sysno::ppoll, list.as_mut_ptr(), list.len(), time, mask, bytes) }.map_err(errno)?;
    Ok(())
}

fn stay(fd: OwnedFd) -> Result<OwnedFd, Errno> {
    Ok(fd)
}

impl Settings {
    /// Whether connections to this server port may be upgraded.
    pub fn selects(&self, port: u16) -> bool {
        self.ports.is_empty() || self.ports.iter().any(|&(first, last)| (first..=last).contains(&port))
    }

    /// Whether `AF_UNIX` connections to a server of this name may be upgraded: as the last rule says that names it.
    pub fn selects_unix(&self, name: &Name) -> bool {
        if self.unix.is_empty() {
            return false;
        }
        let name = name.to_string();
        self.unix.iter().rev().find(|rule| rule.names(&name)).is_some_and(|rule| !rule.excludes)
    }
}

/// The largest window class of at most `bytes`; the smallest if none is.
pub fn class_within(bytes: u64) -> u32 {
    (0..CLASSES).rev().find(|&class| class_size(class) <= bytes).unwrap_or(0)
}

/// Nobody waits for another thread here: that thread may be in the parent of this process.
static SETTINGS: OnceBox<Settings> = OnceBox::new();

/// Sets the choices. The first call wins, and returns true.
pub fn set(settings: Settings) -> bool {
    SETTINGS.set(Box::new(settings)).is_ok()
}

/// The choices, or the defaults if none were set.
pub fn settings() -> &'static Settings {
    SETTINGS.get_or_init(Box::default)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_empty_list_selects_every_port() {
        assert!(Settings::default().selects(1));
        let some = Settings { ports: vec![(10, 20), (5432, 5432)], ..Settings::default() };
        assert!(some.selects(10) && some.selects(20) && some.selects(5432));
        assert!(!some.selects(21));
    }

    #[test]
    fn the_last_rule_that_names_a_unix_socket_decides() {
        let selects = |list: &str, path: &[u8]| {
            let unix = UnixRule::parse_list(list).unwrap();
            Settings { unix, ..Settings::default() }.selects_unix(&Name::of(path).unwrap())
        };
        assert!(Settings::default().selects_unix(&Name::of(b"/a").unwrap()));
        assert!(selects("all", b"/a") && selects("all", b"\0a") && !selects("off", b"/a"));
        assert!(selects("/run/*,@x", b"/run/a") && selects("/run/*,@x", b"\0x") && !selects("@x", b"\0xy"));
        assert!(!selects("all,!/tmp/*", b"/tmp/a") && selects("all,!/tmp/*,/tmp/b", b"/tmp/b"));
        assert!(!selects("!/tmp/*", b"/tmp/a") && selects("!/tmp/*", b"/a") && !selects("!all", b"/a"));
        let list = "all,!/tmp/*,@x";
        let texts = UnixRule::parse_list(list).unwrap().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(texts.join(","), list);
        for wrong in ["", "a", "/a,", "!", "@", "*", "all,b"] {
            assert_eq!(UnixRule::parse_list(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn rings_over_rdma_get_smaller_down_to_the_smallest() {
        let rings = |ring| Verbs { ring, ..Verbs::default() }.rings().collect::<Vec<_>>();
        assert_eq!(rings(256 << 10), [256 << 10, 64 << 10, 16 << 10]);
        assert_eq!(rings(u64::MAX)[0], 8 << 20);
        assert_eq!(rings(2 << 20), [2 << 20, 512 << 10, 128 << 10, 32 << 10, 16 << 10]);
        assert_eq!(rings(8192), [16 << 10]);
    }

    #[test]
    fn a_ring_size_is_rounded_down_to_a_class() {
        assert_eq!(class_within(1), 0);
        assert_eq!(class_within(8192), 0);
        assert_eq!(class_within(600_000), 3);
        assert_eq!(class_within(u64::MAX), CLASSES - 1);
    }
}
