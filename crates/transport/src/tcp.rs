//! What the kernel knows about a TCP socket, and the raw calls on it that rustix lacks.

use std::mem::MaybeUninit;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use syscalls::{Sysno, syscall};

use crate::reason::Reason;
use crate::unix;

/// A raw error number as an [`Errno`].
pub fn errno(raw: syscalls::Errno) -> Errno {
    Errno::from_raw_os_error(raw.into_raw())
}

/// Kernel byte counts of one TCP socket (tcp(7), `TCP_INFO`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Counts {
    /// Application bytes handed to the kernel for sending, since the connection began.
    pub sent: u64,
    /// Application bytes that have arrived in order, read or not.
    pub received: u64,
}

/// States in which the peer's FIN has arrived (tcp_states.h: TIME_WAIT, CLOSE_WAIT, LAST_ACK, CLOSING).
const FIN_RECEIVED: [u8; 4] = [6, 8, 9, 11];

/// Offsets in `struct tcp_info` of linux/tcp.h, which only ever grows at its end.
mod offset {
    pub(super) const BYTES_ACKED: usize = 120;
    pub(super) const BYTES_RECEIVED: usize = 128;
    pub(super) const NOTSENT_BYTES: usize = 144;
    pub(super) const BYTES_SENT: usize = 200;
    pub(super) const BYTES_RETRANS: usize = 208;
    pub(super) const END: usize = 216;
}

/// The socket's state, the first byte of `struct tcp_info` (`TCP_CLOSE_WAIT` and so on of tcp_states.h).
fn state(fd: i32) -> Option<u8> {
    let mut state = 0u8;
    let mut length = 1u32;
    // SAFETY: the kernel writes at most one byte to `state`.
    unsafe {
        syscall!(Sysno::getsockopt, fd, libc::IPPROTO_TCP, libc::TCP_INFO, &raw mut state, &raw mut length)
    }
    .ok()
    .map(|_| state)
}

/// Whether the peer's FIN or reset has arrived, whatever this side has shut down. Of an `AF_UNIX` socket: whether the peer has
/// closed it, unless this side has shut it down.
pub fn peer_has_closed(fd: i32) -> bool {
    const ESTABLISHED: u8 = 1;
    const FIN_WAIT1: u8 = 4;
    const FIN_WAIT2: u8 = 5;
    match state(fd) {
        Some(state) => !matches!(state, ESTABLISHED | FIN_WAIT1 | FIN_WAIT2),
        None => unix::is_over(fd),
    }
}

/// How long a live peer may take for an answer by RDMA, if it has ended its stream.
const ANSWER: Duration = Duration::from_millis(20);

/// For who waits from now on for an answer by RDMA: whether the peer has closed the connection, so that none comes. One that has only ended
/// its stream, as the kernel can't tell, answers first.
pub(crate) fn closed_unanswered(fd: i32) -> impl Fn() -> bool {
    let begun = Instant::now();
    move || begun.elapsed() >= ANSWER && peer_has_closed(fd)
}

/// Whether the connection is no more: it was reset, or both ends have closed it.
pub fn is_over(fd: i32) -> bool {
    const CLOSE: u8 = 7;
    state(fd) == Some(CLOSE)
}

/// shutdown(2). It fails for a socket that is no longer connected, which has nothing left to be told.
pub(crate) fn shutdown(fd: i32, how: rustix::net::Shutdown) {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let _ = rustix::net::shutdown(unsafe { BorrowedFd::borrow_raw(fd) }, how);
}

/// `SO_LINGER`: zero time has the kernel reset the connection when it is closed.
pub(crate) fn set_linger(fd: i32, time: Option<Duration>) {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let _ = rustix::net::sockopt::set_socket_linger(unsafe { BorrowedFd::borrow_raw(fd) }, time);
}

/// Whether `SO_LINGER` with zero time asks for a reset instead of an orderly end.
pub(crate) fn lingers_not(fd: i32) -> bool {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let linger = rustix::net::sockopt::socket_linger(unsafe { BorrowedFd::borrow_raw(fd) });
    linger.is_ok_and(|linger| linger == Some(Duration::ZERO))
}

