//! Programs that know of the library (`thallus.h`): what they lend each other arrives, by whatever way, and comes back.
//!
//! A side that can't lend sends the same bytes in the stream, so the kernel gives the same transcript.

use std::ffi::c_void;
use std::io::IoSliceMut;
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use thallus_api::{Fabric, Handle, Loan, Memory, Thallus, raw};

use super::peers::{answer_echoes, ask_for_tcp, request_echoes, send_all};
use super::scarce::{mapped_bytes, no_address_space};
use super::{Behaviour, Tally};
use crate::calls::{self, End, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{Pattern, Side, listening_port, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("bodies", lends_bodies, takes_bodies),
    Behaviour::connected("both_ways_at_once", lends_and_takes, lends_and_takes),
    Behaviour::connected("more_than_there_is", lends_too_much, takes_all_there_is)
        .environment(&[("THALLUS_LEND", "1M")]),
    Behaviour::connected("nothing", lends_bodies, takes_bodies).environment(&[("THALLUS_LEND", "0")]),
    Behaviour::connected("loans_outlive_the_connection", lends_and_closes, keeps_loans),
    Behaviour::connected("borrower_is_killed", lends_to_a_victim, is_killed_with_loans)
        .end(End::Exit(0), End::Signal(libc::SIGKILL))
        .tally(Tally::Upgraded(1), Tally::Unknown),
    Behaviour::connected("owner_is_killed", is_killed_while_it_lends, keeps_loans_of_the_dead)
        .end(End::Signal(libc::SIGKILL), End::Exit(0))
        .tally(Tally::Unknown, Tally::Upgraded(1)),
    Behaviour::connected("forks", lends_and_forks, borrows_and_forks),
    Behaviour::connected("a_child_lends", lends_in_a_child, takes_one_body),
    Behaviour::connected("handles_that_lie", invents_handles, meets_invented_handles),
    Behaviour::connected("after_the_return_to_tcp", lends_before, takes_after)
        .tally(Tally::Returned(1), Tally::Returned(1))
        .alone(&["by-request"]),
    Behaviour::connected("without_address_space", lends_before_the_fall, has_no_address_space),
    Behaviour::connected("never", lends_nothing_yet, lends_nothing_yet),
    Behaviour::whole("status_of_what_grows_up", nothing, looks_at_what_grows_up, Tally::Stayed(0))
        .tally(Tally::Stayed(0), Tally::Stayed(2 * GROWING))
        .tcp_only()
        .by_itself()
        .takes_long(),
    Behaviour::whole("without_large_files", lends_nothing, meets_no_lender, Tally::Upgraded(1)),
    Behaviour::whole("with_another_user", lends_as_root, takes_as_nobody, Tally::Upgraded(1)).needs_root(),
    Behaviour::whole("by_root_for_a_user", takes_for_a_user, lends_as_user, Tally::Upgraded(1)).needs_root(),
    Behaviour::whole("by_one_that_hides", takes_in_hiding, lends_as_user, Tally::Upgraded(1)).needs_root(),
    Behaviour::whole("among_the_unmapped", takes_unmapped, lends_unmapped, Tally::Upgraded(1)).needs_root(),
];

/// Any but root.
const USER: u32 = 1;
/// What users without a mapping look like.
const NOBODY: u32 = 65534;

/// Both ways of taking a loan.
#[derive(Clone, Copy)]
enum How {
    Borrow,
    Pull,
}

pub(super) fn borrowed(fd: Fd) -> BorrowedFd<'static> {
    // SAFETY: the behaviour closes it when it is done.
    unsafe { BorrowedFd::borrow_raw(fd) }
}

/// The library, if this connection is over shared memory.
pub(super) fn lender(fd: Fd) -> Option<&'static Thallus> {
    let thallus = Thallus::find()?;
    let status = thallus.status(borrowed(fd)).expect("a connection has a status");
    let may_lend = std::env::var("THALLUS_LEND").as_deref() != Ok("0");
    assert_eq!(status.can_lend, may_lend && status.fabric == Fabric::SharedMemory, "{status:?}");
    status.can_lend.then_some(thallus)
}

