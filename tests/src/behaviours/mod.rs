//! The table of behaviours.
//!
//! Most are *connected*: both sides are given the two ends of one warmed-up connection, and either may
//! have listened, so the harness runs them both ways round. The others make their connections themselves.

use crate::calls::{End, Fd};
use crate::side::Side;

mod arguments;
mod basic;
mod cancelling;
mod chimes;
mod connecting;
mod descriptors;
mod dying;
mod ending;
mod epoll;
mod epoll_edges;
mod epoll_numbers;
mod epoll_sets;
mod epoll_young;
mod flags;
mod full;
mod handing_on;
mod heirs;
pub mod helpers;
mod hostile;
mod inside_libc;
mod killed;
mod leftovers;
mod lending;
mod locking;
mod lying;
mod options;
mod peers;
mod polling;
mod processes;
mod resets;
mod returning;
mod scarce;
mod short_before;
mod signals;
mod sizes;
mod switching;
mod threads;
mod timeouts;
mod unaffected;
mod unix_beside;
mod unix_credentials;
mod unix_messages;
mod unix_names;
mod unix_rights;
mod unix_shutdown;
mod unix_streams;
mod unseen;
mod urgent;
mod waiting;

/// Named counts of connections that one side must leave in its statistics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tally {
    /// So many left TCP, and none stayed.
    Upgraded(u64),
    /// So many left TCP, and these stayed, for these reasons.
    Mixed(u64, &'static [(&'static str, u64)]),
    /// At least so many left TCP, of so many in all.
    AtLeast(u64, u64),
    /// So many left TCP, and went back.
    Returned(u64),
    /// So many stayed, whatever the reasons.
    Stayed(u64),
    /// None left TCP; a process that did nothing with its connections, but hand them on, need not count them.
    StayedOrUncounted,
    /// So many in all; how many left TCP depends on timing.
    Total(u64),
    /// The process is killed before it can tell, or how many it counts depends on timing.
    Unknown,
}

/// What carries a connection that has not been upgraded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transport {
    /// TCP, over either version of IP.
    Tcp,
    /// A socket of `AF_UNIX`.
    Unix,
}

#[derive(Clone, Copy, Debug)]
enum Script {
    Connected { left: fn(&Side, Fd), right: fn(&Side, Fd) },
    Whole { left: fn(&Side), right: fn(&Side) },
}

/// A pair of functions and what must be true after they ran.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// Its name within its area.
    pub name: &'static str,
    script: Script,
    /// What the left and the right side count when both have the shim and the connection was warmed up.
    pub tally: [Tally; 2],
    /// The same over RDMA, if that differs.
    pub over_verbs: Option<[Tally; 2]>,
    /// How the left and the right process end.
    pub end: [End; 2],
    /// So many times at least the left and the right process wake the other beside the connection's socket, on one host.
    pub chimes: [u64; 2],
    /// Settings of the library, beyond those that every run has.
    pub environment: &'static [(&'static str, &'static str)],
    /// Whether the right side's library is told to write no statistics, as users have it.
    pub right_is_uncounted: bool,
    /// Whether only root can run it.
    pub needs_root: bool,
    /// Whether it needs two hosts' devices, or what stands for them (`Network`).
    pub between_hosts: bool,
    /// Whether it waits so long that one variant has to do.
    pub takes_long: bool,
    /// Whether one side has both ends of its connections, so that the other side's library does not matter.
    pub by_itself: bool,
    /// Why its connections may stay on TCP, when the peer has no shim: what it does before it could know.
    pub alone: &'static [&'static str],
    /// The only transport over which the kernel behaves so, if there is another over which it does not.
    pub over: Option<Transport>,
    /// If an upgraded connection cannot do it: the words with which docs/limitations.md says so.
    pub limitation: Option<&'static str>,
}

impl Behaviour {
    /// Both sides get one end of a connection.
    const fn connected(name: &'static str, left: fn(&Side, Fd), right: fn(&Side, Fd)) -> Self {
        Self::new(name, Script::Connected { left, right }, [Tally::Upgraded(1); 2])
    }

    /// The left side is the server, the right one the client, of as many connections as `tally` says.
    const fn whole(name: &'static str, left: fn(&Side), right: fn(&Side), tally: Tally) -> Self {
        Self::new(name, Script::Whole { left, right }, [tally; 2])
    }

    const fn new(name: &'static str, script: Script, tally: [Tally; 2]) -> Self {
        Self {
            name,
            script,
            tally,
            over_verbs: None,
            end: [End::Exit(0); 2],
            chimes: [0; 2],
            environment: &[],
            right_is_uncounted: false,
            needs_root: false,
            between_hosts: false,
            takes_long: false,
            by_itself: false,
            alone: &[],
            over: None,
            limitation: None,
        }
    }

