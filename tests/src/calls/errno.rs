//! Error numbers with their symbolic names.

use std::fmt;

/// An error number, shown as `EAGAIN` and the like.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Errno(pub libc::c_int);

impl Errno {
    /// What the last failed call of this thread left in `errno`.
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(0))
    }

    /// A call's return value: what it counted, or the error if it is negative.
    pub(super) fn check(ret: isize) -> Result<usize, Self> {
        usize::try_from(ret).map_err(|_| Self::last())
    }
}

macro_rules! names {
    ($($name:ident)*) => {
        impl Errno {
            $(#[doc = concat!("`", stringify!($name), "`")] pub const $name: Self = Self(libc::$name);)*

            fn name(self) -> Option<&'static str> {
                match self.0 { $(libc::$name => Some(stringify!($name)),)* _ => None }
            }
        }
    };
}

names! {
    EPERM ENOENT ESRCH EINTR EIO ENXIO E2BIG ENOEXEC EBADF ECHILD EAGAIN ENOMEM EACCES EFAULT EBUSY EEXIST
    EXDEV ENODEV ENOTDIR EISDIR EINVAL ENFILE EMFILE ENOTTY EFBIG ENOSPC ESPIPE EPIPE ENOSYS ELOOP
    ENOTSOCK EDESTADDRREQ EMSGSIZE EPROTOTYPE ENOPROTOOPT EPROTONOSUPPORT EOPNOTSUPP EAFNOSUPPORT
    EADDRINUSE EADDRNOTAVAIL ENETUNREACH ECONNABORTED ECONNRESET ENOBUFS EISCONN ENOTCONN ESHUTDOWN
    ETIMEDOUT ECONNREFUSED EHOSTUNREACH EALREADY EINPROGRESS ECANCELED
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "errno {}", self.0),
        }
    }
}

impl fmt::Debug for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for Errno {}

impl From<rustix::io::Errno> for Errno {
    fn from(errno: rustix::io::Errno) -> Self {
        Self(errno.raw_os_error())
    }
}
