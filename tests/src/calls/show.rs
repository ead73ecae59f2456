//! How arguments and results look in a transcript.

use std::fmt;

/// Bytes: in full if few, else length and checksum.
pub(super) struct Bytes<'a>(pub(super) &'a [u8]);

impl fmt::Display for Bytes<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.len() <= 48 {
            write!(f, "\"{}\"", self.0.escape_ascii())
        } else {
            write!(f, "{} bytes {:016x}", self.0.len(), fnv1a(self.0))
        }
    }
}

/// FNV-1a (Fowler, Noll, Vo), 64 bit.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(0xcbf2_9ce4_8422_2325, |sum, &byte| (sum ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3))
}

/// Lengths of buffers: each of a few, else how many there are.
pub(super) fn lengths(lens: &[usize]) -> String {
    if lens.len() <= 8 { format!("{lens:?}") } else { format!("{} buffers of {}", lens.len(), lens[0]) }
}

macro_rules! bit_names {
    ($(#[$doc:meta])* $show:ident: $type:ty { $($name:ident)* }) => {
        $(#[$doc])*
        pub(super) fn $show(bits: $type) -> String {
            let mut rest = bits;
            let mut names = Vec::new();
            $(
                let bit = libc::$name as $type;
                if bit != 0 && rest & bit == bit {
                    names.push(stringify!($name).to_owned());
                    rest &= !bit;
                }
            )*
            if rest != 0 || names.is_empty() {
                names.push(if rest == 0 { "0".to_owned() } else { format!("{rest:#x}") });
            }
            names.join("|")
        }
    };
}

bit_names! {
    /// Flags of the send and recv families.
    message_flags: libc::c_int {
        MSG_OOB MSG_PEEK MSG_DONTROUTE MSG_CTRUNC MSG_TRUNC MSG_DONTWAIT MSG_EOR MSG_WAITALL MSG_ERRQUEUE
        MSG_NOSIGNAL MSG_MORE MSG_CMSG_CLOEXEC MSG_ZEROCOPY MSG_WAITFORONE
    }
}

bit_names! {
    /// Events of poll.
    poll_events: libc::c_short {
        POLLIN POLLPRI POLLOUT POLLERR POLLHUP POLLNVAL POLLRDNORM POLLRDBAND POLLWRNORM POLLWRBAND POLLRDHUP
    }
}

bit_names! {
    /// Events of epoll.
    epoll_events: u32 {
        EPOLLIN EPOLLPRI EPOLLOUT EPOLLERR EPOLLHUP EPOLLRDNORM EPOLLRDBAND EPOLLWRNORM EPOLLWRBAND EPOLLRDHUP
        EPOLLEXCLUSIVE EPOLLONESHOT EPOLLET
    }
}

bit_names! {
    /// Status flags of an open file.
    status_flags: libc::c_int { O_RDWR O_WRONLY O_NONBLOCK O_APPEND O_ASYNC O_CLOEXEC }
}
