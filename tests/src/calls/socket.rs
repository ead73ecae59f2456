//! Making connections, and asking about sockets.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::os::raw::{c_int, c_void};
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::transcript::{noted, noted_number};
use super::{Errno, Fd, Outcome};

/// The three forms of `sockaddr` that a TCP program uses, and the one of a socket of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Family {
    /// `AF_INET`, 127.0.0.1.
    V4,
    /// `AF_INET6`, ::1.
    V6,
    /// `AF_INET6`, ::ffff:127.0.0.1; the only form that a JVM uses.
    Mapped,
    /// `AF_UNIX`, in the abstract namespace. As a [`SocketAddr`] it is [`NAMED`] with the name's number as its port.
    Unix,
}

/// Stands for an abstract name of `AF_UNIX`: a port tells which, as with TCP. The bytes say "unix"; nothing else has such
/// an address (fd00::/8 is for private use, RFC 4193).
pub const NAMED: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x756e, 0x6978, 0, 0, 0, 0, 1);

/// Stands for the address of a socket of `AF_UNIX` that is a path.
pub const AT_PATH: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x756e, 0x6978, 0, 0, 0, 0, 2);

/// Stands for the address of a socket of `AF_UNIX` that was not bound, as that of a client hardly ever is.
pub const UNNAMED: Ipv6Addr = Ipv6Addr::new(0xfd00, 0x756e, 0x6978, 0, 0, 0, 0, 0);

impl Family {
    /// All of them, with their names.
    const NAMES: [(Self, &str); 4] =
        [(Self::V4, "v4"), (Self::V6, "v6"), (Self::Mapped, "mapped"), (Self::Unix, "unix")];

    /// The family that is called so.
    pub fn named(name: &str) -> Option<Self> {
        Self::NAMES.into_iter().find_map(|(family, its)| (its == name).then_some(family))
    }

    /// What [`Self::named`] knows it by.
    pub fn name(self) -> &'static str {
        Self::NAMES.into_iter().find_map(|(family, name)| (family == self).then_some(name)).unwrap_or("?")
    }

    /// This side's address in this family: loopback, unless the sides are to meet in a network (`THALLUS_TEST_OWN`).
    pub fn own(self, port: u16) -> SocketAddr {
        self.address("THALLUS_TEST_OWN", port)
    }

    /// The other side's address in this family (`THALLUS_TEST_OTHER`).
    pub fn other(self, port: u16) -> SocketAddr {
        self.address("THALLUS_TEST_OTHER", port)
    }

    fn address(self, variable: &str, port: u16) -> SocketAddr {
        let given = std::env::var(variable).ok().and_then(|text| text.parse::<Ipv4Addr>().ok());
        let v4 = given.unwrap_or(Ipv4Addr::LOCALHOST);
        match self {
            Self::V4 => (v4, port).into(),
            Self::V6 => (Ipv6Addr::LOCALHOST, port).into(),
            Self::Mapped => (v4.to_ipv6_mapped(), port).into(),
            Self::Unix => (NAMED, port).into(),
        }
    }

    /// This family's address for a listener on all addresses, on a free port.
    pub fn unspecified(self) -> SocketAddr {
        match self {
            Self::V4 => (Ipv4Addr::UNSPECIFIED, 0).into(),
            Self::V6 | Self::Mapped => (Ipv6Addr::UNSPECIFIED, 0).into(),
            Self::Unix => (NAMED, 0).into(),
        }
    }

    /// An address of this host in this family that is not loopback.
    pub fn own_address(self, port: u16) -> Option<SocketAddr> {
        // The kernel chooses the source address of a datagram socket when it is connected; nothing is sent.
        // The destinations are reserved for documentation (RFC 5737, RFC 3849).
        let (local, remote): (SocketAddr, SocketAddr) = match self {
            Self::V4 | Self::Mapped => {
                ((Ipv4Addr::UNSPECIFIED, 0).into(), (Ipv4Addr::new(203, 0, 113, 1), 9).into())
            }
            Self::V6 => (
                (Ipv6Addr::UNSPECIFIED, 0).into(),
                (Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1), 9).into(),
            ),
            // It has only names.
            Self::Unix => return None,
        };
        let socket = UdpSocket::bind(local).ok()?;
        socket.connect(remote).ok()?;
        match (self, socket.local_addr().ok()?.ip()) {
            (Self::Mapped, IpAddr::V4(own)) => Some((own.to_ipv6_mapped(), port).into()),
            (_, own) => Some((own, port).into()),
        }
    }

    fn domain(self) -> c_int {
        match self {
            Self::V4 => libc::AF_INET,
            Self::V6 | Self::Mapped => libc::AF_INET6,
            Self::Unix => libc::AF_UNIX,
        }
    }
}

