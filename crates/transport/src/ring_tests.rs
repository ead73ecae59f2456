use std::cell::{Cell, UnsafeCell};
use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::sync::Ordering;

struct Heap {
    bytes: UnsafeCell<Vec<u8>>,
    /// The windows that a store may go to, one bit each.
    populated: Cell<u32>,
}

impl Heap {
    fn new() -> Self {
        Self { bytes: UnsafeCell::new(vec![0; DIRECTION_BYTES as usize]), populated: Cell::new(1) }
    }

    /// For control words that a peer has made up: the windows that they name were never opened.
    fn all_populated() -> Self {
        let heap = Self::new();
        heap.populated.set(u32::MAX);
        heap
    }
}

// SAFETY: the vector is DIRECTION_BYTES long, and these tests use one thread.
unsafe impl Memory for Heap {
    unsafe fn put(&self, offset: u64, source: *const u8, length: usize) {
        let class = (0..CLASSES).rfind(|&class| class_offset(class) <= offset).unwrap();
        assert!(self.populated.get() & 1 << class != 0, "a store to window {class}, which has no memory");
        // SAFETY: one thread, no other reference alive.
        let bytes = unsafe { &mut *self.bytes.get() };
        // SAFETY: the caller's promise.
        bytes[offset as usize..][..length]
            .copy_from_slice(unsafe { std::slice::from_raw_parts(source, length) });
    }
    unsafe fn take(&self, offset: u64, target: *mut u8, length: usize) {
        // SAFETY: one thread, no other reference alive.
        let bytes = unsafe { &*self.bytes.get() };
        // SAFETY: the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(target, length) }
            .copy_from_slice(&bytes[offset as usize..][..length]);
    }
    fn populate(&self, class: u32) -> bool {
        self.populated.set(self.populated.get() | 1 << class);
        true
    }
    fn discard(&self, class: u32) {
        self.populated.set(self.populated.get() & !(1 << class));
    }
}

fn push(producer: &Producer<'_, Heap>, bytes: &[u8]) -> usize {
    // SAFETY: a live slice.
    unsafe { producer.push(bytes.as_ptr(), bytes.len()) }.unwrap().bytes
}

fn pop(consumer: &Consumer<'_, Heap>, count: usize) -> Vec<u8> {
    let mut bytes = vec![0; count];
    // SAFETY: a live vector.
    let popped = unsafe { consumer.pop(bytes.as_mut_ptr(), count) }.unwrap();
    bytes.truncate(popped.bytes);
    bytes
}