/// Waits for some of `events`, no longer than `limit`. False if that fails.
pub(crate) fn wait_for(fd: i32, events: PollFlags, limit: Option<Duration>) -> bool {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut list = [PollFd::from_borrowed_fd(socket, events)];
    let limit = limit.map(|limit| Timespec {
        tv_sec: limit.as_secs().cast_signed(),
        tv_nsec: i64::from(limit.subsec_nanos()),
    });
    !matches!(rustix::event::poll(&mut list, limit.as_ref()), Err(errno) if errno != Errno::INTR)
}

/// Whether `events` hold now.
pub(crate) fn has(fd: i32, events: PollFlags) -> bool {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    let mut list = [PollFd::from_borrowed_fd(socket, events)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    rustix::event::poll(&mut list, Some(&now)).is_ok() && list[0].revents().contains(events)
}

/// Reads the kernel's counts in one call, so that they belong together. `ENOSYS` on a kernel (before 4.19)
/// that does not count them.
pub fn counts(fd: BorrowedFd<'_>) -> Result<Counts, Errno> {
    let info = info(fd)?;
    // The kernel counts the peer's FIN as a byte received (tcp_data_queue: its sequence number).
    let fin = u64::from(FIN_RECEIVED.contains(&info.0[0]));
    let first_time = info.word(offset::BYTES_SENT).wrapping_sub(info.word(offset::BYTES_RETRANS));
    Ok(Counts {
        sent: first_time.wrapping_add(u64::from(info.half(offset::NOTSENT_BYTES))),
        received: info.word(offset::BYTES_RECEIVED).wrapping_sub(fin),
    })
}

/// Whether the end that connected was ever established: the peer has acknowledged its SYN, which the kernel counts as
/// a byte.
pub fn was_connected(fd: BorrowedFd<'_>) -> bool {
    info(fd).is_ok_and(|info| info.word(offset::BYTES_ACKED) > 0)
}

/// Whether `fd` is a TCP socket that neither listens nor is connected, nor about to be.
pub fn is_unconnected(fd: BorrowedFd<'_>) -> bool {
    /// `TCP_CLOSE` of linux/tcp_states.h.
    const CLOSE: u8 = 7;
    is_tcp(fd) && info(fd).is_ok_and(|info| info.0[0] == CLOSE)
}

/// `struct tcp_info`, as far as it is needed.
struct Info([u8; 256]);

impl Info {
    fn word(&self, at: usize) -> u64 {
        u64::from_ne_bytes(std::array::from_fn(|i| self.0[at + i]))
    }

    fn half(&self, at: usize) -> u32 {
        u32::from_ne_bytes(std::array::from_fn(|i| self.0[at + i]))
    }
}

fn info(fd: BorrowedFd<'_>) -> Result<Info, Errno> {
    let mut info = [0u8; 256];
    let mut length = info.len() as u32;
    // SAFETY: the kernel writes at most `length` bytes to `info`.
    unsafe {
        syscall!(
            Sysno::getsockopt,
            fd.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            info.as_mut_ptr(),
            &raw mut length
        )
    }
    .map_err(errno)?;
    if (length as usize) < offset::END {
        return Err(Errno::NOSYS);
    }
    Ok(Info(info))
}

/// Bytes that have arrived and wait to be read (`FIONREAD`).
pub fn unread(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    rustix::io::ioctl_fionread(fd)
}

/// Whether a read would find nothing in the socket. Of bytes behind urgent data the kernel counts none (`tcp_inq` of net/tcp.h).
pub(crate) fn has_nothing(fd: i32) -> bool {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    unread(socket) == Ok(0) && !(is_at_mark(fd) && has(fd, PollFlags::IN))
}

/// Asks whether the next byte is behind urgent data (asm-generic/sockios.h).
pub const SIOCATMARK: u64 = 0x8905;

/// Whether the next byte in the socket is behind urgent data.
pub(crate) fn is_at_mark(fd: i32) -> bool {
    let mut at = 0i32;
    // SAFETY: the kernel writes one int.
    let asked = unsafe { syscall!(Sysno::ioctl, fd, SIOCATMARK, &raw mut at) };
    asked.is_ok() && at != 0
}

/// What has been sent and the peer's kernel has not acknowledged, its end included (`SIOCOUTQ` of tcp(7)). `None` if the kernel does not say.
pub(crate) fn queued(fd: i32) -> Option<u64> {
    let mut queued = 0i32;
    // SAFETY: the kernel writes one int.
    let asked = unsafe { syscall!(Sysno::ioctl, fd, libc::TIOCOUTQ, &raw mut queued) };
    asked.ok().and(u64::try_from(queued).ok())
}

/// Whether the connection is no more. Its kernel then no longer says whether the peer's FIN is among the bytes received:
/// the last acknowledgement, or a reset, may have ended it.
pub fn is_closed(fd: BorrowedFd<'_>) -> bool {
    const CLOSE: u8 = 7;
    state(fd.as_raw_fd()) == Some(CLOSE)
}

/// Application bytes that have been read from the socket so far. The caller makes sure that nobody reads
/// meanwhile; arrivals are allowed for.
pub fn bytes_read(fd: BorrowedFd<'_>) -> Result<u64, Errno> {
    loop {
        let before = counts(fd)?.received;
        let waiting = unread(fd)?;
        if counts(fd)?.received == before {
            return Ok(before - waiting);
        }
    }
}

/// Whether `fd` is a TCP socket, by the protocol that the kernel reports: no other address family has this number.
pub fn is_tcp(fd: BorrowedFd<'_>) -> bool {
    rustix::net::sockopt::socket_protocol(fd)
        .is_ok_and(|protocol| protocol == Some(rustix::net::ipproto::TCP))
}

/// Both addresses of a connected socket, v4-mapped ones as v4.
pub fn addresses(fd: BorrowedFd<'_>) -> Result<(SocketAddr, SocketAddr), Errno> {
    let local = SocketAddr::try_from(rustix::net::getsockname(fd)?).map_err(|_| Errno::AFNOSUPPORT)?;
    let peer = rustix::net::getpeername(fd)?.ok_or(Errno::NOTCONN)?;
    let peer = SocketAddr::try_from(peer).map_err(|_| Errno::AFNOSUPPORT)?;
    Ok((canonical(local), canonical(peer)))
}

/// A v4-mapped address as v4; others unchanged, without scope and flow.
pub fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// `SO_TIMESTAMP` and its relatives, in their old and their 64-bit forms (asm-generic/socket.h).
pub const STAMPS: [i32; 6] = [29, 35, 37, 63, 64, 65];

/// What has been asked of a socket that shared memory can't give: a threshold, stamps, notices, signals.
pub fn unsupported(fd: BorrowedFd<'_>) -> Option<Reason> {
    /// A peek from somewhere else is no look at what comes next.
    const NO_OFFSET: i32 = -1;
    let option = |name| integer_option(fd, libc::SOL_SOCKET, name);
    if option(libc::SO_PEEK_OFF).is_some_and(|offset| offset != NO_OFFSET) {
        return Some(Reason::UnsupportedCall);
    }
    if option(libc::SO_RCVLOWAT).is_some_and(|bytes| bytes > 1) {
        return Some(Reason::RcvLowat);
    }
    let is_set = |name| option(name).is_some_and(|value| value != 0);
    let signals = || rustix::fs::fcntl_getfl(fd).is_ok_and(|flags| flags.bits() & libc::O_ASYNC as u32 != 0);
    // Of `AF_UNIX` they tell nothing.
    let stamps = || is_tcp(fd) && STAMPS.into_iter().any(is_set);
    (stamps() || signals()).then_some(Reason::UnsupportedCall)
}

/// Whether `SO_ZEROCOPY` is on, without which the kernel ignores `MSG_ZEROCOPY`.
pub fn heeds_zerocopy(fd: BorrowedFd<'_>) -> bool {
    integer_option(fd, libc::SOL_SOCKET, libc::SO_ZEROCOPY).is_some_and(|value| value != 0)
}

/// Whether `TCP_INQ` is on: recvmsg(2) tells how many bytes are left.
pub(crate) fn tells_inq(fd: BorrowedFd<'_>) -> bool {
    integer_option(fd, libc::IPPROTO_TCP, libc::TCP_INQ).is_some_and(|value| value != 0)
}

/// An option whose value begins with an integer; `None` if the kernel does not know it.
pub(crate) fn integer_option(fd: BorrowedFd<'_>, level: i32, name: i32) -> Option<i32> {
    // Room for SO_TIMESTAMPING's two words; the first tells.
    let mut value = [0i32; 2];
    let mut length = size_of_val(&value) as u32;
    // SAFETY: the kernel writes at most `length` bytes to `value`.
    unsafe { syscall!(Sysno::getsockopt, fd.as_raw_fd(), level, name, value.as_mut_ptr(), &raw mut length) }
        .ok()
        .map(|_| value[0])
}

/// Receives with `flags`, as recv(2) does, by a raw system call.
///
/// # Safety
/// `buffer` is writable for `length` bytes, or the kernel will say `EFAULT`.
pub unsafe fn recv(fd: i32, buffer: *mut u8, length: usize, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall!(Sysno::recvfrom, fd, buffer, length, flags, 0, 0) }.map_err(errno)
}

