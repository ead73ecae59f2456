use std::cell::{Cell, RefCell, UnsafeCell};
use std::collections::VecDeque;
use std::ops::Range;

use proptest::prelude::*;

use super::*;
use crate::control::Wakes;
use crate::sync::Ordering;

/// Bytes whose memory is counted.
const UNIT: u64 = class_size(0);

struct Heap {
    bytes: UnsafeCell<Vec<u8>>,
    /// The units that a store may go to.
    populated: RefCell<Vec<bool>>,
    /// Units that may be populated at once.
    most: Cell<usize>,
}

impl Heap {
    fn new() -> Self {
        let heap = Self {
            bytes: UnsafeCell::new(vec![0; DIRECTION_BYTES as usize]),
            populated: RefCell::new(vec![false; (DIRECTION_BYTES / UNIT) as usize]),
            most: Cell::new(usize::MAX),
        };
        assert!(heap.populate(0, UNIT));
        heap
    }

    /// For control words that a peer has made up: the windows that they name were never opened.
    fn all_populated() -> Self {
        let heap = Self::new();
        heap.populated.borrow_mut().fill(true);
        heap
    }

    fn units(offset: u64, length: u64) -> Range<usize> {
        (offset / UNIT) as usize..(offset + length).div_ceil(UNIT) as usize
    }

    fn in_use(&self) -> usize {
        self.populated.borrow().iter().filter(|&&populated| populated).count()
    }
}

// SAFETY: the vector is DIRECTION_BYTES long, and these tests use one thread.
unsafe impl Memory for Heap {
    unsafe fn put(&self, offset: u64, source: *const u8, length: usize) {
        let units = Self::units(offset, length as u64);
        assert!(
            self.populated.borrow()[units].iter().all(|&populated| populated),
            "a store to {offset}: no memory"
        );
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
    fn populate(&self, offset: u64, length: u64) -> bool {
        assert!(offset.is_multiple_of(UNIT) && length.is_multiple_of(UNIT));
        let before = self.populated.borrow().clone();
        self.populated.borrow_mut()[Self::units(offset, length)].fill(true);
        let fits = self.in_use() <= self.most.get();
        if !fits {
            *self.populated.borrow_mut() = before;
        }
        fits
    }
    fn discard(&self, class: u32) {
        self.populated.borrow_mut()[Self::units(class_offset(class), class_size(class))].fill(false);
    }
}

fn push(producer: &Producer<'_, Heap>, bytes: &[u8]) -> usize {
    // SAFETY: a live slice.
    unsafe { producer.push(bytes.as_ptr(), bytes.len()) }.unwrap().bytes
}

fn push_whole(producer: &Producer<'_, Heap>, bytes: &[u8]) -> usize {
    // SAFETY: a live slice.
    unsafe { producer.push_whole(bytes.as_ptr(), bytes.len()) }.unwrap().bytes
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
    PushWhole(usize),
    Pop(usize),
    Grow(u64),
    Shrink,
    ComeHome(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0usize..40_000).prop_map(Step::Push),
        2 => (0usize..12_000).prop_map(Step::PushWhole),
        4 => (0usize..50_000).prop_map(Step::Pop),
        1 => (0u64..3_000_000).prop_map(Step::Grow),
        1 => Just(Step::Shrink),
        1 => (HOT_CLASS..=WIDE_CLASS).prop_map(Step::ComeHome),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn any_sequence_of_calls_is_a_byte_queue(steps in prop::collection::vec(step(), 1..80)) {
        let (control, memory) = (Control::new(), Heap::new());
        let known = Known::new();
let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
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
                Step::PushWhole(count) => {
                    let fits = count as u64 <= producer.space().unwrap();
                    let bytes = vec![count as u8; count];
                    prop_assert_eq!(push_whole(&producer, &bytes), if fits { count } else { 0 });
                    model.extend(bytes.iter().filter(|_| fits));
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
                Step::ComeHome(home) => {
                    let before = producer.class().unwrap();
                    let came = producer.come_home(home).unwrap();
                    prop_assert!(!came || (before > home && model.is_empty()));
                    prop_assert_eq!(producer.class().unwrap(), if came { home } else { before });
                }
            }
            prop_assert_eq!(control.used() as usize, model.len());
        }
        let rest: Vec<u8> = model.into_iter().collect();
        prop_assert_eq!(pop(&consumer, rest.len() + 1), rest);
    }

