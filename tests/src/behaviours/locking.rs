//! Programs that lock their memory (mlockall(2)): it is theirs that is locked, and they may lock as much as without the library.

use libc::{MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT};

use super::lending::{borrowed, lender};
use super::peers::{answer_echoes, request_echoes};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, Pages, quietly};
use crate::say;
use crate::side::Side;

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("before_connections", locks_and_answers, locks_and_asks, Tally::Upgraded(1)),
    Behaviour::connected("while_connected", locks_while_it_answers::<false>, asks_on),
    Behaviour::connected("while_connected_by_number", locks_while_it_answers::<true>, asks_on),
    Behaviour::connected("on_fault", locks_on_fault, asks_on),
    Behaviour::connected("lenders", locks_and_lends, asks_on),
    Behaviour::whole("up_to_a_limit", limited_and_answers, limited_and_asks, Tally::Upgraded(1))
        .tcp_only()
        .needs_root(),
    Behaviour::connected("beyond_a_limit", locks_beyond_a_limit, asks_on).needs_root(),
];

/// Any but root.
const USER: u32 = 1;

/// More than the library needs for one connection, and much less than it maps.
const LITTLE: u64 = 16 << 20;

const ROUNDS: usize = 60;

/// Does `work`, for which no more memory than a little may come.
fn with_little_memory<T>(work: impl FnOnce() -> T) -> T {
    let shared = || calls::memory("RssShmem");
    let before = shared();
    let result = work();
    let more = shared().saturating_sub(before);
    assert!(more < LITTLE, "{} MiB more are shared", more >> 20);
    result
}

fn answer(fd: Fd) {
    quietly(|| answer_echoes(fd, ROUNDS, 3000));
}

fn ask(fd: Fd) {
    quietly(|| request_echoes(fd, ROUNDS, 3000));
}

fn locks_and_answers(side: &Side) {
    let listener = side.listen();
    calls::mlockall(MCL_CURRENT | MCL_FUTURE).expect("root may lock all");
    let fd = side.accept(listener);
    with_little_memory(|| answer(fd));
    all_that_is_new_is_locked();
    side.sync("done");
}

fn locks_and_asks(side: &Side) {
    calls::mlockall(MCL_CURRENT | MCL_FUTURE).expect("root may lock all");
    let fd = side.connect();
    with_little_memory(|| ask(fd));
    all_that_is_new_is_locked();
    side.sync("done");
}

fn all_that_is_new_is_locked() {
    say!("{} of 16 pages have memory", Pages::new(16).resident());
}

fn asks_on(side: &Side, fd: Fd) {
    ask(fd);
    side.sync("locked");
    ask(fd);
    side.sync("done");
}

/// Answers, does `work`, and answers again.
fn answers_around(side: &Side, fd: Fd, work: impl FnOnce()) {
    answer(fd);
    work();
    side.sync("locked");
    answer(fd);
    side.sync("done");
}

/// What the program has mapped before gets memory; what it maps later, if that was asked for.
fn locks_while_it_answers<const BY_NUMBER: bool>(side: &Side, fd: Fd) {
    let lock = if BY_NUMBER { calls::mlockall_by_number } else { calls::mlockall };
    answers_around(side, fd, || {
        with_little_memory(|| {
            for flags in [MCL_CURRENT | MCL_FUTURE, MCL_CURRENT] {
                let before = Pages::new(16);
                lock(flags).expect("root may lock all");
                let after = Pages::new(16);
                say!("{} and {} of 16 pages have memory", before.resident(), after.resident());
            }
        });
    });
}

fn locks_on_fault(side: &Side, fd: Fd) {
    answers_around(side, fd, || {
        with_little_memory(|| {
            let before = Pages::new(16);
            calls::mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT).expect("root may lock all");
            let after = Pages::new(16);
            say!("{} and {} of 16 pages have memory", before.resident(), after.resident());
        });
    });
    assert_eq!(calls::mlockall(MCL_ONFAULT), Err(Errno::EINVAL));
    assert_eq!(calls::mlockall(1 << 10 | MCL_CURRENT), Err(Errno::EINVAL));
}

/// What is lent takes memory, and gives it back.
fn locks_and_lends(side: &Side, fd: Fd) {
    answers_around(side, fd, || {
        with_little_memory(|| {
            calls::mlockall(MCL_CURRENT | MCL_FUTURE).expect("root may lock all");
            lend_much(fd);
            calls::mlockall(MCL_CURRENT | MCL_FUTURE).expect("root may lock all");
            lend_much(fd);
        });
    });
}

fn lend_much(fd: Fd) {
    let Some(thallus) = lender(fd) else { return };
    let before = calls::memory("RssShmem");
    let memory = thallus.allocate(borrowed(fd), 2 * LITTLE as usize).expect("there is memory");
    assert!(calls::memory("RssShmem") >= before + 2 * LITTLE);
    drop(memory);
    thallus.trim(borrowed(fd)).expect("trim");
}

/// Does `work` as a user who may lock `most` bytes.
fn limited<T>(most: u64, work: impl FnOnce() -> T) -> T {
    calls::limit_resource(libc::RLIMIT_MEMLOCK, most);
    quietly(|| calls::act_for(USER)).expect("seteuid");
    let result = work();
    quietly(|| calls::act_for(0)).expect("seteuid");
    result
}

/// What is mapped later counts.
fn limited_and_answers(side: &Side) {
    limited(LITTLE / 2, || {
        let listener = side.listen();
        calls::mlockall(MCL_FUTURE).expect("nothing is locked yet");
        let fd = side.accept(listener);
        with_little_memory(|| answer(fd));
        all_that_is_new_is_locked();
    });
    side.sync("done");
}

fn limited_and_asks(side: &Side) {
    limited(LITTLE / 2, || {
        calls::mlockall(MCL_FUTURE).expect("nothing is locked yet");
        let fd = side.connect();
        with_little_memory(|| ask(fd));
        all_that_is_new_is_locked();
    });
    side.sync("done");
}

fn locks_beyond_a_limit(side: &Side, fd: Fd) {
    answers_around(side, fd, || {
        limited(1 << 20, || assert_eq!(calls::mlockall(MCL_CURRENT), Err(Errno::ENOMEM)));
        limited(0, || assert_eq!(calls::mlockall(MCL_CURRENT), Err(Errno::EPERM)));
    });
}