/// Sends with `flags`, as send(2) does, by a raw system call.
///
/// # Safety
/// `buffer` is readable for `length` bytes, or the kernel will say `EFAULT`.
pub unsafe fn send(fd: i32, buffer: *const u8, length: usize, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall!(Sysno::sendto, fd, buffer, length, flags, 0, 0) }.map_err(errno)
}

/// recvmsg(2) by a raw system call.
///
/// # Safety
/// As for recvmsg(2).
pub unsafe fn recvmsg(fd: i32, message: *mut libc::msghdr, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall!(Sysno::recvmsg, fd, message, flags) }.map_err(errno)
}

/// sendmsg(2) by a raw system call.
///
/// # Safety
/// As for sendmsg(2).
pub unsafe fn sendmsg(fd: i32, message: *const libc::msghdr, flags: i32) -> Result<usize, Errno> {
    // SAFETY: the caller's promise.
    unsafe { syscall!(Sysno::sendmsg, fd, message, flags) }.map_err(errno)
}

/// Who owns the other end of a TCP connection on this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    /// User id of the socket, as seen from this process's user namespace.
    pub uid: u32,
}

/// Asks the kernel's sock_diag(7) for the socket at `local` that is connected to `peer`. `Ok(None)` if no
/// socket of this network namespace is that one: then the peer is another host.
///
/// Where there is none the kernel tells of who listens at `local`, who may be anybody: the answer has to name both addresses.
pub fn owner_of(local: SocketAddr, peer: SocketAddr) -> Result<Option<Owner>, Errno> {
    ask_diag(&diag_request(local, peer), |reply| parse_diag(reply, local, peer))
}

