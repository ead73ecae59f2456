//! Threads that are cancelled (pthreads(7)) while they wait on a connection, and what is left of it.

use std::ffi::c_void;
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

use super::Behaviour;
use super::peers::{echo, request_echoes};
use crate::calls::{self, Fd, quietly};
use crate::say;
use crate::side::{Side, await_asleep, pause};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("in_read", in_read, echoes),
    Behaviour::connected("in_recv", in_recv, echoes),
    Behaviour::connected("in_recvmsg", in_recvmsg, echoes),
    Behaviour::connected("in_poll", in_poll, echoes),
    Behaviour::connected("in_ppoll_with_others", in_ppoll_with_others, echoes),
    Behaviour::connected("in_select", in_select, echoes),
    Behaviour::connected("in_epoll_wait", in_epoll_wait, echoes),
    Behaviour::connected("in_send", in_send, reads_nothing),
    Behaviour::connected("that_never_sleeps", never_sleeps, sends_on),
    Behaviour::connected("while_it_may_not_be", while_disabled, echoes),
    Behaviour::connected("not_in_sendfile", not_in_sendfile, counts),
    Behaviour::connected("elsewhere", elsewhere, echoes),
];

/// The functions as C sees them: a cancelled thread is unwound out of them.
mod c {
    use super::c_void;

    unsafe extern "C-unwind" {
        pub(super) fn read(fd: i32, buffer: *mut c_void, count: usize) -> isize;
        pub(super) fn recv(fd: i32, buffer: *mut c_void, count: usize, flags: i32) -> isize;
        pub(super) fn recvmsg(fd: i32, message: *mut libc::msghdr, flags: i32) -> isize;
        pub(super) fn send(fd: i32, buffer: *const c_void, count: usize, flags: i32) -> isize;
        pub(super) fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: i32) -> i32;
        pub(super) fn ppoll(
            fds: *mut libc::pollfd,
            count: libc::nfds_t,
            timeout: *const libc::timespec,
            mask: *const libc::sigset_t,
        ) -> i32;
        pub(super) fn select(
            count: i32,
            read: *mut libc::fd_set,
            write: *mut libc::fd_set,
            except: *mut libc::fd_set,
            timeout: *mut libc::timeval,
        ) -> i32;
        pub(super) fn epoll_wait(set: i32, events: *mut libc::epoll_event, most: i32, timeout: i32) -> i32;
        pub(super) fn accept(fd: i32, address: *mut libc::sockaddr, length: *mut libc::socklen_t) -> i32;
        pub(super) fn pthread_create(
            thread: *mut libc::pthread_t,
            attributes: *const c_void,
            start: unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void,
            argument: *mut c_void,
        ) -> i32;
        pub(super) fn pthread_cancel(thread: libc::pthread_t) -> i32;
        pub(super) fn pthread_setcancelstate(state: i32, before: *mut i32) -> i32;
        pub(super) fn pthread_testcancel();
        pub(super) fn sendfile(out: i32, file: i32, offset: *mut i64, count: usize) -> isize;
    }
}

/// What a thread works on.
struct Work {
    fd: Fd,
    /// Its id, once it runs.
    thread: AtomicI32,
    /// Calls that came back.
    calls: AtomicU32,
}

/// More calls than a thread makes before it is cancelled.
const ENOUGH: u32 = u32::MAX;

type Start = unsafe extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// Defines the start function of a thread that does `$body`, in which nothing has to be dropped.
macro_rules! thread {
    ($name:ident, |$work:ident| $body:expr) => {
        unsafe extern "C-unwind" fn $name(argument: *mut c_void) -> *mut c_void {
            // SAFETY: `cancel` waits for this thread before the work goes away.
            let $work = unsafe { &*argument.cast::<Work>() };
            $work.thread.store(calls::thread_id(), Ordering::SeqCst);
            // SAFETY: all pointers are to locals.
            unsafe { $body };
            std::ptr::null_mut()
        }
    };
}

/// Starts `start` on `fd`, cancels it once `ready`, and says how it ended.
fn cancel_when(fd: Fd, start: Start, ready: impl Fn(&Work)) {
    let work = Work { fd, thread: AtomicI32::new(0), calls: AtomicU32::new(0) };
    let mut thread = 0;
    // SAFETY: the work lives until the thread has been joined.
    let created = unsafe {
        c::pthread_create(&raw mut thread, std::ptr::null(), start, (&raw const work).cast_mut().cast())
    };
    assert_eq!(created, 0);
    while work.thread.load(Ordering::SeqCst) == 0 {
        pause();
    }
    ready(&work);
    // SAFETY: the thread has not been joined.
    assert_eq!(unsafe { c::pthread_cancel(thread) }, 0);
    let mut result = std::ptr::null_mut();
    // SAFETY: joined once.
    assert_eq!(unsafe { libc::pthread_join(thread, &raw mut result) }, 0);
    say!("cancelled: {}", result.addr() == usize::MAX);
}

