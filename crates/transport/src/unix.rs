//! What the kernel knows about an `AF_UNIX` stream socket (unix(7)): its name, and who is at its other end.
//!
//! Such a connection has no addresses that tell it from others, so its two sockets' inode numbers take their place:
//! sock_diag(7) tells both ends.

use std::fmt;
use std::os::fd::{AsRawFd, BorrowedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;
use sha2::{Digest, Sha256};
use syscalls::{Sysno, syscall};

use crate::tcp::{self, errno, integer_option};

/// Bytes of `sun_path` (unix(7)).
pub const NAME_BYTES: usize = 108;

/// The name of a socket: a path, or behind a zero byte an abstract name.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Name {
    bytes: [u8; NAME_BYTES],
    length: usize,
}

impl Name {
    /// Of what follows the family in a `sockaddr_un`. `None` if it is no name: the socket has none.
    pub fn of(path: &[u8]) -> Option<Self> {
        let path = match path.first()? {
            0 => path,
            // A path ends at its first zero, if it has one.
            _ => path.split(|&byte| byte == 0).next()?,
        };
        let path = path.get(..path.len().min(NAME_BYTES))?;
        let mut bytes = [0; NAME_BYTES];
        bytes[..path.len()].copy_from_slice(path);
        Some(Self { bytes, length: path.len() })
    }

    /// The name of the socket `fd`.
    pub fn of_socket(fd: BorrowedFd<'_>) -> Option<Self> {
        Self::asked(Sysno::getsockname, fd)
    }

    /// The name of the socket that `fd` is connected to.
    pub fn of_peer(fd: BorrowedFd<'_>) -> Option<Self> {
        Self::asked(Sysno::getpeername, fd)
    }

    fn asked(call: Sysno, fd: BorrowedFd<'_>) -> Option<Self> {
        let (raw, length) = address(call, fd).ok()?;
        if i32::from(raw.sun_family) != libc::AF_UNIX {
            return None;
        }
        let length = length.saturating_sub(std::mem::offset_of!(libc::sockaddr_un, sun_path));
        let path = raw.sun_path.map(|character| character.to_ne_bytes()[0]);
        Self::of(path.get(..length)?)
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.length]
    }

    /// Stands for the name where the port of a TCP connection stands: what earlier connections to it were like is remembered by
    /// that. Others may have the same.
    pub fn number(&self) -> u16 {
        // FNV-1a, folded.
        let hash = self
            .bytes()
            .iter()
            .fold(0x811c_9dc5u32, |hash, &byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
        (hash ^ hash >> 16) as u16
    }

    /// As text that tells it from all others.
    pub(crate) fn digest(&self) -> String {
        let digest = Sha256::digest(self.bytes());
        digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (mark, rest) = match self.bytes().split_first() {
            Some((0, rest)) => ("@", rest),
            _ => ("", self.bytes()),
        };
        write!(f, "{mark}{}", String::from_utf8_lossy(rest))
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Name({self})")
    }
}

/// The address that getsockname(2) or getpeername(2) tells, and its length in bytes.
pub fn address(call: Sysno, fd: BorrowedFd<'_>) -> Result<(libc::sockaddr_un, usize), Errno> {
    let mut raw = libc::sockaddr_un { sun_family: 0, sun_path: [0; NAME_BYTES] };
    let mut length = size_of_val(&raw) as u32;
    // SAFETY: the kernel writes at most `length` bytes to `raw`.
    unsafe { syscall!(call, fd.as_raw_fd(), &raw mut raw, &raw mut length) }.map_err(errno)?;
    Ok((raw, length as usize))
}

/// Whether `fd` is an `AF_UNIX` socket of type stream.
pub fn is_stream(fd: BorrowedFd<'_>) -> bool {
    integer_option(fd, libc::SOL_SOCKET, libc::SO_DOMAIN) == Some(libc::AF_UNIX)
        && integer_option(fd, libc::SOL_SOCKET, libc::SO_TYPE) == Some(libc::SOCK_STREAM)
}

/// Whether `fd` is an `AF_UNIX` stream socket that neither listens nor is connected.
pub fn is_unconnected(fd: BorrowedFd<'_>) -> bool {
    is_stream(fd)
        && integer_option(fd, libc::SOL_SOCKET, libc::SO_ACCEPTCONN) == Some(0)
        && rustix::net::getpeername(fd).is_err_and(|errno| errno == Errno::NOTCONN)
}