    #[test]
    fn where_memory_ends_who_is_told_of_room_finds_some(
        steps in prop::collection::vec(step(), 1..80), most in 1usize..2_000, forks in any::<bool>(),
    ) {
        let (control, memory) = (Control::new(), Heap::new());
        memory.most.set(most);
        // A fork has the same connection; each knows only of memory that it has asked for.
        let known = [Known::new(), Known::new()];
        let producers = known.each_ref().map(|known| Producer::new(&control, &memory, known));
        let consumer = Consumer::new(&control, &memory);
        let mut model = VecDeque::new();
        for (turn, step) in steps.into_iter().enumerate() {
            let producer = &producers[if forks { turn % 2 } else { 0 }];
            match step {
                Step::Push(count) => {
                    let bytes: Vec<u8> = (0..count).map(|at| (turn * 31 + at) as u8).collect();
                    let done = push(producer, &bytes);
                    model.extend(&bytes[..done]);
                }
                Step::PushWhole(count) => {
                    let bytes = vec![turn as u8; count];
                    let done = push_whole(producer, &bytes);
                    prop_assert!(done == 0 || done == count);
                    model.extend(&bytes[..done]);
                }
                Step::Pop(count) => {
                    let expected: Vec<u8> = model.drain(..count.min(model.len())).collect();
                    prop_assert_eq!(pop(&consumer, count), expected);
                }
                Step::Grow(wanted) => drop(producer.grow(wanted, CLASSES - 1).unwrap()),
                Step::Shrink => drop(producer.shrink().unwrap()),
                Step::ComeHome(home) => drop(producer.come_home(home).unwrap()),
            }
            prop_assert!(memory.in_use() <= most);
            if producer.has_room() {
                let _ = producer.come_home(HOT_CLASS).unwrap();
                prop_assert_eq!(push(producer, b"x"), 1);
                model.push_back(b'x');
            }
        }
        let rest: Vec<u8> = model.into_iter().collect();
        prop_assert_eq!(pop(&consumer, rest.len() + 1), rest);
        prop_assert!(producers.iter().all(Producer::has_room));
    }