/// Cancels `start` while it sleeps; then the connection is as good as before.
fn cancel_asleep(fd: Fd, start: Start) {
    for _ in 0..3 {
        cancel_when(fd, start, |work| await_asleep(work.thread.load(Ordering::SeqCst)));
        request_echoes(fd, 20, 300);
    }
}

fn echoes(_side: &Side, fd: Fd) {
    say!("echoed {}", echo(fd));
}

thread!(reads, |work| {
    let mut byte = 0u8;
    c::read(work.fd, (&raw mut byte).cast(), 1)
});

fn in_read(_side: &Side, fd: Fd) {
    cancel_asleep(fd, reads);
}

thread!(receives, |work| {
    let mut byte = 0u8;
    c::recv(work.fd, (&raw mut byte).cast(), 1, 0)
});

fn in_recv(_side: &Side, fd: Fd) {
    cancel_asleep(fd, receives);
}

thread!(receives_a_message, |work| {
    let mut byte = 0u8;
    let mut list = libc::iovec { iov_base: (&raw mut byte).cast(), iov_len: 1 };
    let mut message: libc::msghdr = std::mem::zeroed();
    message.msg_iov = &raw mut list;
    message.msg_iovlen = 1;
    c::recvmsg(work.fd, &raw mut message, libc::MSG_WAITALL)
});

fn in_recvmsg(_side: &Side, fd: Fd) {
    cancel_asleep(fd, receives_a_message);
}

thread!(polls, |work| {
    let mut list = libc::pollfd { fd: work.fd, events: libc::POLLIN, revents: 0 };
    c::poll(&raw mut list, 1, -1)
});

fn in_poll(_side: &Side, fd: Fd) {
    cancel_asleep(fd, polls);
}

thread!(polls_with_others, |work| {
    let mut pipe = [0; 2];
    libc::pipe(pipe.as_mut_ptr());
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut list = [entry(pipe[0]), entry(work.fd), entry(-1)];
    c::ppoll(list.as_mut_ptr(), 3, std::ptr::null(), std::ptr::null())
});

fn in_ppoll_with_others(_side: &Side, fd: Fd) {
    cancel_asleep(fd, polls_with_others);
}

thread!(selects, |work| {
    let mut set: libc::fd_set = std::mem::zeroed();
    libc::FD_SET(work.fd, &raw mut set);
    let null = std::ptr::null_mut();
    c::select(work.fd + 1, &raw mut set, null, null, std::ptr::null_mut())
});

fn in_select(_side: &Side, fd: Fd) {
    cancel_asleep(fd, selects);
}

thread!(waits_on_a_set, |work| {
    let mut event = libc::epoll_event { events: 0, u64: 0 };
    c::epoll_wait(work.fd, &raw mut event, 1, -1)
});

/// The thread sleeps on a set that holds the connection, and before that on one that holds nothing of the kind.
fn in_epoll_wait(_side: &Side, fd: Fd) {
    let set = quietly(calls::epoll_create).expect("epoll_create1");
    let asleep = |work: &Work| await_asleep(work.thread.load(Ordering::SeqCst));
    cancel_when(set, waits_on_a_set, asleep);
    quietly(|| calls::epoll_add(set, fd, libc::EPOLLIN, 7)).expect("epoll_ctl");
    for _ in 0..3 {
        cancel_when(set, waits_on_a_set, asleep);
        request_echoes(fd, 20, 300);
    }
}

thread!(sends_for_ever, |work| {
    let block = [0u8; 4096];
    while work.calls.fetch_add(1, Ordering::SeqCst) < ENOUGH {
        c::send(work.fd, block.as_ptr().cast(), block.len(), 0);
    }
});

fn in_send(side: &Side, fd: Fd) {
    cancel_when(fd, sends_for_ever, |work| await_asleep(work.thread.load(Ordering::SeqCst)));
    side.sync("cancelled");
}

fn reads_nothing(side: &Side, _fd: Fd) {
    side.sync("cancelled");
}

thread!(receives_for_ever, |work| {
    let mut byte = 0u8;
    while work.calls.fetch_add(1, Ordering::SeqCst) < ENOUGH {
        c::recv(work.fd, (&raw mut byte).cast(), 1, 0);
    }
});

