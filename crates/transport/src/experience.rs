//! How long earlier connections to the same port have lasted, and so how soon the next one should leave TCP.
//!
//! Leaving costs about as much as 6 round trips over TCP between two cores that are slow to wake each other, as 13 where they are
//! quick, and on one it is regained after 16 to 90. So a connection that has hardly more is slower for it. After many of those in a
//! row the next ones wait for more calls: for all that they need, as a rule. Whoever lives longer leaves TCP all the same, and shows
//! that times have changed. Where both ends share a processor the gain is smaller, too: then more are short. That is known of connections that
//! have left TCP, and taken for true of the next ones. How many calls are few is measured ([`worth`]).
//!
//! Servers share what they learn with their forks ([`share`]): each of those may serve but one connection. And they tell it to clients
//! that know nothing of their port ([`Advice`]), which may be programs that make one connection and end ([`crate::rendezvous::tell`]).

use std::sync::atomic::{AtomicPtr, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::arena::Role;
use crate::settings::settings;

/// The fewest calls beyond the usual ones before the first attempt that make a connection a long one: between two processors, and
/// on one that is the only one for both ends.
const WORTH: [u64; 2] = [16, 128];
/// The most: more than that is not waited for ([`MOST`]).
const WORTH_AT_MOST: [u64; 2] = [56, 248];
/// Tenths of the time of a call over TCP that are saved: between two processors hardly any is left, and on one the switches from one end to
/// the other (of 6.7 µs for a round trip 4 are left).
const SAVED: [u64; 2] = [10, 4];
/// What it costs both ends to leave TCP and to give the memory back, as a multiple of what the client's system calls take until it
/// has left, and the server's (130 and 90 of 360 µs).
const BOTH_ENDS: [u64; 2] = [3, 4];
/// So many times as long, and short ones before it are forgotten.
const BY_FAR: u64 = 16;
/// Short connections in a row before the first doubling of those calls, and between two doublings.
const STREAK: [u8; 2] = [32, 8];
/// Most doublings.
const MOST: [u8; 2] = [3, 5];

/// In an entry of [`Learned::short`]: the last connection that has left TCP had one processor for both ends.
const SHARED: u8 = 1 << 7;

const PORTS: usize = 1 << 16;

/// What has been learned in one role.
#[repr(C)]
struct Learned {
    /// Short connections, less some for each long one: by the server's port.
    short: [AtomicU8; PORTS],
    /// Nanoseconds that a connection spends until it has left TCP, by this end; 0 if none has. An average of the last ones.
    cost: AtomicU32,
}

/// By this process: as a client, and as a server that has not shared it.
static OWN: [Learned; 2] =
    [const { Learned { short: [const { AtomicU8::new(0) }; PORTS], cost: AtomicU32::new(0) } }; 2];

/// As a server, by this process, its forks and those whose fork it is. Null if it is not shared. Never unmapped.
static FAMILY: AtomicPtr<Learned> = AtomicPtr::new(std::ptr::null_mut());

fn learned(role: Role) -> &'static Learned {
    let family = if role == Role::Server { FAMILY.load(Ordering::Acquire) } else { std::ptr::null_mut() };
    // SAFETY: null, or mapped by `share` for good; atomics, of which any value is one.
    unsafe { family.as_ref() }.unwrap_or(&OWN[role as usize])
}

fn short(role: Role, port: u16) -> &'static AtomicU8 {
    &learned(role).short[usize::from(port)]
}

/// A server listens: its forks share from now on what they learn. Without memory each keeps it to itself.
pub fn share() {
    if !FAMILY.load(Ordering::Acquire).is_null() {
        return;
    }
    let (size, access) = (size_of::<Learned>(), ProtFlags::READ | ProtFlags::WRITE);
    // SAFETY: a new mapping, of zeros, somewhere.
    let made = unsafe { mmap_anonymous(std::ptr::null_mut(), size, access, MapFlags::SHARED) };
    let Ok(made) = made else { return };
    let null = std::ptr::null_mut();
    if FAMILY.compare_exchange(null, made.cast(), Ordering::AcqRel, Ordering::Acquire).is_err() {
        // SAFETY: made above, and nobody has seen it.
        let _ = unsafe { munmap(made, size) };
    }
}

/// What a server tells clients that know nothing of its port, as long as it is true.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Advice {
    /// Its connections have been short: to wait as long as any client does.
    Short,
    /// The same where both ends share one processor.
    ShortOnOne,
}

