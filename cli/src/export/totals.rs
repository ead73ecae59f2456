//! Sums over every connection end that has been seen, those that have ended included.
//!
//! A connection is known by its block and the block's generation, not by process and descriptor: it keeps them when another
//! process of its family goes on with it.

use std::collections::{BTreeSet, HashMap};

use thallus_transport::arena::{Block, Generation, flag};
use thallus_transport::reason::Reason;

use crate::status::scan::{Inode, Scan, is_alive};
use crate::status::{ORDERING, kernels_fabric};

/// Fabrics, as [`Sums`] and `thallus status` have them.
pub(super) const FABRICS: [&str; 4] = ["shm", "verbs", "tcp", "unix"];

/// What has been seen so far.
#[derive(Debug, Default)]
pub(super) struct Totals {
    families: HashMap<Inode, Family>,
    pub(super) sums: Sums,
    /// On which of the kernel's sockets connections ever were, and why.
    pub(super) reasons: BTreeSet<(&'static str, &'static str)>,
}

/// What each connection of an arena had done when it was last looked at.
#[derive(Debug, Default)]
struct Family {
    members: Vec<u32>,
    connections: HashMap<(usize, Generation), Sums>,
}

/// Counts of one connection end or many. Bytes are the application's, by fabric as in [`FABRICS`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Sums {
    pub(super) ends: u64,
    pub(super) sent: [u64; 4],
    pub(super) received: [u64; 4],
    pub(super) doorbells: u64,
    pub(super) sleeps: u64,
    pub(super) spin_hits: u64,
}

/// Connection ends and processes that are remembered of arenas that are not to be found.
const MOST_OUT_OF_SIGHT: usize = 1 << 17;

impl Totals {
    /// Adds what has happened since the last look.
    pub(super) fn add(&mut self, scan: &Scan) {
        for family in &scan.families {
            let known = self.families.entry(family.inode).or_default();
            known.members = family.members.values().map(|process| process.pid).collect();
            let mut connections = HashMap::new();
            for (index, block) in family.connections.blocks() {
                let Some((generation, now, reason)) = read(block) else { continue };
                let before = known.connections.get(&(index, generation)).copied().unwrap_or_default();
                let now = now.or_more(&before);
                self.sums.add(&now, &before);
                self.reasons.extend(reason.map(|reason| (kernels_fabric(block), reason.name())));
                connections.insert((index, generation), now);
            }
            known.connections = connections;
        }
        // One that was not found although it lives (a process may hide itself) must not count anew when it is found again. But it may
        // hide others as well, one after the other.
        let found: BTreeSet<_> = scan.families.iter().map(|family| family.inode).collect();
        let mut room = MOST_OUT_OF_SIGHT;
        self.families.retain(|inode, family| {
            let weight = family.connections.len() + family.members.len();
            let mut fits = || room.checked_sub(weight).inspect(|&left| room = left).is_some();
            found.contains(inode) || (family.members.iter().copied().any(is_alive) && fits())
        });
    }
}

/// What a connection has done, and why it is on TCP if it is; `None` if the block is given to another one meanwhile.
fn read(block: &Block) -> Option<(Generation, Sums, Option<Reason>)> {
    let generation = block.connection()?;
    let load = |counter: &std::sync::atomic::AtomicU64| counter.load(ORDERING);
    let by_fabric = |ring, kernel| match (block.has(flag::VERBS), block.has(flag::UNIX)) {
        (true, _) => [0, ring, kernel, 0],
        (false, false) => [ring, 0, kernel, 0],
        (false, true) => [ring, 0, 0, kernel],
    };
    let sums = Sums {
        ends: 1,
        sent: by_fabric(load(&block.ring_sent), load(&block.tcp_sent)),
        received: by_fabric(load(&block.ring_received), load(&block.tcp_received)),
        doorbells: block.bells(),
        sleeps: load(&block.sleeps),
        spin_hits: load(&block.spin_hits),
    };
    let reason = (!crate::status::is_in_ring(block)).then(|| block.reason());
    (block.connection() == Some(generation)).then_some((generation, sums, reason))
}

impl Sums {
    fn counters(&mut self) -> [&mut u64; 12] {
        let Self { ends, sent: [a, b, c, d], received: [e, f, g, h], doorbells, sleeps, spin_hits } = self;
        [ends, a, b, c, d, e, f, g, h, doorbells, sleeps, spin_hits]
    }

    /// Each counter as it is, or as it was if it seems to have gone back.
    fn or_more(mut self, before: &Self) -> Self {
        let mut before = *before;
        for (now, before) in self.counters().into_iter().zip(before.counters()) {
            *now = (*now).max(*before);
        }
        self
    }

