//! Between which hosts RDMA does not get through, although TCP does: a filter on UDP port 4791, a GID of another network. A queue pair finds
//! that out by trying again and again, while a call waits, so the next connections of this process do not ask.

use std::net::IpAddr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// How long that is remembered.
const MEMORY: Duration = Duration::from_secs(60);
/// That many pairs are remembered.
const MOST: usize = 64;

/// A local address, a peer's, and when no answer came.
type Entry = (IpAddr, IpAddr, Instant);

static BLOCKED: Mutex<Table> = Mutex::new(Table([None; MOST]));
/// Whether there ever was one.
static ANY: AtomicBool = AtomicBool::new(false);

/// The peer's host has not answered.
pub(crate) fn note_blocked(local: IpAddr, peer: IpAddr) {
    // Only a fork leaves it locked for long.
    if let Ok(mut table) = BLOCKED.try_lock() {
        table.note(local, peer, Instant::now());
        ANY.store(true, Ordering::Release);
    }
}

/// Whether it has lately not answered.
pub(crate) fn is_blocked(local: IpAddr, peer: IpAddr) -> bool {
    ANY.load(Ordering::Acquire)
        && BLOCKED.try_lock().is_ok_and(|table| table.is_blocked(local, peer, Instant::now()))
}

struct Table([Option<Entry>; MOST]);

impl Table {
    /// In the place of what was known of the pair, else in the oldest one's.
    fn note(&mut self, local: IpAddr, peer: IpAddr, now: Instant) {
        let rank = |entry: &&mut Option<Entry>| {
            let same = entry.is_some_and(|(from, to, _)| (from, to) == (local, peer));
            (!same, entry.map(|(_, _, since)| since))
        };
        if let Some(entry) = self.0.iter_mut().min_by_key(rank) {
            *entry = Some((local, peer, now));
        }
    }

    fn is_blocked(&self, local: IpAddr, peer: IpAddr, now: Instant) -> bool {
        let mut pairs = self.0.iter().flatten();
        pairs.any(|&(from, to, since)| (from, to) == (local, peer) && now < since + MEMORY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: usize) -> IpAddr {
        [10, 0, 0, u8::try_from(last).unwrap()].into()
    }

    #[test]
    fn what_is_blocked_is_remembered_for_a_minute_and_the_oldest_gives_way() {
        let (mut table, start) = (Table([None; MOST]), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        table.note(address(1), address(2), at(0));
        assert!(table.is_blocked(address(1), address(2), at(59)));
        assert!(!table.is_blocked(address(1), address(2), at(60)));
        assert!(!table.is_blocked(address(2), address(1), at(0)));
        assert!(!table.is_blocked(address(1), address(3), at(0)));

        table.note(address(1), address(2), at(30));
        assert!(table.is_blocked(address(1), address(2), at(89)));
        for peer in 3..MOST + 2 {
            table.note(address(1), address(peer), at(31));
        }
        assert!((2..MOST + 2).all(|peer| table.is_blocked(address(1), address(peer), at(32))));
        table.note(address(1), address(200), at(33));
        assert!(!table.is_blocked(address(1), address(2), at(34)));
        assert!((3..MOST + 2).all(|peer| table.is_blocked(address(1), address(peer), at(34))));
    }
}