/// Whether the socket `fd` lives in the network namespace of the calling thread (`SO_NETNS_COOKIE`, Linux 5.14). True where the kernel does
/// not tell, or no socket can be had to compare with.
pub(crate) fn is_of_this_network(fd: BorrowedFd<'_>) -> bool {
    use rustix::net::{AddressFamily, SocketFlags, SocketType};
    let Ok(own) =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, SocketFlags::CLOEXEC, None)
    else {
        return true;
    };
    let cookie = |fd: BorrowedFd<'_>| {
        let mut value = 0u64;
        let mut length = size_of_val(&value) as u32;
        let (value_at, length_at) = (&raw mut value, &raw mut length);
        // SAFETY: the kernel writes at most `length` bytes to `value`.
        unsafe {
            syscall!(
                Sysno::getsockopt,
                fd.as_raw_fd(),
                libc::SOL_SOCKET,
                SO_NETNS_COOKIE,
                value_at,
                length_at
            )
        }
        .ok()
        .map(|_| value)
    };
    cookie(fd) == cookie(own.as_fd())
}

/// The effective user of the process at the other end of the Unix socket `fd`, when it connected or listened (unix(7), `SO_PEERCRED`). The
/// same option has that process's id, which is 0 where it is in another PID namespace, as a pod's other containers are: rustix's types know
/// of no such id.
pub(crate) fn user_of_peer(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    let mut peer = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of_val(&peer) as u32;
    let (peer_at, length_at) = (&raw mut peer, &raw mut length);
    // SAFETY: the kernel writes at most `length` bytes to `peer`, of which all values are valid.
    unsafe {
        syscall!(Sysno::getsockopt, fd.as_raw_fd(), libc::SOL_SOCKET, libc::SO_PEERCRED, peer_at, length_at)
    }
    .map_err(errno)?;
    Ok(peer.uid)
}