    const fn tally(mut self, left: Tally, right: Tally) -> Self {
        self.tally = [left, right];
        self
    }

    const fn over_verbs(mut self, left: Tally, right: Tally) -> Self {
        self.over_verbs = Some([left, right]);
        self
    }

    const fn end(mut self, left: End, right: End) -> Self {
        self.end = [left, right];
        self
    }

    const fn chimes(mut self, left: u64, right: u64) -> Self {
        self.chimes = [left, right];
        self
    }

    const fn environment(mut self, environment: &'static [(&'static str, &'static str)]) -> Self {
        self.environment = environment;
        self
    }

    const fn right_is_uncounted(mut self) -> Self {
        (self.right_is_uncounted, self.tally[1]) = (true, Tally::Unknown);
        self
    }

    const fn needs_root(mut self) -> Self {
        self.needs_root = true;
        self
    }

    const fn between_hosts(mut self) -> Self {
        self.between_hosts = true;
        self
    }

    const fn takes_long(mut self) -> Self {
        self.takes_long = true;
        self
    }

    const fn by_itself(mut self) -> Self {
        self.by_itself = true;
        self
    }

    const fn alone(mut self, reasons: &'static [&'static str]) -> Self {
        self.alone = reasons;
        self
    }

    /// It is about what TCP does, and `AF_UNIX` does not.
    const fn tcp_only(mut self) -> Self {
        self.over = Some(Transport::Tcp);
        self
    }

    /// It is about what `AF_UNIX` does, and TCP does not.
    const fn unix_only(mut self) -> Self {
        self.over = Some(Transport::Unix);
        self
    }

    const fn limitation(mut self, words: &'static str) -> Self {
        self.limitation = Some(words);
        self
    }

    /// Whether the harness can swap which side listens.
    pub fn is_connected(&self) -> bool {
        matches!(self.script, Script::Connected { .. })
    }

    /// Runs one side, in this process.
    pub fn run(&self, side: &Side, is_left: bool) {
        match self.script {
            Script::Connected { left, right } => {
                let fd = side.connection();
                if is_left { left(side, fd) } else { right(side, fd) }
            }
            Script::Whole { left, right } => {
                if is_left {
                    left(side)
                } else {
                    right(side)
                }
            }
        }
    }
}

/// All behaviours, by area.
pub const AREAS: &[(&str, &[Behaviour])] = &[
    ("basic", basic::ALL),
    ("sizes", sizes::ALL),
    ("arguments", arguments::ALL),
    ("flags", flags::ALL),
    ("timeouts", timeouts::ALL),
    ("ending", ending::ALL),
    ("full", full::ALL),
    ("signals", signals::ALL),
    ("options", options::ALL),
    ("polling", polling::ALL),
    ("epoll", epoll::ALL),
    ("epoll_sets", epoll_sets::ALL),
    ("epoll_numbers", epoll_numbers::ALL),
    ("epoll_edges", epoll_edges::ALL),
    ("epoll_young", epoll_young::ALL),
    ("short_before", short_before::ALL),
    ("descriptors", descriptors::ALL),
    ("threads", threads::ALL),
    ("cancelling", cancelling::ALL),
    ("switching", switching::ALL),
    ("leftovers", leftovers::ALL),
    ("connecting", connecting::ALL),
    ("unaffected", unaffected::ALL),
    ("waiting", waiting::ALL),
    ("chimes", chimes::ALL),
    ("unseen", unseen::ALL),
    ("scarce", scarce::ALL),
    ("hostile", hostile::ALL),
    ("processes", processes::ALL),
    ("lying", lying::ALL),
    ("killed", killed::ALL),
    ("dying", dying::ALL),
    ("handing_on", handing_on::ALL),
    ("heirs", heirs::ALL),
    ("inside_libc", inside_libc::ALL),
    ("resets", resets::ALL),
    ("returning", returning::ALL),
    ("lending", lending::ALL),
    ("locking", locking::ALL),
    ("urgent", urgent::ALL),
    ("unix_streams", unix_streams::ALL),
    ("unix_beside", unix_beside::ALL),
    ("unix_shutdown", unix_shutdown::ALL),
    ("unix_messages", unix_messages::ALL),
    ("unix_credentials", unix_credentials::ALL),
    ("unix_names", unix_names::ALL),
    ("unix_rights", unix_rights::ALL),
];

/// The behaviour with this name, `area::name`.
pub fn find(name: &str) -> Option<Behaviour> {
    let (area, name) = name.split_once("::")?;
    let (_, behaviours) = AREAS.iter().find(|(other, _)| *other == area)?;
    behaviours.iter().find(|behaviour| behaviour.name == name).copied()
}