/// Lends `bytes`, or sends them if that is not possible.
fn give(fd: Fd, bytes: &[u8]) -> Option<Memory> {
    let mut memory = match lender(fd)?.allocate(borrowed(fd), bytes.len()) {
        Ok(memory) => memory,
        Err(error) => {
            assert_eq!(error.raw_os_error(), Some(libc::ENOBUFS));
            return None;
        }
    };
    memory.write_at(0, bytes);
    let handle = memory.lend(0, bytes.len()).expect("few loans are out");
    send_all(fd, &[1]);
    send_all(fd, &handle.bytes);
    Some(memory)
}

fn give_or_send(fd: Fd, bytes: &[u8]) -> Option<Memory> {
    let memory = give(fd, bytes);
    if memory.is_none() {
        send_all(fd, &[0]);
        send_all(fd, &(bytes.len() as u64).to_le_bytes());
        send_all(fd, bytes);
    }
    memory
}

/// What the peer has given.
enum Taken {
    Sent(Vec<u8>),
    Lent(Loan),
}

impl Taken {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Sent(bytes) => bytes,
            Self::Lent(loan) => loan,
        }
    }
}

fn next_handle(fd: Fd) -> Option<Handle> {
    let lent = receive_exactly(fd, 1) == [1];
    lent.then(|| Handle { bytes: receive_exactly(fd, 32).try_into().expect("32 bytes") })
}

/// What the peer has said of a body.
enum Announced {
    Sent(Vec<u8>),
    Lent(Handle),
}

fn announced(fd: Fd) -> Announced {
    if let Some(handle) = next_handle(fd) {
        return Announced::Lent(handle);
    }
    let length = u64::from_le_bytes(receive_exactly(fd, 8).try_into().expect("8 bytes"));
    Announced::Sent(receive_exactly(fd, length as usize))
}

fn take(fd: Fd, how: How, most: usize) -> Taken {
    announced(fd).take(fd, how, most)
}

impl Announced {
    fn take(self, fd: Fd, how: How, most: usize) -> Taken {
        let handle = match self {
            Self::Sent(bytes) => return Taken::Sent(bytes),
            Self::Lent(handle) => handle,
        };
        let thallus = Thallus::find().expect("only the library lends");
        match how {
            // SAFETY: the other side leaves it alone.
            How::Borrow => Taken::Lent(unsafe { thallus.borrow(borrowed(fd), &handle) }.expect("a loan")),
            How::Pull => {
                let mut bytes = vec![0; most];
                let (start, end) = bytes.split_at_mut(most / 3);
                let mut target = [IoSliceMut::new(start), IoSliceMut::new(end)];
                let count = thallus.pull(borrowed(fd), &handle, &mut target).expect("a loan");
                bytes.truncate(count);
                Taken::Sent(bytes)
            }
        }
    }
}

/// What is out of this side's memory.
fn lent_bytes(fd: Fd) -> u64 {
    Thallus::find().map_or(0, |thallus| thallus.status(borrowed(fd)).expect("a status").lent_bytes)
}

const SIZES: &[usize] = &[1, 64, 4096, 4097, 100_000, 1 << 20, (3 << 20) + 5];
const ROUNDS: usize = 10;

fn lends_bodies(side: &Side, fd: Fd) {
    quietly(|| {
        let mut pattern = Pattern::new(1);
        let mut memories = Vec::new();
        for _ in 0..ROUNDS {
            memories.extend(SIZES.iter().map(|&size| give_or_send(fd, &pattern.take(size))));
            assert_eq!(receive_exactly(fd, 1), b"g");
            // All have come back, or were sent.
            assert!(memories.drain(..).flatten().all(|memory| memory.loans() == 0));
            assert_eq!(lent_bytes(fd), 0);
        }
    });
    side.sync("lent");
    say!("{} bodies", ROUNDS * SIZES.len());
}