    #[test]
    fn control_words_full_of_lies_never_reach_outside(words in prop::array::uniform8(any::<u64>()), near in any::<bool>()) {
        let (control, memory) = (Control::new(), Heap::all_populated());
        let mask = if near { (1 << 24) - 1 } else { u64::MAX };
        control.head.0.position.store(words[0] & mask, Ordering::Relaxed);
        control.tail.0.store(words[1] & mask, Ordering::Relaxed);
        for (start, word) in control.rare.0.window_start.iter().zip(&words[2..]) {
            start.store(word & mask, Ordering::Relaxed);
        }
        let known = Known::new();
let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
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
    let known = Known::new();
    let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
    let bytes: Vec<u8> = (0..MOST_UNREAD).map(|at| (at % 251) as u8).collect();
    let mut done = 0;
    while done < bytes.len() {
        let count = push(&producer, &bytes[done..]);
        done += count;
        assert!(count > 0 || producer.grow(1, CLASSES - 1).unwrap());
    }
    assert!(!producer.grow(1, CLASSES - 1).unwrap());
    assert_eq!((push(&producer, &bytes), producer.has_room()), (0, false));
    assert!(pop(&consumer, bytes.len()) == bytes);
    assert!(producer.shrink().unwrap());
    assert_eq!(push(&producer, &bytes), class_size(0) as usize);
    assert_eq!(pop(&consumer, 10), bytes[..10]);
}

#[test]
fn growth_stops_at_the_limit() {
    let (control, memory) = (Control::new(), Heap::new());
    let known = Known::new();
    let producer = Producer::new(&control, &memory, &known);
    assert!(producer.grow(1 << 40, HOT_CLASS).unwrap());
    assert_eq!(producer.class().unwrap(), HOT_CLASS);
    assert!(!producer.grow(1 << 40, HOT_CLASS).unwrap());
}

#[test]
fn the_end_of_a_window_between_the_smallest_and_the_wide_one_is_told() {
    let (control, memory) = (Control::new(), Heap::new());
    let known = Known::new();
    let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
    let lapped = |count: u64| {
        let bytes = vec![1; count as usize];
        // SAFETY: a live vector.
        let pushed = unsafe { producer.push(bytes.as_ptr(), bytes.len()) }.unwrap();
        assert_eq!(pop(&consumer, bytes.len()).len(), pushed.bytes);
        pushed.lapped
    };
    assert!(!lapped(UNIT) && !lapped(10) && !lapped(UNIT));
    assert!(producer.grow(1, HOT_CLASS).unwrap());
    assert!(!lapped(4 * UNIT - 1) && lapped(1) && !lapped(1) && lapped(4 * UNIT));
    assert!(producer.grow(u64::MAX, WIDE_CLASS).unwrap());
    for _ in 0..9 {
        assert!(!lapped(class_size(WIDE_CLASS) / 4));
    }
    assert_eq!(producer.moved(), control.head());
    assert!(producer.shrink().unwrap());
    assert_eq!(producer.moved(), 0);
}

#[test]
fn a_publish_rings_once_for_each_time_that_somebody_armed() {
    let (control, memory) = (Control::new(), Heap::new());
    let known = Known::new();
    let producer = Producer::new(&control, &memory, &known);
    // SAFETY: a live array.
    let rings = || unsafe { producer.push(b"x".as_ptr(), 1) }.unwrap().ring;
    assert!(!rings());
    control.data_armed.0.arm(Wakes::ByTcp);
    assert!(rings());
    assert!(!rings());
    control.data_armed.0.renew();
    assert!(rings());
    control.data_armed.0.disarm(Wakes::ByTcp);
    control.data_armed.0.renew();
    assert!(!rings());
}

#[test]
fn a_large_window_has_memory_for_what_is_written() {
    let (control, memory) = (Control::new(), Heap::new());
    let known = Known::new();
    let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
    assert!(producer.grow(1 << 40, CLASSES - 1).unwrap());
    let step = (STEP / UNIT) as usize;
    assert_eq!(memory.in_use(), 1 + step);
    let bytes = vec![7; STEP as usize];
    for steps in 1..=32 {
        assert_eq!(push(&producer, &bytes), bytes.len());
        assert_eq!(memory.in_use(), 1 + step * steps);
    }
    assert_eq!(push(&producer, &bytes), 0);
    // Once around nothing is asked for.
    memory.most.set(0);
    assert!(!producer.has_room());
    assert!(pop(&consumer, 3 << 20) == vec![7; 3 << 20]);
    assert!(producer.has_room());
    assert_eq!(push(&producer, &bytes), bytes.len());
}

#[test]
fn a_window_without_memory_is_left_when_it_is_empty() {
    let (control, memory) = (Control::new(), Heap::new());
    let known = Known::new();
    let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
    assert!(producer.grow(1 << 40, CLASSES - 1).unwrap());
    memory.most.set(memory.in_use());
    let bytes = vec![7; STEP as usize + 1];
    assert_eq!(push(&producer, &bytes), STEP as usize);
    assert_eq!(push(&producer, &bytes), 0);
    assert!(!producer.has_room());
    assert_eq!(pop(&consumer, 1 << 10).len(), 1 << 10);
    assert!(!producer.has_room() && !producer.come_home(HOT_CLASS).unwrap());
    assert_eq!(pop(&consumer, 1 << 20).len(), (STEP as usize) - (1 << 10));
    assert!(producer.has_room() && producer.come_home(HOT_CLASS).unwrap());
    assert_eq!((producer.class(), push(&producer, &bytes)), (Ok(0), class_size(0) as usize));
}

#[test]
fn an_empty_window_without_memory_is_left_for_one_that_has_some() {
    let (control, memory) = (Control::new(), Heap::new());
    let known = Known::new();
    let (producer, consumer) = (Producer::new(&control, &memory, &known), Consumer::new(&control, &memory));
    let bytes = vec![7; STEP as usize];
    assert!(producer.grow(1 << 40, HOT_CLASS).unwrap());
    assert_eq!(push(&producer, &bytes), bytes.len());
    assert!(producer.grow(u64::MAX, WIDE_CLASS).unwrap() && !producer.leave_unbacked().unwrap());
    assert_eq!(push(&producer, &bytes), bytes.len());
    memory.most.set(memory.in_use());
    assert!(push(&producer, &bytes) == 0 && !producer.leave_unbacked().unwrap(), "it is not empty");
    assert_eq!(pop(&consumer, 1 << 20).len(), 2 * bytes.len());
    // Who is home with this window does not come home.
    assert!(producer.has_room() && !producer.come_home(WIDE_CLASS).unwrap());
    assert_eq!(push(&producer, &bytes), 0);
    assert!(producer.leave_unbacked().unwrap() && !producer.leave_unbacked().unwrap());
    assert_eq!((producer.class(), push(&producer, &bytes)), (Ok(HOT_CLASS), bytes.len()));
}