/// asm-generic/socket.h
const SO_NETNS_COOKIE: i32 = 71;

/// Sends `request` to sock_diag(7), and parses the reply.
pub(crate) fn ask_diag<T>(request: &[u8], parse: impl FnOnce(&[u8]) -> Result<T, Errno>) -> Result<T, Errno> {
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};
    // To netlink(7) a datagram socket is the same, but profiles of AppArmor allow what libc asks for (abstractions/nameservice).
    let socket = rustix::net::socket_with(
        AddressFamily::NETLINK,
        SocketType::RAW,
        SocketFlags::CLOEXEC,
        Some(netlink::SOCK_DIAG),
    )?;
    rustix::net::send(&socket, request, SendFlags::empty())?;
    let mut reply = [MaybeUninit::uninit(); 512];
    let ((reply, _), _) = rustix::net::recv(&socket, &mut reply, RecvFlags::DONTWAIT)?;
    parse(reply)
}

const SOCK_DIAG_BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const NLMSG_ERROR: u16 = 2;
const NLMSG_HEADER: usize = 16;
/// `idiag_family` in struct inet_diag_msg, after the netlink header.
const DIAG_FAMILY: usize = NLMSG_HEADER;
/// `idiag_state`.
const DIAG_STATE: usize = NLMSG_HEADER + 1;
/// `id`, which begins as in the request.
const DIAG_ID: usize = NLMSG_HEADER + 4;
/// `idiag_uid`.
const DIAG_UID: usize = NLMSG_HEADER + 64;
/// The states of include/net/tcp_states.h in which a socket is, or has been, connected, and has an owner: `TCP_ESTABLISHED`,
/// `TCP_FIN_WAIT1`, `TCP_FIN_WAIT2`, `TCP_CLOSE_WAIT`, `TCP_LAST_ACK`, `TCP_CLOSING`.
const CONNECTED: [u8; 6] = [1, 4, 5, 8, 9, 11];

/// A request of so many bytes, of which struct nlmsghdr is filled in.
pub(crate) fn diag_header<const BYTES: usize>() -> [u8; BYTES] {
    let mut request = [0u8; BYTES];
    request[0..4].copy_from_slice(&(BYTES as u32).to_ne_bytes());
    request[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
    request[6..8].copy_from_slice(&NLM_F_REQUEST.to_ne_bytes());
    request
}

/// Where the answer in `reply` begins; `None` if there is no such socket.
pub(crate) fn diag_answer(reply: &[u8]) -> Result<Option<usize>, Errno> {
    let kind = reply.get(4..6).map(|bytes| u16::from_ne_bytes([bytes[0], bytes[1]]));
    match kind {
        Some(SOCK_DIAG_BY_FAMILY) => Ok(Some(NLMSG_HEADER)),
        Some(NLMSG_ERROR) => {
            let code = diag_word(reply, NLMSG_HEADER)?.cast_signed();
            let error = Errno::from_raw_os_error(-code);
            if error == Errno::NOENT { Ok(None) } else { Err(error) }
        }
        _ => Err(Errno::BADMSG),
    }
}

fn diag_word(reply: &[u8], at: usize) -> Result<u32, Errno> {
    let bytes = reply.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).ok_or(Errno::BADMSG)?;
    Ok(u32::from_ne_bytes(bytes))
}