#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Pop(usize),
    Grow(u64),
    Shrink,
    ComeHome,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..40_000).prop_map(Step::Push),
        4 => (0usize..50_000).prop_map(Step::Pop),
        1 => (0u64..3_000_000).prop_map(Step::Grow),
        1 => Just(Step::Shrink),
        1 => Just(Step::ComeHome),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_sequence_of_calls_is_a_byte_queue(steps in prop::collection::vec(step(), 1..80)) {
        let (control, memory) = (Control::new(), Heap::new());
        let seen = AtomicU64::new(0);
let (producer, consumer) = (Producer::new(&control, &memory, &seen), Consumer::new(&control, &memory));
        let mut model = VecDeque::new();
        let mut next = 0u32;
        for step in steps {
            match step {
                Step::Push(count) => {
                    let bytes: Vec<u8> = (0..count).map(|_| { next = next.wrapping_mul(1_664_525).wrapping_add(1); (next >> 24) as u8 }).collect();
                    let space = producer.space().unwrap() as usize;
                    let done = push(&producer, &bytes);
                    prop_assert_eq!(done, count.min(space));
                    model.extend(&bytes[..done]);
                }
                Step::Pop(count) => {
                    let expected: Vec<u8> = model.drain(..count.min(model.len())).collect();
                    prop_assert_eq!(pop(&consumer, count), expected);
                }
                Step::Grow(wanted) => {
                    let before = producer.class().unwrap();
                    let grown = producer.grow(wanted, CLASSES - 1).unwrap();
                    prop_assert_eq!(grown, producer.class().unwrap() > before);
                }
                Step::Shrink => {
                    let shrunk = producer.shrink().unwrap();
                    prop_assert!(!shrunk || (model.is_empty() && producer.class().unwrap() == 0));
                }
                Step::ComeHome => {
                    let before = producer.class().unwrap();
                    let came = producer.come_home().unwrap();
                    prop_assert!(!came || (before > HOT_CLASS && model.is_empty()));
                    prop_assert_eq!(producer.class().unwrap(), if came { HOT_CLASS } else { before });
                }
            }
            prop_assert_eq!(control.used() as usize, model.len());
        }
        let rest: Vec<u8> = model.into_iter().collect();
        prop_assert_eq!(pop(&consumer, rest.len() + 1), rest);
    }

    #[test]
    fn control_words_full_of_lies_never_reach_outside(words in prop::array::uniform8(any::<u64>()), near in any::<bool>()) {
        let (control, memory) = (Control::new(), Heap::all_populated());
        let mask = if near { (1 << 24) - 1 } else { u64::MAX };
        control.head.0.store(words[0] & mask, Ordering::Relaxed);
        control.tail.0.store(words[1] & mask, Ordering::Relaxed);
        for (start, word) in control.rare.0.window_start.iter().zip(&words[2..]) {
            start.store(word & mask, Ordering::Relaxed);
        }
        let seen = AtomicU64::new(0);
let (producer, consumer) = (Producer::new(&control, &memory, &seen), Consumer::new(&control, &memory));
        let mut bytes = vec![0; 70_000];
        // Heap panics on an access out of bounds; an error or any bytes at all are fine.
        // SAFETY: a live vector.
        let pushed = unsafe { producer.push(bytes.as_ptr(), bytes.len()) };
        prop_assert!(pushed.is_ok_and(|pushed| pushed.bytes <= bytes.len()) || pushed.is_err());
        // SAFETY: a live vector.
        let popped = unsafe { consumer.pop(bytes.as_mut_ptr(), bytes.len()) };
        prop_assert!(popped.is_ok_and(|popped| popped.bytes <= bytes.len()) || popped.is_err());
        let _ = (producer.grow(1, CLASSES - 1), producer.shrink(), consumer.consume(10));
    }
}

#[test]
fn every_window_is_filled_and_read_in_turn() {
    let (control, memory) = (Control::new(), Heap::new());
    let seen = AtomicU64::new(0);
    let (producer, consumer) = (Producer::new(&control, &memory, &seen), Consumer::new(&control, &memory));
    let bytes: Vec<u8> = (0..DIRECTION_BYTES).map(|at| (at % 251) as u8).collect();
    let mut done = 0;
    while done < bytes.len() {
        let count = push(&producer, &bytes[done..]);
        done += count;
        assert!(count > 0 || producer.grow(1, CLASSES - 1).unwrap());
    }
    assert!(!producer.grow(1, CLASSES - 1).unwrap());
    assert!(pop(&consumer, bytes.len()) == bytes);
    assert!(producer.shrink().unwrap());
    assert_eq!(push(&producer, &bytes), class_size(0) as usize);
    assert_eq!(pop(&consumer, 10), bytes[..10]);
}

#[test]
fn growth_stops_at_the_limit() {
    let (control, memory) = (Control::new(), Heap::new());
    let seen = AtomicU64::new(0);
    let producer = Producer::new(&control, &memory, &seen);
    assert!(producer.grow(1 << 40, HOT_CLASS).unwrap());
    assert_eq!(producer.class().unwrap(), HOT_CLASS);
    assert!(!producer.grow(1 << 40, HOT_CLASS).unwrap());
}

#[test]
fn a_publish_rings_once_for_each_time_that_somebody_armed() {
    let (control, memory) = (Control::new(), Heap::new());
    let seen = AtomicU64::new(0);
    let producer = Producer::new(&control, &memory, &seen);
    // SAFETY: a live array.
    let rings = || unsafe { producer.push(b"x".as_ptr(), 1) }.unwrap().ring;
    assert!(!rings());
    control.data_armed.0.arm();
    assert!(rings());
    assert!(!rings());
    control.data_armed.0.renew();
    assert!(rings());
    control.data_armed.0.disarm();
    control.data_armed.0.renew();
    assert!(!rings());
}