/// An address in the kernel's form, which has room for any (`sockaddr_storage`), and its length.
struct RawAddress(Storage, libc::socklen_t);

#[repr(C, align(8))]
struct Storage([u8; ROOM]);

const ROOM: usize = size_of::<libc::sockaddr_storage>();

/// Where all forms have their contents: behind the family.
const CONTENTS: usize = size_of::<libc::sa_family_t>();

/// Before the number in an abstract name; the NUL makes it abstract (unix(7)).
const NAME: &[u8] = b"\0thallus-test-";

impl RawAddress {
    fn new(address: SocketAddr) -> Self {
        let port = address.port().to_be_bytes();
        match address {
            SocketAddr::V4(v4) => {
                let contents = [&port[..], &v4.ip().octets()].concat();
                Self::of(libc::AF_INET, &contents, size_of::<libc::sockaddr_in>())
            }
            SocketAddr::V6(v6) if *v6.ip() == NAMED => {
                // As long as any, so that its length is the same in each transcript.
                let name = [NAME, format!("{:05}", v6.port()).as_bytes()].concat();
                Self::of(libc::AF_UNIX, &name, CONTENTS + name.len())
            }
            SocketAddr::V6(v6) => {
                let no_flow = [0; 4];
                let contents = [&port[..], &no_flow, &v6.ip().octets()].concat();
                Self::of(libc::AF_INET6, &contents, size_of::<libc::sockaddr_in6>())
            }
        }
    }

    /// The path must be shorter than that of `sockaddr_un`.
    fn at_path(path: &str) -> Self {
        let c_path = [path.as_bytes(), b"\0"].concat();
        Self::of(libc::AF_UNIX, &c_path, CONTENTS + c_path.len())
    }

    fn of(family: c_int, contents: &[u8], len: usize) -> Self {
        let mut storage = Storage([0; ROOM]);
        storage.0[..CONTENTS].copy_from_slice(&(family as libc::sa_family_t).to_ne_bytes());
        storage.0[CONTENTS..CONTENTS + contents.len()].copy_from_slice(contents);
        Self(storage, len as libc::socklen_t)
    }

    fn room() -> Self {
        Self::of(libc::AF_UNSPEC, &[], ROOM)
    }

    fn address(&self) -> SocketAddr {
        let (family, contents) = self.0.0.split_at(CONTENTS);
        let family = libc::sa_family_t::from_ne_bytes([family[0], family[1]]);
        let port = u16::from_be_bytes([contents[0], contents[1]]);
        match c_int::from(family) {
            libc::AF_INET => {
                let octets: [u8; 4] = contents[2..6].try_into().expect("there are four");
                (Ipv4Addr::from(octets), port).into()
            }
            libc::AF_UNIX => {
                let name = &contents[..(self.1 as usize).saturating_sub(CONTENTS)];
                let number = name.strip_prefix(NAME).and_then(|number| std::str::from_utf8(number).ok());
                match number.and_then(|number| number.parse().ok()) {
                    Some(number) => (NAMED, number).into(),
                    None => (if name.is_empty() { UNNAMED } else { AT_PATH }, 0).into(),
                }
            }
            _ => {
                let octets: [u8; 16] = contents[6..22].try_into().expect("there are sixteen");
                (Ipv6Addr::from(octets), port).into()
            }
        }
    }