fn takes_bodies(side: &Side, fd: Fd) {
    quietly(|| {
        let mut pattern = Pattern::new(1);
        for round in 0..ROUNDS {
            // They are given back in another order.
            let mut all: Vec<_> = SIZES
                .iter()
                .map(|&size| {
                    let taken = take(fd, if round % 2 == 0 { How::Borrow } else { How::Pull }, size + 3);
                    assert_eq!(taken.bytes().len(), size);
                    pattern.expect(taken.bytes());
                    taken
                })
                .collect();
            let half = all.split_off(SIZES.len() / 2);
            drop(half);
            drop(all);
            send_all(fd, b"g");
        }
    });
    side.sync("lent");
    say!("{} bodies", ROUNDS * SIZES.len());
}

fn lends_and_takes(side: &Side, fd: Fd) {
    quietly(|| {
        let [mut ours, mut theirs] = [Pattern::new(1), Pattern::new(1)];
        // As many as there is room for in the stream, where they are sent.
        for _ in 0..50 {
            let memory = give_or_send(fd, &ours.take(3000));
            let taken = take(fd, How::Borrow, 3000);
            theirs.expect(taken.bytes());
            drop((taken, memory));
        }
    });
    side.sync("done");
    assert_eq!(lent_bytes(fd), 0);
    say!("50 loans each way");
}

/// The rest goes in the stream.
fn lends_too_much(side: &Side, fd: Fd) {
    quietly(|| {
        let mut pattern = Pattern::new(1);
        let memories: Vec<_> = (0..40).map(|_| give_or_send(fd, &pattern.take(50_000))).collect();
        let lent = memories.iter().flatten().count();
        // 1 MiB holds 18 of 56 KiB.
        assert_eq!(lent, if lender(fd).is_some() { 18 } else { 0 });
        assert_eq!(receive_exactly(fd, 1), b"g");
        drop(memories);
        assert_eq!(lent_bytes(fd), 0);
        drop(give_or_send(fd, &pattern.take(1 << 20)));
    });
    side.sync("lent");
    say!("41 bodies");
}

fn takes_all_there_is(side: &Side, fd: Fd) {
    quietly(|| {
        let mut pattern = Pattern::new(1);
        let all: Vec<_> = (0..40).map(|_| take(fd, How::Borrow, 0)).collect();
        all.iter().for_each(|taken| pattern.expect(taken.bytes()));
        drop(all);
        send_all(fd, b"g");
        pattern.expect(take(fd, How::Pull, 1 << 20).bytes());
    });
    side.sync("lent");
    say!("41 bodies");
}

fn lends_and_closes(side: &Side, fd: Fd) {
    quietly(|| {
        let memory = give_or_send(fd, &Pattern::new(1).take(100_000));
        side.sync("taken");
        calls::close(fd).expect("close");
        side.sync("closed");
        assert!(memory.as_ref().is_none_or(|memory| memory.loans() == 1));
        side.sync("looked");
        side.sync("dropped");
        assert!(memory.as_ref().is_none_or(|memory| memory.loans() == 0));
    });
    say!("closed");
}

fn keeps_loans(side: &Side, fd: Fd) {
    quietly(|| {
        let taken = take(fd, How::Borrow, 0);
        side.sync("taken");
        calls::close(fd).expect("close");
        side.sync("closed");
        side.sync("looked");
        Pattern::new(1).expect(taken.bytes());
        drop(taken);
        side.sync("dropped");
    });
    say!("closed");
}

/// The other side dies with loans of this one's, and the connection ends as it does on the kernel.
fn lends_to_a_victim(side: &Side, fd: Fd) {
    let memory = quietly(|| {
        let memory = give_or_send(fd, &[7; 1000]);
        side.sync("taken");
        memory
    });
    say!("{:?}", calls::recv(fd, 10, 0));
    assert!(memory.is_none_or(|memory| memory.loans() == 1));
}

fn is_killed_with_loans(side: &Side, fd: Fd) {
    let _taken = quietly(|| take(fd, How::Borrow, 0));
    side.sync("taken");
    calls::kill_self();
}

fn is_killed_while_it_lends(side: &Side, fd: Fd) {
    let _memory = quietly(|| give_or_send(fd, &Pattern::new(1).take(1000)));
    side.sync("taken");
    calls::kill_self();
}

