//! Why a connection is on TCP: the named reasons that counters, logs and `thallus status` show.

use std::fmt;

macro_rules! reasons {
    ($($(#[$doc:meta])* $variant:ident = $code:literal => $name:literal,)*) => {
        /// Why a connection did not leave TCP. Names are stable; codes are private to one build.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u32)]
        pub enum Reason {
            $($(#[$doc])* $variant = $code,)*
        }

        impl Reason {
            /// Every reason there is, in the order of their codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The stable name, in kebab-case.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }

            /// The reason with this code, if there is one.
            pub const fn from_code(code: u32) -> Option<Self> {
                match code {
                    $($code => Some(Self::$variant),)*
                    _ => None,
                }
            }
        }
    };
}

reasons! {
    /// Closed, or still too young, before an upgrade was worth its price.
    Short = 1 => "short",
    /// Nothing on this host says that the peer's port is served by a process with this library.
    PeerWithoutThallus = 2 => "peer-without-thallus",
    /// The peer is another host.
    Remote = 3 => "remote",
    /// Our side offered, and the process that reads on the other side never answered.
    NoAnswer = 4 => "no-answer",
    /// Two processes had the connection before it could be upgraded.
    SharedBeforeUpgrade = 5 => "shared-before-upgrade",
    /// `THALLUS_PORTS` does not list the server's port.
    NotSelected = 6 => "not-selected",
    /// `THALLUS_FABRIC=off`.
    Disabled = 7 => "disabled",
    /// The segment could not be created or mapped for lack of memory.
    NoMemory = 8 => "no-memory",
    /// No free file descriptor for the rendezvous or the segment.
    NoFds = 9 => "no-fds",
    /// Whoever answered to the connection's name does not own its other end.
    NotOwner = 10 => "not-owner",
    /// A program started by exec, which may know nothing of us, got the file descriptor.
    InheritedByExec = 11 => "inherited-by-exec",
    /// The kernel counts bytes that no hook has seen.
    UnseenBytes = 12 => "unseen-bytes",
    /// One side shut a direction down first.
    ShutdownBeforeUpgrade = 13 => "shutdown-before-upgrade",
    /// The program used a call that only the kernel can serve.
    UnsupportedCall = 14 => "unsupported-call",
    /// The process uses io_uring, which no hook sees.
    IoUring = 15 => "io-uring",
    /// Sent to another process with SCM_RIGHTS.
    PassedToProcess = 16 => "passed-to-process",
    /// Wrapped in a C stdio stream.
    Stdio = 17 => "stdio",
    /// `SO_RCVLOWAT` above one byte.
    RcvLowat = 18 => "rcvlowat",
    /// Urgent data.
    Oob = 19 => "oob",
    /// Registered with `EPOLLEXCLUSIVE`, whose mask cannot be changed later.
    Exclusive = 20 => "exclusive",
    /// The kernel lacks a call that the fabric needs (`MADV_POPULATE_WRITE`, Linux 5.14).
    KernelTooOld = 21 => "kernel-too-old",
    /// Someone else holds the connection's rendezvous name.
    NameTaken = 22 => "name-taken",
    /// The segment that arrived is not what the protocol promises.
    BadOffer = 23 => "bad-offer",
    /// The other end's owner could not be asked for (no sock_diag in this kernel or container).
    NoDiag = 24 => "no-diag",
    /// No libibverbs, or it can't be used.
    NoVerbs = 25 => "no-verbs",
    /// No RDMA port has the connection's address, or it can't be opened.
    NoDevice = 26 => "no-device",
    /// The RDMA port is down.
    PortDown = 27 => "port-down",
    /// Too little memory may be locked (`RLIMIT_MEMLOCK`).
    MemLock = 28 => "memlock",
    /// The queue pair could not be connected.
    NoRoute = 29 => "no-route",
    /// The greeting is of another version.
    OtherVersion = 30 => "other-version",
    /// The greeting is not signed with the shared key.
    WrongKey = 31 => "wrong-key",
    /// The server declined.
    Refused = 32 => "refused",
    /// The server's first bytes came before the client's.
    PeerSpokeFirst = 33 => "peer-spoke-first",
    /// `thallus pin`.
    ByRequest = 34 => "by-request",
    /// One side's device is iWARP, the other's is not.
    OtherTransport = 35 => "other-transport",
    /// It had left TCP: the fabric failed, the process forked, or the peer went back.
    Returned = 36 => "returned",
    /// The program has a seccomp filter made for its own system calls.
    Sandbox = 37 => "sandbox",
    /// The program waits for it where no hook sees that: a bell would not wake it.
    UnseenWait = 38 => "unseen-wait",
    /// Sent with `MSG_ZEROCOPY`.
    ZeroCopy = 39 => "zerocopy",
    /// The process has loaded a module whose calls no hook sees.
    UnseenCalls = 40 => "unseen-calls",
    /// What the program sends or wants beside the bytes, descriptors or credentials (unix(7)), only the kernel can carry.
    ControlData = 41 => "control-data",
    /// A thread of the process has descriptors of its own (unshare(2), `CLONE_FILES`).
    OwnDescriptors = 42 => "own-descriptors",
    /// The server has read nothing so far, so that nothing proves that it would read with this library.
    NothingRead = 43 => "nothing-read",
    /// What confines the process (a profile of AppArmor, a policy of SELinux, a seccomp filter) does not let it take a step.
    Forbidden = 44 => "forbidden",
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_are_one_to_one() {
        let mut names: Vec<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), Reason::ALL.len());
        for &reason in Reason::ALL {
            assert_eq!(Reason::from_code(reason as u32), Some(reason));
        }
        assert_eq!(Reason::from_code(0), None);
    }
}