    fn pointer(&self) -> *const libc::sockaddr {
        (&raw const self.0).cast()
    }
}

/// socket(2) of type stream; `flags` are `SOCK_NONBLOCK` and `SOCK_CLOEXEC`.
pub fn stream_socket(family: Family, flags: c_int) -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::socket(family.domain(), libc::SOCK_STREAM | flags, 0) };
    noted_number(Errno::check(ret as isize).map(|fd| fd as Fd), || format!("socket(stream, {flags:#x})"))
}

/// socket(2) of type datagram.
pub fn udp_socket(family: Family) -> Outcome<Fd> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::socket(family.domain(), libc::SOCK_DGRAM, 0) };
    noted_number(Errno::check(ret as isize).map(|fd| fd as Fd), || "socket(datagram)".to_owned())
}

/// socketpair(2) of `AF_UNIX` streams.
pub fn unix_pair() -> Outcome<(Fd, Fd)> {
    let mut ends = [0; 2];
    // SAFETY: socketpair writes two ints.
    let ret = unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, ends.as_mut_ptr()) };
    noted(
        Errno::check(ret as isize).map(|_| (ends[0], ends[1])),
        || "socketpair()".to_owned(),
        |ends| format!("{ends:?}"),
    )
}

/// A listening socket of `SOCK_SEQPACKET`, which is none of a stream's, and one that has connected to it and waits to be accepted.
pub fn packet_sockets() -> (Fd, Fd) {
    let socket = || {
        // SAFETY: takes no pointer.
        let ret = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET, 0) };
        Errno::check(ret as isize).map(|fd| fd as Fd).expect("socket")
    };
    let (listener, client) = (socket(), socket());
    bind_to_free_name(listener).expect("bind");
    listen(listener, 1).expect("listen");
    let mut raw = RawAddress::room();
    // SAFETY: pointer and length are those of `raw`.
    let ret = unsafe { libc::getsockname(listener, (&raw mut raw.0).cast(), &raw mut raw.1) };
    Errno::check(ret as isize).expect("getsockname");
    connect_raw(client, &raw).expect("connect");
    (listener, client)
}

/// bind(2). Port 0 is a free one.
pub fn bind(fd: Fd, address: SocketAddr) -> Outcome<usize> {
    let outcome = if address == SocketAddr::from((NAMED, 0)) {
        bind_to_free_name(fd)
    } else {
        bind_raw(fd, &RawAddress::new(address))
    };
    noted_number(outcome, || format!("bind({fd})"))
}

/// bind(2) to a path.
pub fn bind_path(fd: Fd, path: &str) -> Outcome<usize> {
    noted_number(bind_raw(fd, &RawAddress::at_path(path)), || format!("bind({fd}, a path)"))
}

/// What the kernel does for a port of 0, it does not for an abstract name of our form.
fn bind_to_free_name(fd: Fd) -> Outcome<usize> {
    // Other processes begin elsewhere.
    static TRIED: AtomicU16 = AtomicU16::new(0);
    let start = std::process::id().wrapping_mul(0x9e37_79b1) >> 16;
    loop {
        let number = TRIED.fetch_add(1, Ordering::Relaxed).wrapping_add(start as u16).max(1);
        match bind_raw(fd, &RawAddress::new((NAMED, number).into())) {
            Err(Errno::EADDRINUSE) => {}
            outcome => return outcome,
        }
    }
}

fn bind_raw(fd: Fd, raw: &RawAddress) -> Outcome<usize> {
    // SAFETY: pointer and length are those of `raw`.
    let ret = unsafe { libc::bind(fd, raw.pointer(), raw.1) };
    Errno::check(ret as isize)
}

/// listen(2)
pub fn listen(fd: Fd, backlog: c_int) -> Outcome<usize> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::listen(fd, backlog) };
    noted_number(Errno::check(ret as isize), || format!("listen({fd}, {backlog})"))
}