impl Advice {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Short, Self::ShortOnOne];

    /// What a server of this `port` has to tell, if it `tells` this now: it goes on until that is far from true.
    pub fn of(port: u16, tells: Option<Self>) -> Option<Self> {
        let entry = short(Role::Server, port).load(Ordering::Relaxed);
        let is_far = |doublings| doublings <= 1;
        let advice = if entry & SHARED == 0 { Self::Short } else { Self::ShortOnOne };
        match doublings_of(entry) {
            doublings if is_far(doublings) => None,
            doublings if doublings >= MOST[0] => Some(advice),
            _ => tells,
        }
    }
}

/// Ports of which a client of this process has asked for advice.
static ASKED: [AtomicU64; PORTS / 64] = [const { AtomicU64::new(0) }; PORTS / 64];

/// Client: whether to ask for advice on this `port`: once, and only if nothing is known of it.
pub fn wants_advice(port: u16) -> bool {
    let (word, bit) = (&ASKED[usize::from(port) / 64], 1 << (port % 64));
    settings().learns
        && short(Role::Client, port).load(Ordering::Relaxed) == 0
        && word.load(Ordering::Relaxed) & bit == 0
        && word.fetch_or(bit, Ordering::Relaxed) & bit == 0
}

/// Client: takes the server's advice on this `port`. Longer connections undo it, as what a client has learned itself.
pub(crate) fn heed(port: u16, advice: Advice) {
    let flag = if advice == Advice::ShortOnOne { SHARED } else { 0 };
    let count = STREAK[0] + STREAK[1] * (most(flag) - 1);
    let _ = short(Role::Client, port).compare_exchange(0, count | flag, Ordering::Relaxed, Ordering::Relaxed);
}

/// This end has spent `spent` on leaving TCP.
pub(crate) fn left(role: Role, spent: Duration) {
    let entry = &learned(role).cost;
    let (spent, now) = (u32::try_from(spent.as_nanos()).unwrap_or(u32::MAX), entry.load(Ordering::Relaxed));
    let next = match now {
        0 => spent,
        // It may have lost its processor meanwhile.
        _ => now - now / 8 + spent.min(now.saturating_mul(2)) / 8,
    };
    entry.store(next.max(1), Ordering::Relaxed);
}

/// Calls beyond the usual ones that a connection must have to gain by leaving TCP: as many as save the time that leaving takes. Its
/// own calls over TCP were `calls` in `time`, with what the program did in between. That makes them fewer than they should be, but
/// then the loss is a small part of the connection's time.
pub(crate) fn worth(role: Role, time: Duration, calls: u64, shared: bool) -> u64 {
    let cost = u64::from(learned(role).cost.load(Ordering::Relaxed)) * BOTH_ENDS[role as usize];
    let time = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).max(1);
    let shared = usize::from(shared);
    (cost.saturating_mul(calls * 10 / SAVED[shared]) / time).clamp(WORTH[shared], WORTH_AT_MOST[shared])
}

/// Calls on a new connection before it looks for its peer.
pub(crate) fn patience(role: Role, port: u16) -> u32 {
    settings().upgrade_after.saturating_mul(1 << doublings(role, port))
}

/// How often they have been doubled: at most 5 times.
pub fn doublings(role: Role, port: u16) -> usize {
    doublings_of(short(role, port).load(Ordering::Relaxed)).into()
}

fn doublings_of(entry: u8) -> u8 {
    let more = (entry & !SHARED).checked_sub(STREAK[0]);
    more.map_or(0, |more| (1 + more / STREAK[1]).min(most(entry)))
}

fn most(entry: u8) -> u8 {
    MOST[usize::from(entry & SHARED != 0)]
}