/// How many bytes the kernel would take from the sender, its own structures included (`SO_SNDBUF`, unix(7)).
pub(crate) fn send_buffer(fd: i32) -> u64 {
    // SAFETY: the caller's call is on this descriptor, which is open meanwhile.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    integer_option(socket, libc::SOL_SOCKET, libc::SO_SNDBUF)
        .map_or(0, |bytes| bytes.max(0).cast_unsigned().into())
}

/// Whether neither direction carries anything any more: the peer has closed its socket, or one side has shut down both.
pub(crate) fn is_over(fd: i32) -> bool {
    tcp::has(fd, PollFlags::HUP)
}

/// Whether the peer's stream has ended.
pub(crate) fn has_ended(fd: i32) -> bool {
    tcp::has(fd, PollFlags::RDHUP)
}

/// Whether every message is to come with what the kernel knows of its sender: only the kernel can tell that.
pub fn tells_senders(fd: BorrowedFd<'_>) -> bool {
    SENDER_OPTIONS
        .iter()
        .any(|&name| integer_option(fd, libc::SOL_SOCKET, name).is_some_and(|value| value != 0))
}

/// `SO_PASSCRED`, `SO_PASSSEC` and `SO_PASSPIDFD` (asm-generic/socket.h).
pub const SENDER_OPTIONS: [i32; 3] = [libc::SO_PASSCRED, libc::SO_PASSSEC, 76];

/// Has each recvmsg(2) tell how many bytes it leaves (asm-generic/socket.h, since Linux 6.17). Whether it is on can't be asked.
pub const SO_INQ: i32 = 84;

/// The number by which sock_diag(7) knows the socket `fd`.
pub(crate) fn inode(fd: BorrowedFd<'_>) -> Result<u32, Errno> {
    // The kernel's numbers of sockets have 32 bits (`get_next_ino` of fs/inode.c).
    Ok(rustix::fs::fstat(fd)?.st_ino as u32)
}

/// What sock_diag(7) tells of a socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    /// The socket that it is connected to; 0 if nobody has accepted it yet.
    pub(crate) peer: u32,
    /// The user that it belongs to, where the kernel tells that (Linux 5.3).
    pub(crate) uid: Option<u32>,
    /// Bytes that wait there to be read.
    pub(crate) unread: Option<u32>,
}

/// Asks for the stream socket `inode`. `Ok(None)` if no socket of this network namespace is that one, or it has no peer.
pub(crate) fn look_up(inode: u32) -> Result<Option<Known>, Errno> {
    tcp::ask_diag(&request(inode), parse)
}

/// How many bytes wait at the other end of the socket `fd`. `Ok(None)` if that is closed.
pub(crate) fn unread_by_peer(fd: BorrowedFd<'_>) -> Result<Option<u64>, Errno> {
    let Some(known) = look_up(inode(fd)?)?.filter(|known| known.peer != 0) else { return Ok(None) };
    let Some(peer) = look_up(known.peer)? else { return Ok(None) };
    peer.unread.map(|unread| Some(u64::from(unread))).ok_or(Errno::OPNOTSUPP)
}

/// Attributes of a reply (linux/unix_diag.h).
const PEER: u16 = 2;
/// struct unix_diag_rqlen.
const QUEUES: u16 = 4;
const UID: u16 = 7;

/// struct nlmsghdr and struct unix_diag_req of linux/unix_diag.h.
fn request(inode: u32) -> [u8; 40] {
    /// `UDIAG_SHOW_PEER`, `UDIAG_SHOW_RQLEN` and `UDIAG_SHOW_UID`.
    const SHOW: u32 = 0x4 | 0x10 | 0x40;
    let mut request = tcp::diag_header();
    request[16] = libc::AF_UNIX as u8;
    request[20..24].copy_from_slice(&u32::MAX.to_ne_bytes());
    request[24..28].copy_from_slice(&inode.to_ne_bytes());
    request[28..32].copy_from_slice(&SHOW.to_ne_bytes());
    // No cookie.
    request[32..40].copy_from_slice(&u64::MAX.to_ne_bytes());
    request
}