fn keeps_loans_of_the_dead(side: &Side, fd: Fd) {
    let taken = quietly(|| take(fd, How::Borrow, 0));
    side.sync("taken");
    say!("{:?}", calls::recv(fd, 10, 0));
    Pattern::new(1).expect(taken.bytes());
}

/// A child can't allocate beside its parent, and what it drops stays lent.
fn lends_and_forks(side: &Side, fd: Fd) {
    quietly(|| {
        let memory = give_or_send(fd, &Pattern::new(1).take(1000));
        let child = fork(Leave::Exit, || {
            if memory.is_some() {
                is_no_lender(fd);
                let refused = memory.as_ref().map(|memory| memory.lend(0, 1).expect_err("so it lends"));
                assert_eq!(refused.and_then(|error| error.raw_os_error()), Some(libc::EBUSY));
            }
        });
        child.wait_for_success();
        side.sync("lent");
        side.sync("child is gone");
        assert!(memory.as_ref().is_none_or(|memory| memory.loans() == 1));
        side.sync("looked");
        side.sync("given back");
        assert!(memory.as_ref().is_none_or(|memory| memory.loans() == 0));
    });
    say!("forked");
}

/// Another process of this side has lent.
fn is_no_lender(fd: Fd) {
    let thallus = Thallus::find().expect("it was there before");
    let status = thallus.status(borrowed(fd)).expect("a status");
    assert_eq!((status.fabric, status.can_lend), (Fabric::SharedMemory, false), "{status:?}");
    let refused = thallus.allocate(borrowed(fd), 1).expect_err("another one allocates");
    assert_eq!(refused.raw_os_error(), Some(libc::EBUSY));
}

/// The parent knows nothing of the memory but that it can't allocate beside the child, which is gone.
fn lends_in_a_child(side: &Side, fd: Fd) {
    quietly(|| {
        let may_lend = lender(fd).is_some();
        let child = fork(Leave::Exit, || drop(give_or_send(fd, &Pattern::new(1).take(1000))));
        child.wait_for_success();
        if may_lend {
            is_no_lender(fd);
        }
        side.sync("taken");
    });
    say!("forked");
}

fn takes_one_body(side: &Side, fd: Fd) {
    quietly(|| {
        Pattern::new(1).expect(take(fd, How::Borrow, 0).bytes());
        side.sync("taken");
    });
    say!("taken");
}

fn borrows_and_forks(side: &Side, fd: Fd) {
    quietly(|| {
        side.sync("lent");
        let mut taken = Some(take(fd, How::Borrow, 0));
        let child = fork(Leave::Exit, || {
            let taken = taken.take().expect("a copy of the parent's");
            Pattern::new(1).expect(taken.bytes());
        });
        child.wait_for_success();
        side.sync("child is gone");
        side.sync("looked");
        Pattern::new(1).expect(taken.take().expect("the child had a copy").bytes());
        side.sync("given back");
    });
    say!("forked");
}

/// No handle makes the other side read outside of what was lent.
fn invents_handles(side: &Side, fd: Fd) {
    quietly(|| {
        let memory = lender(fd).map(|thallus| thallus.allocate(borrowed(fd), 1000).expect("room"));
        send_all(fd, &[u8::from(memory.is_some())]);
        if let Some(memory) = &memory {
            for position in 0..256 {
                let mut handle = memory.lend(0, 1000).expect("few loans are out");
                handle.bytes[position / 8] ^= 1 << (position % 8);
                send_all(fd, &handle.bytes);
                assert_eq!(receive_exactly(fd, 1), b"x");
            }
        }
    });
    side.sync("invented");
    say!("256 handles");
}