    /// Adds what `now` has more than `before`.
    fn add(&mut self, now: &Self, before: &Self) {
        let (mut now, mut before) = (*now, *before);
        let more = now.counters().into_iter().zip(before.counters());
        for (sum, (now, before)) in self.counters().into_iter().zip(more) {
            *sum = sum.saturating_add(now.saturating_sub(*before));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::process::Command;
    use std::sync::atomic::Ordering::Relaxed;

    use thallus_transport::arena::{Chunk, Role, Snapshot};

    use crate::status::scan;

    /// A look at this chunk alone, which process `pid` has.
    fn look(totals: &mut Totals, chunk: Option<&Chunk>, pid: u32) -> Sums {
        let mut scan = Scan::default();
        scan.families.extend(chunk.map(|chunk| {
            let process = scan::Process { pid, command: "".into() };
            let connections = Snapshot::of(chunk.fd().unwrap()).unwrap().unwrap();
            scan::Family::of((1, 2), connections, [(pid, process)].into())
        }));
        totals.add(&scan);
        totals.sums
    }

    fn connect(chunk: &Chunk, flags: u32, ring_sent: u64) -> &'static Block {
        let block = chunk.allocate(Role::Client, std::process::id(), 9, 1).unwrap();
        block.raise(flags);
        block.ring_sent.store(ring_sent, Relaxed);
        block
    }

    #[test]
    fn bytes_are_counted_by_what_carried_them() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut totals = Totals::default();
        let shm = connect(&chunk, flag::READY, 3);
        shm.tcp_received.store(5, Relaxed);
        shm.sleeps.store(6, Relaxed);
        connect(&chunk, flag::READY | flag::VERBS | flag::RETURNED, 4).tcp_sent.store(7, Relaxed);
        connect(&chunk, flag::UNIX, 0).tcp_sent.store(8, Relaxed);
        let sums = look(&mut totals, Some(&chunk), 1);
        let (sent, received) = ([3, 4, 7, 8], [0, 0, 5, 0]);
        let expected = Sums { ends: 3, sent, received, sleeps: 6, ..Sums::default() };
        assert_eq!(sums, expected);
        assert_eq!(totals.reasons, BTreeSet::from([("tcp", "short"), ("unix", "short")]));
        assert_eq!(look(&mut totals, Some(&chunk), 1), expected);
    }

    #[test]
    fn what_has_ended_stays_counted_once() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut totals = Totals::default();
        let mut look = || {
            let sums = look(&mut totals, Some(&chunk), 1);
            (sums.ends, sums.sent[0])
        };
        let block = connect(&chunk, flag::READY, 10);
        assert_eq!(look(), (1, 10));
        // Another process of the family goes on with it, one that is not to be found; then the first again.
        block.owner_pid.store(i32::MAX as u32, Relaxed);
        block.ring_sent.store(11, Relaxed);
        assert_eq!(look(), (1, 11));
        block.owner_pid.store(std::process::id(), Relaxed);
        block.owner_fd.store(10, Relaxed);
        block.ring_sent.store(12, Relaxed);
        assert_eq!(look(), (1, 12));
        chunk.free(block, block.connection().unwrap());
        assert_eq!(look(), (1, 12));
        assert!(std::ptr::eq(block, connect(&chunk, flag::READY, 5)));
        assert_eq!(look(), (2, 17));
    }

    #[test]
    fn an_arena_that_was_out_of_sight_does_not_count_anew_and_a_dead_one_is_forgotten() {
        let chunk = Chunk::create(Ok).unwrap();
        let mut totals = Totals::default();
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        let block = connect(&chunk, flag::READY, 10);
        let expected = look(&mut totals, Some(&chunk), child.id());
        assert_eq!(expected.sent, [10, 0, 0, 0]);
        assert_eq!(look(&mut totals, None, child.id()), expected);
        assert_eq!(look(&mut totals, Some(&chunk), child.id()), expected);
        block.ring_sent.store(11, Relaxed);
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(look(&mut totals, None, child.id()), expected);
        assert!(totals.families.is_empty());
    }

    #[test]
    fn a_counter_that_seems_to_go_back_adds_nothing_until_it_is_beyond() {
        let at = |sleeps, doorbells| Sums { sleeps, doorbells, ..Sums::default() };
        let mut total = at(100, 100);
        let mut last = at(7, 7);
        for now in [at(5, 8), at(6, 9), at(9, 9)] {
            let now = now.or_more(&last);
            total.add(&now, &last);
            last = now;
        }
        assert_eq!(total, at(102, 102));
    }
}