/// The thread always finds something to read.
fn never_sleeps(side: &Side, fd: Fd) {
    cancel_when(fd, receives_for_ever, |work| {
        while work.calls.load(Ordering::SeqCst) < 10_000 {
            pause();
        }
    });
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn sends_on(side: &Side, fd: Fd) {
    while quietly(|| calls::send(fd, &[1; 1000], libc::MSG_NOSIGNAL)).is_ok() {}
    side.sync("closed");
}

thread!(receives_undisturbed, |work| {
    const DISABLE: i32 = 1;
    let mut before = 0;
    c::pthread_setcancelstate(DISABLE, &raw mut before);
    let mut byte = 0u8;
    c::recv(work.fd, (&raw mut byte).cast(), 1, 0);
    work.calls.fetch_add(1, Ordering::SeqCst);
    c::pthread_setcancelstate(before, &raw mut before);
    c::pthread_testcancel();
});

/// Cancellation waits until the thread allows it: the read goes on, and gets its byte.
fn while_disabled(_side: &Side, fd: Fd) {
    let send = || assert_eq!(quietly(|| calls::send(fd, b"x", 0)), Ok(1));
    let (calls, cancelled) = cancel_and_go_on(fd, receives_undisturbed, send);
    say!("read {calls}, cancelled: {cancelled}");
}

/// Cancels `start` while it sleeps, which goes on after `then`. How many calls it made, and whether it was cancelled in the end.
fn cancel_and_go_on(fd: Fd, start: Start, then: impl FnOnce()) -> (u32, bool) {
    let work = Work { fd, thread: AtomicI32::new(0), calls: AtomicU32::new(0) };
    let mut thread = 0;
    let argument = (&raw const work).cast_mut().cast();
    // SAFETY: the work lives until the thread has been joined.
    let created = unsafe { c::pthread_create(&raw mut thread, std::ptr::null(), start, argument) };
    assert_eq!(created, 0);
    while work.thread.load(Ordering::SeqCst) == 0 {
        pause();
    }
    await_asleep(work.thread.load(Ordering::SeqCst));
    // SAFETY: the thread has not been joined.
    assert_eq!(unsafe { c::pthread_cancel(thread) }, 0);
    then();
    let mut result = std::ptr::null_mut();
    // SAFETY: joined once.
    assert_eq!(unsafe { libc::pthread_join(thread, &raw mut result) }, 0);
    (work.calls.load(Ordering::SeqCst), result.addr() == usize::MAX)
}

/// What [`sends_a_file`] sends.
static FILE: AtomicI32 = AtomicI32::new(-1);
const FILE_BYTES: usize = 64 << 20;

thread!(sends_a_file, |work| {
    let mut left = FILE_BYTES;
    // A signal may end it when it has sent something.
    while left > 0 {
        let sent = c::sendfile(work.fd, FILE.load(Ordering::SeqCst), std::ptr::null_mut(), left);
        left -= usize::try_from(sent).unwrap_or(left);
    }
    work.calls.store(1, Ordering::SeqCst);
    c::pthread_testcancel();
});

/// sendfile(2) is no cancellation point (pthreads(7)).
fn not_in_sendfile(side: &Side, fd: Fd) {
    FILE.store(calls::file_with(&vec![b'x'; FILE_BYTES]).expect("memfd_create"), Ordering::SeqCst);
    let (calls, cancelled) = cancel_and_go_on(fd, sends_a_file, || side.sync("read now"));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(side.told(), FILE_BYTES as u64, "bytes that arrived");
    say!("came back: {calls}, cancelled: {cancelled}");
}

fn counts(side: &Side, fd: Fd) {
    side.sync("read now");
    let mut total = 0;
    loop {
        match quietly(|| calls::recv(fd, 1 << 16, 0)).expect("recv").len() {
            0 => break side.tell(total),
            count => total += count as u64,
        }
    }
}

thread!(accepts, |work| c::accept(work.fd, std::ptr::null_mut(), std::ptr::null_mut()));

/// Threads that wait for what is no connection are cancelled as if the library were not there.
fn elsewhere(_side: &Side, fd: Fd) {
    let mut pipe = [0; 2];
    // SAFETY: two writable words.
    assert_eq!(unsafe { libc::pipe(pipe.as_mut_ptr()) }, 0);
    let asleep = |work: &Work| await_asleep(work.thread.load(Ordering::SeqCst));
    for start in [reads as Start, polls, selects] {
        cancel_when(pipe[0], start, asleep);
    }
    let mut sockets = [0; 2];
    // SAFETY: two writable words.
    assert_eq!(unsafe { libc::socketpair(libc::AF_UNIX, libc::SOCK_STREAM, 0, sockets.as_mut_ptr()) }, 0);
    for start in [receives as Start, receives_a_message, sends_for_ever] {
        cancel_when(sockets[0], start, asleep);
    }
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("bind");
    cancel_when(std::os::fd::AsRawFd::as_raw_fd(&listener), accepts, asleep);
    request_echoes(fd, 20, 300);
}
