//! Looking for messages that arrive by RDMA: by several threads at once, while one takes the connection back to TCP.
//!
//! What runs is [`crate::verbs::scan`]. The device is a thread that says how many messages are there; each is one byte of the
//! stream and eight of the ring.

use std::sync::Arc;

use loom::sync::atomic::AtomicBool;
use loom::thread;

use super::*;
use crate::ring::Lie;
use crate::verbs::scan::{Arrivals, Scan};

const SPAN: u64 = 8;

struct Ring {
    arrived: AtomicU64,
    consumed: AtomicU64,
    scan: Scan,
    control: Control,
    /// For those who do without [`Scan::freeze`]: nothing that arrives shall count any more.
    over: AtomicBool,
}

impl Arrivals for Ring {
    type Message = ();

    fn size(&self) -> u64 {
        64 * SPAN
    }

    fn consumed(&self) -> u64 {
        self.consumed.load(Ordering::Acquire)
    }

    fn message(&self, position: u64) -> Result<Option<()>, Lie> {
        // What has been consumed is zero.
        let there = self.arrived.load(Ordering::Acquire) * SPAN > position && self.consumed() <= position;
        Ok(there.then_some(()))
    }

    fn extent(&self, (): ()) -> (u64, u64) {
        (1, SPAN)
    }

    fn heed(&self, (): (), _: &Control) {}
}

impl Ring {
    fn new(arrived: u64) -> Arc<Self> {
        Arc::new(Self {
            arrived: AtomicU64::new(arrived),
            consumed: AtomicU64::new(0),
            scan: Scan::new(),
            control: Control::new(),
            over: AtomicBool::new(false),
        })
    }

    fn look(&self) {
        assert!(self.scan.go_on(self, &self.control).is_ok());
    }

    /// As `verbs::inbox::Inbox::drop_bytes`, of all that is there. The caller is the only one who reads.
    fn take_all(&self) -> u64 {
        let head = self.control.head();
        self.consumed.store(head * SPAN, Ordering::Release);
        self.control.tail.0.store(head, Ordering::Release);
        head
    }
}

/// One thread takes the connection back to TCP, while another looks for messages, and they arrive.
fn explore_a_return(freeze: fn(&Ring), look: fn(&Ring)) {
    explore(2, move || {
        let ring = Ring::new(1);
        let other = {
            let ring = ring.clone();
            thread::spawn(move || look(&ring))
        };
        let device = {
            let ring = ring.clone();
            thread::spawn(move || ring.arrived.store(2, Ordering::Release))
        };
        freeze(&ring);
        let kept = ring.take_all();
        other.join().unwrap();
        device.join().unwrap();
        // The peer sends the rest again: what is skipped of it is what has been kept.
        assert_eq!(ring.control.head(), kept);
    });
}

#[test]
fn after_a_return_nothing_counts_that_was_not_kept() {
    explore_a_return(|ring| assert!(ring.scan.freeze(ring, &ring.control).is_ok()), Ring::look);
}

/// As it was: a flag that is looked at first.
#[test]
#[should_panic(expected = "left == right")]
fn a_flag_that_is_looked_at_before_a_scan_does_not_keep_it_from_counting() {
    let freeze = |ring: &Ring| {
        ring.look();
        ring.over.store(true, Ordering::SeqCst);
    };
    let look = |ring: &Ring| {
        if !ring.over.load(Ordering::SeqCst) {
            ring.look();
        }
    };
    explore_a_return(freeze, look);
}

#[test]
fn whoever_has_looked_has_been_told_of_what_others_found() {
    explore(3, || {
        let ring = Ring::new(2);
        let other = {
            let ring = ring.clone();
            thread::spawn(move || ring.look())
        };
        ring.look();
        assert_eq!(ring.control.head(), 2);
        other.join().unwrap();
    });
}

#[test]
fn messages_are_counted_once_though_they_are_consumed_meanwhile() {
    explore(3, || {
        let ring = Ring::new(1);
        let other = {
            let ring = ring.clone();
            thread::spawn(move || ring.look())
        };
        ring.look();
        ring.take_all();
        ring.arrived.store(2, Ordering::Release);
        ring.look();
        ring.take_all();
        other.join().unwrap();
        assert_eq!((ring.control.head(), ring.control.tail()), (2, 2));
    });
}