fn meets_invented_handles(side: &Side, fd: Fd) {
    quietly(|| {
        if receive_exactly(fd, 1) == [1] {
            let thallus = Thallus::find().expect("only the library lends");
            for position in 0..256 {
                let bytes = receive_exactly(fd, 32).try_into().expect("32 bytes");
                let mut target = vec![0; 1 << 17];
                let pulled =
                    thallus.pull(borrowed(fd), &Handle { bytes }, &mut [IoSliceMut::new(&mut target)]);
                match pulled {
                    // Elsewhere in the same memory, or less of it.
                    Ok(count) => assert!(position < 128 && count <= target.len(), "bit {position}"),
                    Err(error) => {
                        let expected = [libc::EINVAL, libc::EMSGSIZE];
                        assert!(
                            error.raw_os_error().is_some_and(|errno| expected.contains(&errno)),
                            "{error}"
                        );
                    }
                }
                send_all(fd, b"x");
            }
        }
    });
    side.sync("invented");
    say!("256 handles");
}

fn lends_as_root(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    quietly(|| {
        super::peers::echo(fd);
    });
    lends_bodies_once(side, fd);
}

fn lends_bodies_once(side: &Side, fd: Fd) {
    quietly(|| {
        let memory = give_or_send(fd, &Pattern::new(1).take(5000));
        side.sync("lent");
        side.sync("taken");
        assert!(memory.is_none_or(|memory| memory.loans() == 0));
    });
    say!("lent to another user");
}

/// May not borrow from another user, but pull.
fn takes_as_nobody(side: &Side) {
    calls::become_user(NOBODY, NOBODY).expect("setuid");
    let fd = side.connect();
    request_echoes(fd, 50, 1000);
    quietly(|| {
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        side.sync("lent");
        pulls_only(fd, announced(fd));
        side.sync("taken");
    });
    say!("took from another user");
}

/// Who is not trusted lends all the same.
fn pulls_only(fd: Fd, announced: Announced) {
    let handle = match announced {
        Announced::Sent(bytes) => return Pattern::new(1).expect(&bytes),
        Announced::Lent(handle) => handle,
    };
    let thallus = Thallus::find().expect("only the library lends");
    assert!(!thallus.status(borrowed(fd)).expect("a status").trusted);
    // SAFETY: it fails.
    let refused = unsafe { thallus.borrow(borrowed(fd), &handle) }.expect_err("not trusted");
    assert_eq!(refused.raw_os_error(), Some(libc::EPERM));
    let mut small = [0; 100];
    let refused = thallus.pull(borrowed(fd), &handle, &mut [IoSliceMut::new(&mut small)]);
    assert_eq!(refused.map_err(|error| error.raw_os_error()), Err(Some(libc::EMSGSIZE)));
    let mut bytes = [0; 5000];
    let pulled = thallus.pull(borrowed(fd), &handle, &mut [IoSliceMut::new(&mut bytes)]);
    assert_eq!(pulled.expect("a loan"), 5000);
    Pattern::new(1).expect(&bytes);
}

fn lends_as_user(side: &Side) {
    lends_as(side, USER);
}

fn lends_unmapped(side: &Side) {
    lends_as(side, NOBODY);
}

fn lends_as(side: &Side, user: u32) {
    calls::become_user(user, user).expect("setuid");
    let fd = side.connect();
    request_echoes(fd, 50, 1000);
    lends_bodies_once(side, fd);
}

/// Serves someone whom it has no reason to trust, once `guard` is up.
fn takes_guarded(side: &Side, guard: impl FnOnce(Fd)) {
    let listener = side.listen();
    let fd = side.accept(listener);
    answer_echoes(fd, 50, 1000);
    quietly(|| {
        side.sync("lent");
        guard(fd);
        pulls_only(fd, announced(fd));
        side.sync("taken");
    });
    say!("took");
}

/// It is the lender's user for a while, but can be root again.
fn takes_for_a_user(side: &Side) {
    takes_guarded(side, |_| {
        calls::act_for(USER).expect("seteuid");
        calls::be_dumpable(true);
    });
    calls::act_for(0).expect("seteuid");
}

/// One that has changed its user is not dumpable, until it says so: others of that user can't trace it.
fn takes_in_hiding(side: &Side) {
    calls::become_user(USER, USER).expect("setuid");
    takes_guarded(side, |fd| {
        calls::be_dumpable(true);
        if let Some(thallus) = lender(fd) {
            assert!(thallus.status(borrowed(fd)).expect("a status").trusted);
        }
        calls::be_dumpable(false);
    });
}