/// A connection has ended after so many calls, over whatever. `pace` is the time that a number of its calls over TCP took. `shared`
/// says for one that has left TCP whether both ends have one processor only.
pub fn ended(
    role: Role,
    port: u16,
    calls: u64,
    pace: impl FnOnce() -> (Duration, u64),
    shared: Option<bool>,
) {
    let usual = u64::from(settings().upgrade_after);
    if calls < usual || !settings().learns {
        return;
    }
    let entry = short(role, port);
    let now = entry.load(Ordering::Relaxed);
    let flag = shared.map_or(now & SHARED, |shared| if shared { SHARED } else { 0 });
    let (time, paced) = pace();
    let (count, worth) = (now & !SHARED, worth(role, time, paced, flag != 0));
    let count = match calls - usual {
        over if over < worth => (count + 1).min(STREAK[0] + STREAK[1] * most(flag)),
        over if over < worth * BY_FAR => count.saturating_sub(STREAK[1]),
        _ => 0,
    };
    if now != count | flag {
        entry.store(count | flag, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_short_connections_make_the_next_ones_wait_and_long_ones_less() {
        let (role, port, slow) = (Role::Client, 1, || (Duration::from_secs(1), 1));
        let after = |count: u32, calls| {
            (0..count).for_each(|_| ended(role, port, calls, slow, None));
            patience(role, port)
        };
        assert_eq!(after(100, 7), 8);
        assert_eq!([after(31, 23), after(1, 8), after(7, 8), after(1, 8)], [8, 16, 16, 32]);
        assert_eq!([after(8, 8), after(200, 8)], [64, 64]);
        assert_eq!([after(1, 24), after(1, 24), after(1, 24), after(1, 24)], [64, 32, 16, 8]);
        assert_eq!([after(200, 8), after(1, 8 + 256)], [64, 8]);
        assert_eq!(after(31, 8), 8);
        assert_eq!((patience(Role::Server, port), patience(role, 2)), (8, 8));

        // On one processor, 127 calls more are few.
        assert_eq!([after(1, 2000), after(64, 24)], [8, 8]);
        ended(role, port, 24, slow, Some(true));
        assert_eq!([after(31, 24), after(24, 135), after(24, 135)], [16, 128, 256]);
        assert_eq!([after(1, 136), after(1, 136), after(3, 136), after(1, 136)], [256, 128, 16, 8]);
        (0..80).for_each(|_| ended(role, port, 24, slow, Some(true)));
        assert_eq!(patience(role, port), 256);
        ended(role, port, 24, slow, Some(false));
        assert_eq!([after(1, 24), after(4, 24)], [64, 8]);
    }

    #[test]
    fn a_server_advises_to_wait_until_that_is_far_from_true() {
        let (port, slow) = (3, || (Duration::from_secs(1), 1));
        let live = |count: u32, calls, shared| {
            (0..count).for_each(|_| ended(Role::Server, port, calls, slow, shared));
        };
        let (short, on_one) = (Some(Advice::Short), Some(Advice::ShortOnOne));
        assert_eq!(Advice::of(port, None), None);
        live(47, 8, None);
        assert_eq!([None, short].map(|tells| Advice::of(port, tells)), [None, short]);
        live(1, 8, None);
        assert_eq!(Advice::of(port, None), short);
        live(1, 24, None);
        assert_eq!([None, short].map(|tells| Advice::of(port, tells)), [None, short]);
        live(1, 24, None);
        assert_eq!(Advice::of(port, short), None);
        live(40, 8, Some(true));
        assert_eq!(Advice::of(port, short), on_one);
    }

    #[test]
    fn a_client_asks_once_and_unlearns_what_it_was_told() {
        let (role, port, slow) = (Role::Client, 4, || (Duration::from_secs(1), 1));
        assert_eq!([wants_advice(port), wants_advice(port)], [true, false]);
        heed(port, Advice::Short);
        assert_eq!(patience(role, port), 64);
        (0..4).for_each(|_| ended(role, port, 24, slow, None));
        assert_eq!(patience(role, port), 8);

        heed(5, Advice::ShortOnOne);
        assert_eq!((patience(role, 5), wants_advice(5)), (256, false));
        // What it has learned itself counts.
        ended(role, 6, 8, slow, None);
        heed(6, Advice::ShortOnOne);
        assert_eq!((patience(role, 6), wants_advice(6)), (8, false));
    }

    #[test]
    fn where_calls_are_quick_a_connection_needs_more_of_them() {
        // Of a role of its own: nobody else in these tests leaves TCP by it.
        let role = Role::Server;
        let micros = Duration::from_micros;
        let calls_of = |each| worth(role, 10 * micros(each), 10, false);
        assert_eq!([calls_of(1), calls_of(40)], [16, 16]);
        left(role, micros(100));
        assert_eq!([calls_of(1), calls_of(10), calls_of(16), calls_of(40)], [56, 40, 25, 16]);
        assert_eq!([100, 200, 400].map(|each| worth(role, micros(each), 10, true)), [128, 128, 128]);
        assert_eq!(worth(role, micros(50), 10, true), 200);
        assert_eq!([true, false].map(|shared| worth(role, Duration::ZERO, 10, shared)), [248, 56]);
        // One that lost its processor for a second counts as one that took twice as long.
        left(role, Duration::from_secs(1));
        assert_eq!(calls_of(10), 45);
        (0..100).for_each(|_| left(role, micros(50)));
        assert_eq!(calls_of(5), 40);
    }
}