fn parse(reply: &[u8]) -> Result<Option<Known>, Errno> {
    let half = |at: usize| Some(u16::from_ne_bytes(reply.get(at..at + 2)?.try_into().ok()?));
    let word = |at: usize| Some(u32::from_ne_bytes(reply.get(at..at + 4)?.try_into().ok()?));
    let Some(body) = tcp::diag_answer(reply)? else { return Ok(None) };
    let kind = *reply.get(body + 1).ok_or(Errno::BADMSG)?;
    if i32::from(kind) != libc::SOCK_STREAM {
        return Ok(None);
    }
    let (mut peer, mut uid, mut unread) = (None, None, None);
    // Behind struct unix_diag_msg: attributes, each aligned to four bytes.
    let mut at = body + 16;
    while let (Some(length), Some(attribute)) = (half(at), half(at + 2)) {
        match attribute {
            PEER => peer = word(at + 4),
            UID => uid = word(at + 4),
            QUEUES => unread = word(at + 4),
            _ => {}
        }
        if length < 4 {
            break;
        }
        at += usize::from(length).next_multiple_of(4);
    }
    Ok(peer.map(|peer| Known { peer, uid, unread }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::fd::AsFd;
    use std::os::unix::net::{UnixListener, UnixStream};

    #[test]
    fn both_ends_know_each_other_and_the_listeners_name() {
        let folder = std::env::temp_dir().join(format!("thallus-unix-{}", crate::process::id()));
        let listener = UnixListener::bind(&folder).unwrap();
        let client = UnixStream::connect(&folder).unwrap();
        let before = look_up(inode(client.as_fd()).unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        std::fs::remove_file(&folder).unwrap();
        assert_eq!(before.map(|known| known.peer), Some(0), "nobody has accepted it");
        let [here, there] = [&client, &server].map(|end| inode(end.as_fd()).unwrap());
        let uid = rustix::process::getuid().as_raw();
        for (one, other) in [(here, there), (there, here)] {
            let known = look_up(one).unwrap().unwrap();
            assert_eq!((known.peer, known.uid.unwrap_or(uid)), (other, uid));
        }
        let name = Name::of_socket(listener.as_fd()).unwrap();
        assert_eq!(Name::of_peer(client.as_fd()), Some(name));
        assert_eq!(Name::of_socket(server.as_fd()), Some(name));
        assert_eq!((Name::of_socket(client.as_fd()), Name::of_peer(server.as_fd())), (None, None));
        assert_eq!(name.to_string(), folder.display().to_string());
        let ends = || (has_ended(client.as_raw_fd()), is_over(client.as_raw_fd()));
        assert!(is_stream(client.as_fd()));
        assert_eq!(ends(), (false, false));
        assert_eq!(unread_by_peer(client.as_fd()), Ok(Some(0)));
        let mut part = [0; 4];
        (&client).write_all(b"some, and ").unwrap();
        (&client).write_all(b"more").unwrap();
        (&server).read_exact(&mut part).unwrap();
        assert_eq!(unread_by_peer(client.as_fd()), Ok(Some(10)));
        assert_eq!(unread_by_peer(server.as_fd()), Ok(Some(0)));
        server.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(ends(), (true, false));
        drop(server);
        assert_eq!(ends(), (true, true));
        assert_eq!(look_up(there).unwrap(), None);
        assert_eq!(unread_by_peer(client.as_fd()), Ok(None));
    }

    #[test]
    fn a_name_is_as_the_kernel_reads_it() {
        let text = |path: &[u8]| Name::of(path).map(|name| name.to_string());
        assert_eq!(text(b"/run/a\0rest"), Some("/run/a".to_owned()));
        assert_eq!(text(b"\0abstract\0x"), Some("@abstract\0x".to_owned()));
        assert_eq!(text(b""), None);
        assert_ne!(Name::of(b"\0a"), Name::of(b"\0a\0"));
        assert_eq!(Name::of(&[b'x'; 200]).unwrap().bytes().len(), NAME_BYTES);
        assert_eq!(Name::of(b"/a").unwrap().digest().len(), 32);
    }

    #[test]
    fn a_reply_that_is_cut_short_is_an_error_or_tells_less() {
        assert!(parse(&[]).is_err());
        assert!(parse(&[0; 8]).is_err());
    }
}