fn takes_unmapped(side: &Side) {
    calls::become_user(NOBODY, NOBODY).expect("setuid");
    takes_guarded(side, |_| calls::be_dumpable(true));
}

/// What was lent before the connection went back is there afterwards, and can be lent again.
fn lends_before(side: &Side, fd: Fd) {
    quietly(|| {
        answer_echoes(fd, 50, 1000);
        let mut pattern = Pattern::new(1);
        let memories = [(); 2].map(|()| give_or_send(fd, &pattern.take(5000)));
        side.sync("lent");
        answer_echoes(fd, 50, 1000);
        if let [Some(first), Some(_)] = &memories {
            let thallus = Thallus::find().expect("it was there before");
            assert_eq!(lent_bytes(fd), 2 * 8192);
            let refused = thallus.allocate(borrowed(fd), 1).expect_err("it is back on TCP");
            assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
            let again = first.lend(10, 20).expect("few loans are out");
            send_all(fd, &again.bytes);
        } else {
            send_all(fd, &[0; 32]);
        }
        side.sync("taken");
        assert_eq!(memories.iter().flatten().map(Memory::loans).sum::<usize>(), 0);
        drop(memories);
        assert_eq!(lent_bytes(fd), 0);
    });
    say!("lent");
}

fn takes_after(side: &Side, fd: Fd) {
    quietly(|| {
        request_echoes(fd, 50, 1000);
        side.sync("lent");
        let thallus = Thallus::find();
        let trusted = thallus.is_some_and(|thallus| thallus.status(borrowed(fd)).expect("a status").trusted);
        ask_for_tcp();
        // They come while the connection goes back, and are taken when it has.
        let announced = [(); 2].map(|()| announced(fd));
        request_echoes(fd, 50, 1000);
        let mut pattern = Pattern::new(1);
        let [first, second] = announced;
        pattern.expect(first.take(fd, How::Borrow, 0).bytes());
        if let Some(status) = thallus.map(|thallus| thallus.status(borrowed(fd)).expect("a status")) {
            assert_eq!((status.fabric, status.trusted), (Fabric::Tcp, trusted));
            assert_eq!(status.returned, status.ring_bytes_sent > 0, "{status:?}");
        }
        pattern.expect(second.take(fd, How::Pull, 5000).bytes());
        let again = Handle { bytes: receive_exactly(fd, 32).try_into().expect("32 bytes") };
        if again.bytes != [0; 32] {
            let thallus = Thallus::find().expect("only the library lends");
            let expected = &Pattern::new(1).take(5000)[10..30];
            let mut bytes = [0; 20];
            let pulled = thallus.pull(borrowed(fd), &again, &mut [IoSliceMut::new(&mut bytes)]);
            assert_eq!((pulled.expect("a loan"), &bytes[..]), (20, expected));
        }
        side.sync("taken");
    });
    say!("taken");
}

fn lends_before_the_fall(side: &Side, fd: Fd) {
    quietly(|| {
        let memory = give_or_send(fd, &Pattern::new(1).take(5000));
        side.sync("taken");
        assert!(memory.is_none_or(|memory| memory.loans() == 0));
    });
    say!("lent");
}

/// A loan that can't be mapped is still there when it can.
fn has_no_address_space(side: &Side, fd: Fd) {
    quietly(|| {
        let announced = announced(fd);
        no_address_space();
        if let Announced::Lent(handle) = &announced {
            let thallus = Thallus::find().expect("only the library lends");
            let status = thallus.status(borrowed(fd)).expect("a status");
            assert_eq!((status.fabric, status.can_lend), (Fabric::SharedMemory, false));
            // SAFETY: it fails.
            let refused = unsafe { thallus.borrow(borrowed(fd), handle) }.expect_err("no room");
            assert_eq!(refused.raw_os_error(), Some(libc::ENOMEM));
            let refused = thallus.pull(borrowed(fd), handle, &mut []).expect_err("no room");
            assert_eq!(refused.raw_os_error(), Some(libc::ENOMEM));
        }
        calls::limit_resource(libc::RLIMIT_AS, libc::RLIM_INFINITY);
        Pattern::new(1).expect(announced.take(fd, How::Pull, 5000).bytes());
        side.sync("taken");
    });
    say!("taken");
}