/// accept(2); the peer's address, if it is of a known family.
pub fn accept(fd: Fd) -> Outcome<Fd> {
    let mut raw = RawAddress::room();
    // SAFETY: pointer and length are those of `raw`.
    let ret = unsafe { libc::accept(fd, (&raw mut raw.0).cast(), &raw mut raw.1) };
    let outcome = Errno::check(ret as isize).map(|fd| fd as Fd);
    noted(
        outcome,
        || format!("accept({fd})"),
        |conn| format!("{conn} address length {} {}", raw.1, raw.address().ip()),
    )
}

/// accept4(2) without an address.
pub fn accept4(fd: Fd, flags: c_int) -> Outcome<Fd> {
    // SAFETY: null pointers mean that no address is wanted.
    let ret = unsafe { libc::accept4(fd, std::ptr::null_mut(), std::ptr::null_mut(), flags) };
    noted_number(Errno::check(ret as isize).map(|fd| fd as Fd), || format!("accept4({fd}, {flags:#x})"))
}

/// connect(2)
pub fn connect(fd: Fd, address: SocketAddr) -> Outcome<usize> {
    noted_number(connect_raw(fd, &RawAddress::new(address)), || format!("connect({fd})"))
}

/// connect(2) to a path.
pub fn connect_path(fd: Fd, path: &str) -> Outcome<usize> {
    noted_number(connect_raw(fd, &RawAddress::at_path(path)), || format!("connect({fd}, a path)"))
}

fn connect_raw(fd: Fd, raw: &RawAddress) -> Outcome<usize> {
    // SAFETY: pointer and length are those of `raw`.
    let ret = unsafe { libc::connect(fd, raw.pointer(), raw.1) };
    Errno::check(ret as isize)
}

/// connect(2) with `AF_UNSPEC`, which undoes a connection.
pub fn disconnect(fd: Fd) -> Outcome<usize> {
    disconnect_by(fd, size_of::<libc::sockaddr>())
}

/// The same by the first bytes of the address.
pub fn disconnect_by(fd: Fd, len: usize) -> Outcome<usize> {
    // SAFETY: all-zero is a valid value of this plain C struct, and zero is `AF_UNSPEC`.
    let unspecified: libc::sockaddr = unsafe { std::mem::zeroed() };
    // SAFETY: `unspecified` has no fewer bytes.
    let ret = unsafe { libc::connect(fd, &raw const unspecified, len as libc::socklen_t) };
    noted_number(Errno::check(ret as isize), || format!("connect({fd}, AF_UNSPEC, {len})"))
}

/// getsockname(2). Ports differ between runs, so only the outcome is noted.
pub fn local_address(fd: Fd) -> Outcome<SocketAddr> {
    let mut raw = RawAddress::room();
    // SAFETY: pointer and length are those of `raw`.
    let ret = unsafe { libc::getsockname(fd, (&raw mut raw.0).cast(), &raw mut raw.1) };
    let outcome = Errno::check(ret as isize).map(|_| raw.address());
    noted(outcome, || format!("getsockname({fd})"), |address| address.ip().to_string())
}

/// getpeername(2), noted as in [`local_address`].
pub fn peer_address(fd: Fd) -> Outcome<SocketAddr> {
    let mut raw = RawAddress::room();
    // SAFETY: pointer and length are those of `raw`.
    let ret = unsafe { libc::getpeername(fd, (&raw mut raw.0).cast(), &raw mut raw.1) };
    let outcome = Errno::check(ret as isize).map(|_| raw.address());
    noted(outcome, || format!("getpeername({fd})"), |address| address.ip().to_string())
}

/// shutdown(2)
pub fn shutdown(fd: Fd, how: c_int) -> Outcome<usize> {
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::shutdown(fd, how) };
    let name = match how {
        libc::SHUT_RD => "SHUT_RD",
        libc::SHUT_WR => "SHUT_WR",
        libc::SHUT_RDWR => "SHUT_RDWR",
        _ => "?",
    };
    noted_number(Errno::check(ret as isize), || format!("shutdown({fd}, {name})"))
}

