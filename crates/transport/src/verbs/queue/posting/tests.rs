use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64};

use super::super::Endpoint;
use super::*;
use crate::lock::Lock;
use crate::reason::Reason;
use crate::verbs::device::Place;
use crate::verbs::ffi::{Cq, Qp, fake};

/// One that is connected, on no device.
fn pair(
    poll: unsafe extern "C" fn(*mut Cq, c_int, *mut Completion) -> c_int,
    post: unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int,
) -> ManuallyDrop<QueuePair> {
    let (cq, qp) = fake::pair(poll, post);
    ManuallyDrop::new(QueuePair {
        verbs: fake::verbs(),
        pd: std::ptr::null_mut(),
        cq,
        qp,
        registered: Vec::new(),
        memory: None,
        reach: 0,
        place: Place { device: String::new(), port: 1, index: 0, gid: [0; 16], routable: true },
        local: Endpoint::default(),
        meeting: None,
        connected: AtomicBool::new(true),
        inline: 0,
        owner: process::id(),
        posting: Lock::new(),
        posted: AtomicU64::new(0),
        completed: AtomicU64::new(0),
        broken: AtomicBool::new(false),
        unanswered: AtomicBool::new(false),
    })
}

unsafe extern "C" fn nothing_done(_: *mut Cq, _: c_int, _: *mut Completion) -> c_int {
    0
}

unsafe extern "C" fn takes(_: *mut Qp, _: *mut SendRequest, _: *mut *mut SendRequest) -> c_int {
    0
}

fn request() -> Request {
    let spot = Spot { address: 0, key: 0 };
    Request::write(spot, spot, 8)
}

#[test]
fn what_is_not_completed_in_time_never_will_be_whatever_the_transport() {
    let pair = pair(nothing_done, takes);
    let late = || Some(Instant::now().checked_sub(Duration::from_millis(1)).unwrap());
    let look = |wait: &mut Wait| (0..64).for_each(|_| wait.pause(&pair));

    let mut wait = Wait { deadline: late(), ..Wait::default() };
    pair.completed.store(32, Ordering::Relaxed);
    look(&mut wait);
    assert!(!pair.is_broken(), "something was");
    assert!(wait.deadline > Some(Instant::now() + LONGEST_WAIT / 2));
    wait.deadline = late();
    look(&mut wait);
    assert!(pair.is_broken() && pair.was_unanswered());
    assert_eq!(pair.wait_for(33, || false), Err(Errno::CONNRESET));
}

#[test]
fn that_a_host_does_not_answer_is_told_from_other_failures() {
    static STATUS: AtomicU32 = AtomicU32::new(0);
    unsafe extern "C" fn fails(_: *mut Cq, _: c_int, list: *mut Completion) -> c_int {
        let done = Completion { id: 1, status: STATUS.load(Ordering::Relaxed), ..Completion::default() };
        // SAFETY: there is room for one.
        unsafe { list.write(done) };
        1
    }
    // IBV_WC_REM_ACCESS_ERR and IBV_WC_RETRY_EXC_ERR.
    for (status, unanswered) in [(10, false), (12, true)] {
        STATUS.store(status, Ordering::Relaxed);
        let pair = pair(fails, takes);
        assert_eq!(pair.wait_for(1, || false), Err(Errno::CONNRESET));
        assert_eq!(pair.was_unanswered(), unanswered);
    }
}

#[test]
fn there_is_room_again_once_something_has_been_done() {
    unsafe extern "C" fn first_done(_: *mut Cq, _: c_int, list: *mut Completion) -> c_int {
        // SAFETY: there is room for one.
        unsafe { list.write(Completion { id: SIGNAL_EVERY, ..Completion::default() }) };
        1
    }
    let pair = pair(first_done, takes);
    for _ in 0..DEPTH {
        pair.begin(1).unwrap().post([request()]).unwrap();
    }
    assert_eq!(pair.completed.load(Ordering::Relaxed), 0);
    drop(pair.begin(2).unwrap());
    assert_eq!(pair.completed.load(Ordering::Relaxed), SIGNAL_EVERY);
}

#[test]
fn a_signal_handler_finds_no_queue_pair_that_its_own_thread_posts_to() {
    static PAIR: AtomicPtr<QueuePair> = AtomicPtr::new(std::ptr::null_mut());
    static RAISED: AtomicBool = AtomicBool::new(false);
    static HANDLED: AtomicU32 = AtomicU32::new(0);
    extern "C" fn posts(_: c_int) {
        // SAFETY: the test's, which outlives the signal.
        let pair = unsafe { PAIR.load(Ordering::Relaxed).as_ref() };
        let posted = pair.unwrap().begin(1).and_then(|poster| poster.post([request()]));
        HANDLED.fetch_add(if posted.is_ok() { 1 } else { 1 << 16 }, Ordering::Relaxed);
    }
    unsafe extern "C" fn interrupted(_: *mut Qp, _: *mut SendRequest, _: *mut *mut SendRequest) -> c_int {
        if !RAISED.swap(true, Ordering::Relaxed) {
            // SAFETY: takes a number; the signal goes to this thread.
            unsafe { libc::raise(libc::SIGUSR1) };
            assert_eq!(HANDLED.load(Ordering::Relaxed), 0);
        }
        0
    }
    let mut pair = pair(nothing_done, interrupted);
    PAIR.store(&raw mut *pair, Ordering::Relaxed);
    let handler: extern "C" fn(c_int) = posts;
    // SAFETY: the handler posts to a queue pair of this test's.
    unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
    pair.begin(1).unwrap().post([request()]).unwrap();
    assert_eq!(HANDLED.load(Ordering::Relaxed), 1);
    assert_eq!(pair.last_posted(), 2);
}

#[test]
fn a_peer_names_a_queue_pair_that_there_may_be() {
    let sound = Endpoint { mtu: 5, number: 0xff_ffff, psn: 0xff_ffff, ..Endpoint::default() };
    assert!(sound.is_sound());
    assert!(Endpoint { mtu: 1, ..sound }.is_sound());
    for mtu in [0, 6, u32::MAX] {
        assert!(!Endpoint { mtu, ..sound }.is_sound());
    }
    assert!(!Endpoint { number: 1 << 24, ..sound }.is_sound());
    assert!(!Endpoint { psn: 1 << 24, ..sound }.is_sound());
    // The device would be asked.
    let pair = pair(nothing_done, takes);
    assert_eq!(pair.admit(Endpoint { mtu: 0, ..sound }), Err(Reason::BadOffer));
}