/// Who only asks has nothing mapped for that, and needs no room for it.
fn lends_nothing_yet(side: &Side, fd: Fd) {
    quietly(|| {
        let size = mapped_bytes();
        if let Some(thallus) = lender(fd) {
            no_address_space();
            thallus.trim(borrowed(fd)).expect("there is nothing to do");
            let status = thallus.status(borrowed(fd)).expect("a status");
            assert_eq!((status.can_lend, status.lent_bytes, status.spare_bytes), (false, 0, 0));
            calls::limit_resource(libc::RLIMIT_AS, libc::RLIM_INFINITY);
            assert!(lender(fd).is_some());
        }
        assert!(mapped_bytes() < size + (1 << 30), "as much as can be lent is mapped");
        side.sync("looked");
    });
    say!("looked");
}

const GROWING: u64 = 10_000;

fn nothing(_side: &Side) {}

/// `thallus_status`, for who is in a hurry.
fn bare_status() -> Option<raw::StatusFn> {
    // SAFETY: a name that ends with zero.
    let function = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"thallus_status".as_ptr()) };
    // SAFETY: null, or a function of this type.
    (!function.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, raw::StatusFn>(function) })
}

/// A thread asks again and again for the status of connections while they are open.
fn looks_at_what_grows_up(side: &Side) {
    const NONE: Fd = -1;
    let [ended, looks] = [false; 2].map(AtomicBool::new);
    let open = AtomicI32::new(NONE);
    let look = || {
        let status = bare_status();
        while !ended.load(Ordering::SeqCst) {
            looks.store(true, Ordering::SeqCst);
            let fd = open.load(Ordering::SeqCst);
            if let Some(status) = status.filter(|_| fd != NONE) {
                let mut head = raw::Status { size: 16, ..raw::Status::default() };
                // SAFETY: the status is writable, and says how much of it is asked for.
                assert_eq!(unsafe { status(fd, &raw mut head) }, 0, "{}", calls::Errno::last());
            }
            looks.store(false, Ordering::SeqCst);
        }
    };
    quietly(|| {
        let listener = side.listen_quietly();
        let destination = side.family.own(listening_port(listener));
        std::thread::scope(|scope| {
            let watcher = scope.spawn(look);
            for _ in 0..GROWING {
                let ends = [side.connect_to(destination), side.accept(listener)];
                for fd in ends {
                    open.store(fd, Ordering::SeqCst);
                    // It grows up before it has a second name.
                    let name = calls::dup(fd).expect("dup");
                    open.store(NONE, Ordering::SeqCst);
                    while looks.load(Ordering::SeqCst) && !watcher.is_finished() {
                        std::thread::yield_now();
                    }
                    calls::close(name).expect("close");
                }
                // Its port is free again at once.
                calls::set_linger(ends[0], 0).expect("SO_LINGER");
                for fd in ends {
                    calls::close(fd).expect("close");
                }
            }
            ended.store(true, Ordering::SeqCst);
        });
    });
    say!("looked");
}

/// There is room for the connection in the file that the process may make, but not for loans.
fn lends_nothing(side: &Side) {
    calls::limit_resource(libc::RLIMIT_FSIZE, 1 << 30);
    let listener = side.listen();
    let fd = side.accept(listener);
    answer_echoes(fd, 50, 1000);
    can_not_lend(fd);
    side.sync("seen");
}

fn meets_no_lender(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 50, 1000);
    can_not_lend(fd);
    side.sync("seen");
}

fn can_not_lend(fd: Fd) {
    if let Some(thallus) = Thallus::find() {
        let status = thallus.status(borrowed(fd)).expect("a status");
        assert_eq!((status.can_lend, status.lent_bytes), (false, 0), "{status:?}");
        let refused = thallus.allocate(borrowed(fd), 1).expect_err("no room");
        assert_eq!(refused.raw_os_error(), Some(libc::EOPNOTSUPP));
    }
}