/// struct nlmsghdr and struct inet_diag_req_v2 of linux/inet_diag.h.
fn diag_request(local: SocketAddr, peer: SocketAddr) -> [u8; 72] {
    let mut request = diag_header();
    let family = if local.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    request[16] = family as u8;
    request[17] = libc::IPPROTO_TCP as u8;
    request[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
    let id = &mut request[24..72];
    id[0..2].copy_from_slice(&local.port().to_be_bytes());
    id[2..4].copy_from_slice(&peer.port().to_be_bytes());
    put_address(&mut id[4..20], local.ip());
    put_address(&mut id[20..36], peer.ip());
    // INET_DIAG_NOCOOKIE
    id[40..48].copy_from_slice(&u64::MAX.to_ne_bytes());
    request
}

fn put_address(field: &mut [u8], address: IpAddr) {
    match address {
        IpAddr::V4(v4) => field[..4].copy_from_slice(&v4.octets()),
        IpAddr::V6(v6) => field.copy_from_slice(&v6.octets()),
    }
}

/// The owner of the socket in `reply`, if it is the one at `local` that is connected to `peer`.
fn parse_diag(reply: &[u8], local: SocketAddr, peer: SocketAddr) -> Result<Option<Owner>, Errno> {
    if diag_answer(reply)?.is_none() {
        return Ok(None);
    }
    let (family, state) = match reply.get(DIAG_FAMILY..=DIAG_STATE) {
        Some(&[family, state]) => (family, state),
        _ => return Err(Errno::BADMSG),
    };
    let id = reply.get(DIAG_ID..DIAG_ID + 36).ok_or(Errno::BADMSG)?;
    let end = |port: usize, address: usize| {
        let address = &id[address..address + 16];
        let ip = if i32::from(family) == libc::AF_INET {
            IpAddr::from([address[0], address[1], address[2], address[3]])
        } else {
            let octets: [u8; 16] = address.try_into().expect("sixteen octets");
            IpAddr::from(octets).to_canonical()
        };
        (ip, u16::from_be_bytes([id[port], id[port + 1]]))
    };
    let same =
        |found: (IpAddr, u16), wanted: SocketAddr| found == (wanted.ip().to_canonical(), wanted.port());
    if !CONNECTED.contains(&state) || !same(end(0, 4), local) || !same(end(2, 20), peer) {
        return Ok(None);
    }
    Ok(Some(Owner { uid: diag_word(reply, DIAG_UID)? }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream};

    fn pair(address: &str) -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind(address).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    #[test]
    fn counts_are_those_of_the_application_on_either_side() {
        let (mut client, mut server) = pair("127.0.0.1:0");
        client.write_all(&[1; 1000]).unwrap();
        server.write_all(&[2; 77]).unwrap();
        server.read_exact(&mut [0; 400]).unwrap();
        assert_eq!(counts(client.as_fd()).unwrap().sent, 1000);
        assert_eq!(counts(server.as_fd()).unwrap().sent, 77);
        assert_eq!(counts(server.as_fd()).unwrap().received, 1000);
        assert_eq!(bytes_read(server.as_fd()).unwrap(), 400);
        assert_eq!(bytes_read(client.as_fd()).unwrap(), 0);
    }

    #[test]
    fn the_end_of_the_stream_is_no_byte() {
        let (mut client, mut server) = pair("127.0.0.1:0");
        client.write_all(&[1; 10]).unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        server.read_to_end(&mut Vec::new()).unwrap();
        assert_eq!(counts(server.as_fd()).unwrap().received, 10);
        assert_eq!(bytes_read(server.as_fd()).unwrap(), 10);
    }

    #[test]
    fn counts_include_what_the_peer_does_not_take() {
        let (mut client, _server) = pair("127.0.0.1:0");
        client.set_nonblocking(true).unwrap();
        let mut sent = 0;
        while let Ok(count) = client.write(&[3; 65536]) {
            sent += count as u64;
        }
        assert_eq!(counts(client.as_fd()).unwrap().sent, sent);
    }

    #[test]
    fn the_owner_of_the_other_end_is_found_on_this_host_only() {
        for address in ["127.0.0.1:0", "[::1]:0"] {
            let (client, server) = pair(address);
            let (local, peer) = addresses(server.as_fd()).unwrap();
            let uid = rustix::process::getuid().as_raw();
            assert_eq!(owner_of(peer, local).unwrap(), Some(Owner { uid }), "{address}");
            let mut elsewhere = peer;
            elsewhere.set_port(1);
            assert_eq!(owner_of(elsewhere, local).unwrap(), None);
            drop(client);
        }
    }

    #[test]
    fn a_socket_of_another_network_namespace_is_known() {
        use rustix::thread::{UnshareFlags, unshare_unsafe};
        let (client, _server) = pair("127.0.0.1:0");
        assert!(is_of_this_network(client.as_fd()));
        let elsewhere = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                // SAFETY: the network is the only thing that this thread then has for itself.
                match unsafe { unshare_unsafe(UnshareFlags::NEWNET) } {
                    Err(Errno::PERM) => None,
                    made => Some((made, is_of_this_network(client.as_fd()))),
                }
            });
            thread.join().unwrap()
        });
        assert!(matches!(elsewhere, None | Some((Ok(()), false))), "{elsewhere:?}");
    }

    #[test]
    fn who_listens_at_the_port_of_another_hosts_client_owns_no_connection() {
        for (any, server, client) in
            [("0.0.0.0:0", "127.0.0.1:5432", "203.0.113.5"), ("[::]:0", "[::1]:5432", "2001:db8::5")]
        {
            let listener = TcpListener::bind(any).unwrap();
            let port = listener.local_addr().unwrap().port();
            let client = SocketAddr::new(client.parse().unwrap(), port);
            assert_eq!(owner_of(client, server.parse().unwrap()).unwrap(), None);
        }
    }

    #[test]
    fn an_end_that_is_a_socket_of_both_families_is_found() {
        let listener = TcpListener::bind("[::]:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let client = TcpStream::connect(("127.0.0.1", port)).unwrap();
        let server = listener.accept().unwrap().0;
        let (local, peer) = addresses(client.as_fd()).unwrap();
        let uid = rustix::process::getuid().as_raw();
        assert_eq!(owner_of(peer, local).unwrap(), Some(Owner { uid }));
        let (local, peer) = addresses(server.as_fd()).unwrap();
        assert_eq!(owner_of(peer, local).unwrap(), Some(Owner { uid }));
    }

    #[test]
    fn who_has_closed_has_a_moment_for_an_answer() {
        let (client, server) = pair("127.0.0.1:0");
        let is_vain = closed_unanswered(client.as_raw_fd());
        std::thread::sleep(2 * ANSWER);
        assert!(!is_vain(), "it has not closed");
        drop(server);
        wait_for(client.as_raw_fd(), PollFlags::IN, None);
        assert!(is_vain());
        let is_vain = closed_unanswered(client.as_raw_fd());
        let begun = Instant::now();
        while !is_vain() {}
        assert!(begun.elapsed() >= ANSWER / 2);
    }

    #[test]
    fn a_socket_that_asks_for_more_than_bytes_is_known() {
        let (client, _server) = pair("127.0.0.1:0");
        let set = |name: i32, value: i32| {
            // SAFETY: an int is readable at `value`.
            let result = unsafe {
                let length = size_of::<i32>() as u32;
                libc::setsockopt(
                    client.as_raw_fd(),
                    libc::SOL_SOCKET,
                    name,
                    (&raw const value).cast(),
                    length,
                )
            };
            assert_eq!(result, 0, "option {name}");
        };
        let all = [
            (libc::SO_RCVLOWAT, 100, 1, Reason::RcvLowat),
            (libc::SO_TIMESTAMP, 1, 0, Reason::UnsupportedCall),
            (libc::SO_TIMESTAMPNS, 1, 0, Reason::UnsupportedCall),
            (libc::SO_TIMESTAMPING, 16, 0, Reason::UnsupportedCall),
        ];
        for (name, on, off, reason) in all {
            assert_eq!(unsupported(client.as_fd()), None);
            set(name, on);
            assert_eq!(unsupported(client.as_fd()), Some(reason), "option {name}");
            set(name, off);
        }
    }

    #[test]
    fn a_reply_that_is_too_short_is_an_error() {
        let [local, peer] = ["127.0.0.1:1", "127.0.0.1:2"].map(|address| address.parse().unwrap());
        let parse = |reply: &[u8]| parse_diag(reply, local, peer);
        assert!(parse(&[]).is_err());
        assert!(parse(&[0; 8]).is_err());
        let mut cut = [0; 40];
        cut[4..6].copy_from_slice(&SOCK_DIAG_BY_FAMILY.to_ne_bytes());
        assert!(parse(&cut).is_err());
    }
}