/// getsockopt(2) of an int.
pub fn option(fd: Fd, level: c_int, name: c_int) -> Outcome<c_int> {
    let mut value: c_int = 0;
    let mut len = size_of_val(&value) as libc::socklen_t;
    // SAFETY: pointer and length are those of `value`.
    let ret = unsafe { libc::getsockopt(fd, level, name, (&raw mut value).cast(), &raw mut len) };
    noted_number(Errno::check(ret as isize).map(|_| value), || format!("getsockopt({fd}, {level}, {name})"))
}

/// `tcpi_data_segs_out` of `TCP_INFO`, which libc's structure does not have.
pub fn segments_sent(fd: Fd) -> u32 {
    const AT: usize = 39;
    let mut info = [0u32; AT + 1];
    let mut len = size_of_val(&info) as libc::socklen_t;
    // SAFETY: pointer and length are those of `info`.
    let ret = unsafe {
        libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, info.as_mut_ptr().cast(), &raw mut len)
    };
    assert_eq!(ret, 0, "TCP_INFO: {}", Errno::last());
    info[AT]
}

/// setsockopt(2) of an int.
pub fn set_option(fd: Fd, level: c_int, name: c_int, value: c_int) -> Outcome<usize> {
    let outcome = set_raw_option(fd, level, name, &value);
    noted_number(outcome, || format!("setsockopt({fd}, {level}, {name}, {value})"))
}

/// The error waiting at a socket (`SO_ERROR`), which this clears.
pub fn pending_error(fd: Fd) -> Outcome<Errno> {
    let error = super::quietly(|| option(fd, libc::SOL_SOCKET, libc::SO_ERROR)).map(Errno);
    noted_number(error, || format!("getsockopt({fd}, SO_ERROR)"))
}

/// `SO_RCVTIMEO`; zero is for ever.
pub fn set_receive_timeout(fd: Fd, timeout: Duration) -> Outcome<usize> {
    let outcome = set_raw_option(fd, libc::SOL_SOCKET, libc::SO_RCVTIMEO, &timeval(timeout));
    noted_number(outcome, || format!("setsockopt({fd}, SO_RCVTIMEO, {timeout:?})"))
}

/// `SO_SNDTIMEO`; zero is for ever.
pub fn set_send_timeout(fd: Fd, timeout: Duration) -> Outcome<usize> {
    let outcome = set_raw_option(fd, libc::SOL_SOCKET, libc::SO_SNDTIMEO, &timeval(timeout));
    noted_number(outcome, || format!("setsockopt({fd}, SO_SNDTIMEO, {timeout:?})"))
}

/// `SO_LINGER`, in seconds.
pub fn set_linger(fd: Fd, seconds: c_int) -> Outcome<usize> {
    let linger = libc::linger { l_onoff: 1, l_linger: seconds };
    let outcome = set_raw_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    noted_number(outcome, || format!("setsockopt({fd}, SO_LINGER, {seconds})"))
}

/// `SO_LINGER` switched off.
pub fn clear_linger(fd: Fd) -> Outcome<usize> {
    let linger = libc::linger { l_onoff: 0, l_linger: 0 };
    let outcome = set_raw_option(fd, libc::SOL_SOCKET, libc::SO_LINGER, &linger);
    noted_number(outcome, || format!("setsockopt({fd}, SO_LINGER, off)"))
}

fn set_raw_option<T>(fd: Fd, level: c_int, name: c_int, value: &T) -> Outcome<usize> {
    let pointer: *const c_void = std::ptr::from_ref(value).cast();
    // SAFETY: pointer and length are those of `value`, a plain C value.
    let ret = unsafe { libc::setsockopt(fd, level, name, pointer, size_of::<T>() as libc::socklen_t) };
    Errno::check(ret as isize)
}

fn timeval(duration: Duration) -> libc::timeval {
    libc::timeval {
        tv_sec: duration.as_secs() as libc::time_t,
        tv_usec: libc::suseconds_t::from(duration.subsec_micros()),
    }
}
