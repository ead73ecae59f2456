//! Bytes in and out: read, recv, write, send and their relatives.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::fs::{FileType, SeekFrom};
use rustix::io::Errno;
use thallus_transport::arena::flag;
use thallus_transport::buffers::{Buffers, ControlData, MOST_BYTES, may_be_of_program};
use thallus_transport::connection::Connection;
use thallus_transport::reason::Reason;
use thallus_transport::settle::PATIENCE;
use thallus_transport::{process, tcp};

use crate::cancel::{point, put_off};
use crate::ops::epoll;
use crate::table::Guest;
use crate::{errno, table};

/// Receives into `list`, or lets `kernel` do it while the connection is on TCP.
///
/// # Safety
/// The list's buffers are the application's.
pub(crate) unsafe fn receive(
    fd: i32,
    list: &[libc::iovec],
    flags: i32,
    kernel: impl FnOnce() -> isize,
) -> isize {
    // SAFETY: the caller's promise.
    unsafe { receive_with(fd, list, flags, None, kernel) }
}

/// As [`receive`], on `AF_UNIX` with what comes beside the bytes.
///
/// # Safety
/// The list's buffers and that for what comes beside them are the application's.
pub(crate) unsafe fn receive_with(
    fd: i32,
    list: &[libc::iovec],
    flags: i32,
    control: Option<&mut ControlData>,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let kernel = || point(kernel).unwrap_or(-1);
    let mut flags = flags & !COMPATIBLE;
    if flags & OF_TCP != 0 && table::is_unix(fd) {
        // They mean nothing there.
        flags &= !OF_TCP;
    }
    if flags & (libc::MSG_OOB | libc::MSG_ERRQUEUE) != 0 {
        if flags & libc::MSG_OOB != 0 {
            // Too late if it has left TCP: then there is none, as the kernel will say.
            let _ = table::enter(fd).map(|call| call.connection().pin(fd, Reason::Oob));
        }
        return kernel();
    }
    let call = match table::enter_for_io(fd) {
        None => return kernel(),
        Some(Guest::Call(call)) => call,
        Some(Guest::Visit(mut visit)) => {
            let result = kernel();
            if result > 0 && flags & libc::MSG_PEEK == 0 {
                visit.received(result as u64);
            }
            return result;
        }
    };
    if call.is_active(fd) {
        // Nothing is stored then (`tcp_recvmsg_locked` of net/ipv4/tcp.c).
        let is_untouched = flags & libc::MSG_TRUNC != 0;
        let target = if is_untouched { Buffers::untouched(list) } else { Buffers::new(list) };
        let mut target = match target {
            Ok(target) => target,
            Err(errno) => return errno::count(Err(errno)),
        };
        // Descriptors end a read that asks for all of its bytes, wherever they go.
        let mut none = ControlData::none();
        let control = control.or((flags & libc::MSG_WAITALL != 0).then_some(&mut none));
        if let Some(control) = control.filter(|_| call.connection().is_unix()) {
            target = target.with_control(control);
        }
        let result = call.connection().recv(fd, &mut target, flags);
        if call.slot.kicked.load(Ordering::Relaxed) && !call.connection().readable() {
            epoll::calm(call.slot);
        }
        return errno::count(result);
    }
    if let Err(errno) = call.connection().pass_hello_by(fd, flags) {
        return errno::count(Err(errno));
    }
    call.connection().by_kernel(kernel, |result| {
        if result > 0 && flags & libc::MSG_PEEK == 0 {
            call.connection().block.tcp_received.fetch_add(result as u64, Ordering::Relaxed);
        }
    })
}

/// Flags that TCP knows, and `AF_UNIX` does not.
const OF_TCP: i32 = libc::MSG_TRUNC | libc::MSG_ERRQUEUE;

/// The kernel's own `MSG_CMSG_COMPAT`: it means nothing to send(2) and recv(2), and is refused by the calls of messages.
pub(crate) const COMPATIBLE: i32 = i32::MIN;

/// Something has come beside the bytes on `fd`: more may follow, so it stays where that can come.
#[cold]
pub(crate) fn control_came(fd: i32) {
    if table::is_unix(fd) {
        errno::keep(|| table::enter(fd).map(|call| call.connection().pin(fd, Reason::ControlData)));
    }
}

/// Has the kernel serve a call that moves bytes to `fd` from now on. Fails with `EPIPE`, after `SIGPIPE`, if no write can be served any
/// more, and with `otherwise` if the kernel can't serve any yet.
fn settle_for_writing(fd: i32, reason: Reason, otherwise: Errno) -> Result<(), Errno> {
    let says = |question: fn(&Connection, i32) -> bool| {
        table::enter_adult(fd).is_some_and(|call| question(call.connection(), fd))
    };
    let is_refused = says(|connection, _| connection.is_refused());
    if !is_refused && settle(fd, reason) {
        return Ok(());
    }
    if is_refused || says(Connection::refuses_writes) {
        raise_sigpipe();
        return Err(Errno::PIPE);
    }
    Err(otherwise)
}

/// Has the kernel alone serve both descriptors, one of which is a pipe: it is about to move up to `count` bytes from `input` to `out`. What the
/// call says, if it is not to be made: `EINVAL`, what splice(2) and sendfile(2) say of descriptors that they can't serve, if the kernel can't
/// yet (programs then read and write), or what comes of a reset. After the call comes [`kernel_said`], if it fails.
#[cold]
pub(crate) fn settle_for_moving(input: i32, out: i32, count: usize) -> Option<Result<usize, Errno>> {
    let (reason, otherwise) = (Reason::UnsupportedCall, Errno::INVAL);
    if input < 0 || out < 0 {
        // It refuses the call.
        return None;
    }
    let said = || if count > 0 { moved_after_reset(input, out) } else { None };
    // Of a reset it tells though bytes are unread that keep it from serving, and where that finds it.
    if let Some(said) = said() {
        return Some(said);
    }
    if !settle(input, reason) {
        return Some(Err(otherwise));
    }
    match settle_for_writing(out, reason, otherwise) {
        Ok(()) => said(),
        Err(errno) => Some(Err(errno)),
    }
}

/// What a call that moves bytes from `input` to `out` says, if one of them has been reset.
fn moved_after_reset(input: i32, out: i32) -> Option<Result<usize, Errno>> {
    let moves = || {
        // SAFETY: the application named this descriptor for the duration of its call.
        let bytes = tcp::unread(unsafe { rustix::fd::BorrowedFd::borrow_raw(input) });
        bytes.is_ok_and(|count| count > 0)
    };
    let said = errno::keep(|| {
        said_after_reset(input, true, || true).or_else(|| said_after_reset(out, false, moves))
    });
    if said == Some(Err(Errno::PIPE)) {
        raise_sigpipe();
    }
    said
}

/// [`Connection::said_after_reset`] of `fd`, if it `may` say so: what has never left TCP the kernel tells of.
fn said_after_reset(fd: i32, reads: bool, may: impl FnOnce() -> bool) -> Option<Result<usize, Errno>> {
    let call = table::enter_adult(fd)?;
    let connection = call.connection();
    connection.segment().filter(|_| may()).and_then(|_| connection.said_after_reset(fd, reads))
}

/// A call that the kernel has served between `fds` has failed: of a reset it tells once.
#[cold]
pub(crate) fn kernel_said(fds: [i32; 2]) {
    let errno = errno::now();
    errno::keep(|| {
        for call in fds.into_iter().filter_map(table::enter_adult) {
            call.connection().told(errno);
        }
    });
}

/// Whether there are bytes to read on a connection that has left the kernel's socket.
#[cold]
pub(crate) fn has_unread(fd: i32) -> bool {
    errno::keep(|| {
        table::enter_adult(fd).is_some_and(|call| call.connection().unread(fd).is_ok_and(|count| count > 0))
    })
}

/// Flags that change nothing for a call that need not wait, and does not fail.
const OF_WAITING: i32 = libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL;

/// Receives up to `length` bytes, if there is no more to it than to take them from the ring ([`Connection::recv_briefly`]).
///
/// # Safety
/// The buffer is the application's.
#[inline]
pub(crate) unsafe fn receive_briefly(fd: i32, target: *mut u8, length: usize, flags: i32) -> Option<isize> {
    let call = table::enter_quickly(fd).filter(|_| flags & !OF_WAITING == 0)?;
    let at_once = flags & libc::MSG_DONTWAIT != 0;
    // SAFETY: the caller's promise.
    let result = unsafe { call.connection().recv_briefly(fd, target, length, at_once)? };
    if call.slot.kicked.load(Ordering::Relaxed) && !call.connection().readable() {
        epoll::calm(call.slot);
    }
    Some(errno::count(result))
}

/// Sends `length` bytes, if there is no more to it ([`Connection::send_briefly`]).
///
/// # Safety
/// The buffer is the application's.
#[inline]
pub(crate) unsafe fn transmit_briefly(
    fd: i32,
    source: *const u8,
    length: usize,
    flags: i32,
) -> Option<isize> {
    let call = table::enter_quickly(fd).filter(|_| flags & !OF_WAITING == 0)?;
    // SAFETY: the caller's promise.
    unsafe { call.connection().send_briefly(fd, source, length) }.map(usize::cast_signed)
}

/// How long a call waits that can't be made yet, at first and at most.
const SHORTEST_PAUSE: Duration = Duration::from_millis(1);
const LONGEST_PAUSE: Duration = Duration::from_millis(64);

/// Has the kernel's socket carry whatever is sent on an `AF_UNIX` connection from now on ([`Connection::send_by_kernel`]). False if that can't
/// be yet.
#[cold]
pub(crate) fn leave_to_kernel(call: &table::Call, fd: i32, reason: Reason) -> bool {
    // Registrations on which nobody waits look at memory before the next wait; else they would count as asleep, and only the peer could move
    // what is unread.
    errno::keep(|| epoll::stalled(call.slot));
    call.connection().send_by_kernel(fd, reason, Instant::now() + PATIENCE)
}

/// Sends what only the kernel can carry on an `AF_UNIX` connection: `kernel` sends `asked` bytes with something beside them.
#[cold]
pub(crate) fn transmit_with_control(
    fd: i32,
    asked: usize,
    flags: i32,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let Some(call) = table::enter(fd) else { return kernel() };
    let connection = call.connection();
    let mut pause = SHORTEST_PAUSE;
    while !leave_to_kernel(&call, fd, Reason::ControlData) {
        if connection.is_gone() || connection.is_closed() {
            break;
        }
        if connection.is_refused() {
            if flags & libc::MSG_NOSIGNAL == 0 {
                raise_sigpipe();
            }
            return errno::count(Err(Errno::PIPE));
        }
        if flags & libc::MSG_DONTWAIT != 0 || connection.nonblocking.load(Ordering::Relaxed) {
            return errno::count(Err(Errno::AGAIN));
        }
        // Others have to read first, or write; and a peer that is asked without end takes that for a lie.
        // Not by libc's, which is a cancellation point.
        let _ = rustix::thread::nanosleep(&Timespec { tv_sec: 0, tv_nsec: i64::from(pause.subsec_nanos()) });
        pause = (2 * pause).min(LONGEST_PAUSE);
    }
    let result = point(kernel).unwrap_or(-1);
    note_sent(&call, result, asked);
    result
}

/// Sends `list`, or lets `kernel` do it while the connection is on TCP.
///
/// # Safety
/// The list's buffers are the application's.
pub(crate) unsafe fn transmit(
    fd: i32,
    list: &[libc::iovec],
    flags: i32,
    kernel: impl FnOnce() -> isize,
) -> isize {
    let kernel = || point(kernel).unwrap_or(-1);
    let flags = flags & !COMPATIBLE;
    if flags & libc::MSG_OOB != 0 {
        if let Some(said) = errno::keep(|| said_after_reset(fd, false, || true)) {
            if said == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 {
                raise_sigpipe();
            }
            return errno::count(said);
        }
        if !settle(fd, Reason::Oob) {
            return errno::count(Err(Errno::OPNOTSUPP));
        }
    }
    if flags & libc::MSG_ZEROCOPY != 0 && table::is_connection(fd) && heeds_zerocopy(fd) {
        return transmit_without_copy(fd, length(list), kernel);
    }
    let call = match table::enter_for_io(fd) {
        None => return kernel(),
        Some(Guest::Call(call)) => call,
        Some(Guest::Visit(mut visit)) => {
            let result = kernel();
            if result > 0 {
                visit.sent(result as u64);
            }
            if is_short(result, length(list)) {
                drop(visit);
                errno::keep(|| table::enter(fd).inspect(|call| call.connection().block.lacks_room()));
            }
            return result;
        }
    };
    if call.is_active(fd) {
        if flags & libc::MSG_FASTOPEN != 0 && !call.connection().is_unix() {
            // There is a connection, says the kernel, which sends nothing then.
            return kernel();
        }
        let mut source = match Buffers::new(list) {
            Ok(source) => source,
            Err(errno) => return errno::count(Err(errno)),
        };
        let result = call.connection().send(fd, &mut source, flags);
        // Whoever reports room to one registration meanwhile may have taken the mark away.
        if source.left() > 0 {
            errno::keep(|| epoll::stalled(call.slot));
        }
        if result == Err(Errno::PIPE) && flags & libc::MSG_NOSIGNAL == 0 && !is_quiet(&call, &source) {
            raise_sigpipe();
        }
        return errno::count(result);
    }
    call.connection().by_kernel(kernel, |result| note_sent(&call, result, length(list)))
}

/// Whether a write that fails raises no signal: on `AF_UNIX`, who has waited for room is sent none (`unix_stream_sendmsg` of
/// net/unix/af_unix.c).
fn is_quiet(call: &table::Call, source: &Buffers<'_>) -> bool {
    source.has_waited() && call.connection().is_unix()
}

/// Whether the kernel would take `MSG_ZEROCOPY` at its word.
fn heeds_zerocopy(fd: i32) -> bool {
    // SAFETY: the program's descriptor, on which it makes a call.
    let socket = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    errno::keep(|| tcp::heeds_zerocopy(socket))
}

/// Sends `asked` bytes by one call of `kernel`, which counts those calls and says later which are done.
#[cold]
fn transmit_without_copy(fd: i32, asked: usize, kernel: impl FnOnce() -> isize) -> isize {
    if !settle(fd, Reason::ZeroCopy) {
        // What the kernel says when it can't do without the copy now (Documentation/networking/msg_zerocopy.rst).
        return errno::count(Err(Errno::NOBUFS));
    }
    let result = kernel();
    if let Some(call) = table::enter(fd) {
        note_sent(&call, result, asked);
        if is_short(result, asked) {
            errno::keep(|| epoll::stalled(call.slot));
        }
    }
    result
}

/// The kernel sent `result` bytes of `asked` over TCP.
fn note_sent(call: &table::Call, result: isize, asked: usize) {
    let block = call.connection().block;
    if result > 0 {
        block.tcp_sent.fetch_add(result as u64, Ordering::Relaxed);
    }
    if is_short(result, asked) {
        // The kernel owes an edge, which must not be lost if the connection leaves TCP before it comes.
        block.lacks_room();
    } else if block.has(flag::NO_SPACE) {
        block.lower(flag::NO_SPACE);
    }
}

/// Whether less than `asked` was sent because there was no room for more.
fn is_short(result: isize, asked: usize) -> bool {
    usize::try_from(result).map_or_else(|_| errno::now() == Errno::AGAIN, |sent| sent < asked)
}

/// Bytes of all buffers together.
pub(crate) fn length(list: &[libc::iovec]) -> usize {
    list.iter().fold(0, |sum, piece| sum.saturating_add(piece.iov_len))
}

/// The kernel sends it to the thread that wrote.
fn raise_sigpipe() {
    use rustix::process::{Pid, Signal};
    let raw = |id: u32| Pid::from_raw(id.cast_signed());
    if let (Some(group), Some(thread)) = (raw(process::id()), raw(process::thread())) {
        // SAFETY: names this very thread.
        let _ = unsafe {
            syscalls::syscall!(
                syscalls::Sysno::tgkill,
                group.as_raw_nonzero().get(),
                thread.as_raw_nonzero().get(),
                Signal::PIPE.as_raw()
            )
        };
    }
}

/// One buffer as a list.
pub(crate) fn one(buffer: *const u8, length: usize) -> [libc::iovec; 1] {
    [libc::iovec { iov_base: buffer.cast_mut().cast(), iov_len: length }]
}

/// Longest list of buffers that the kernel takes (`UIO_MAXIOV` of linux/uio.h).
const LONGEST_LIST: usize = 1024;

/// The application's list of `count` buffers. `None` if the kernel would refuse it.
///
/// # Safety
/// `list` is readable for `count` entries if `count` is sensible.
pub(crate) unsafe fn list<'a>(list: *const libc::iovec, count: i32) -> Option<&'a [libc::iovec]> {
    let count = usize::try_from(count).ok().filter(|&count| count <= LONGEST_LIST)?;
    if count == 0 {
        return Some(&[]);
    }
    let is_there = may_be_of_program(list.addr(), count * size_of::<libc::iovec>());
    // SAFETY: the caller's promise.
    is_there.then(|| unsafe { std::slice::from_raw_parts(list, count) })
}

/// The buffers of the application's message, as [`list`].
///
/// # Safety
/// `message` is readable, and its list as [`list`] says.
pub(crate) unsafe fn message_list<'a>(message: *const libc::msghdr) -> Option<&'a [libc::iovec]> {
    // SAFETY: the caller's promise.
    let header = unsafe { &*message };
    // SAFETY: the caller's promise.
    unsafe { list(header.msg_iov, i32::try_from(header.msg_iovlen).ok()?) }
}

/// Pins each connection whose descriptor `message` carries to another process (unix(7), `SCM_RIGHTS`), and what may become one.
/// False if one has left TCP already: it can't be handed over any more.
///
/// # Safety
/// `message` is a valid message header, or where the program can have nothing.
pub(crate) unsafe fn settle_passed_fds(message: *const libc::msghdr) -> bool {
    if !may_be_of_program(message.addr(), size_of::<libc::msghdr>()) {
        return true;
    }
    // SAFETY: the caller's promise.
    let header = unsafe { &*message };
    let (control, length) = (header.msg_control.addr(), header.msg_controllen);
    if length < size_of::<libc::cmsghdr>() || !may_be_of_program(control, length) {
        // There is none, or the kernel says `EFAULT`.
        return true;
    }
    let end = control + length;
    let mut allowed = true;
    // SAFETY: a valid header with a control buffer.
    let mut part = unsafe { libc::CMSG_FIRSTHDR(message) };
    // SAFETY: null or inside the control buffer.
    while let Some(control) = unsafe { part.as_ref() } {
        if control.cmsg_len > end - part.addr() {
            // It says that it is longer than the buffer: the kernel sends nothing (`CMSG_OK` of linux/socket.h).
            break;
        }
        if control.cmsg_level == libc::SOL_SOCKET && control.cmsg_type == libc::SCM_RIGHTS {
            // SAFETY: `part` is a control message inside the buffer.
            let data = unsafe { libc::CMSG_DATA(part) }.cast::<i32>();
            // SAFETY: takes a number.
            let header_bytes = unsafe { libc::CMSG_LEN(0) } as usize;
            let count = control.cmsg_len.saturating_sub(header_bytes) / size_of::<i32>();
            for index in 0..count {
                // SAFETY: within the message's data.
                let at = unsafe { data.add(index) };
                // SAFETY: readable, maybe unaligned.
                let fd = unsafe { at.read_unaligned() };
                table::pass_unconnected(fd);
                allowed &= settle(fd, Reason::PassedToProcess);
            }
        }
        // SAFETY: both are valid for this message.
        part = unsafe { libc::CMSG_NXTHDR(message, part) };
    }
    allowed
}

/// Whether the kernel takes what is to go beside the bytes of `message`. On TCP none of it goes anywhere, but it is looked at
/// (`sock_cmsg_send` of net/core/sock.c), and is here by a message of no bytes.
///
/// # Safety
/// `message` is the application's.
#[cold]
pub(crate) unsafe fn check_control(fd: i32, message: &libc::msghdr) -> Result<(), Errno> {
    if tcp::is_over(fd) || !table::enter_adult(fd).is_some_and(|call| call.connection().is_active()) {
        return Ok(());
    }
    let empty = libc::msghdr {
        msg_name: std::ptr::null_mut(),
        msg_namelen: 0,
        msg_iov: std::ptr::null_mut(),
        msg_iovlen: 0,
        ..*message
    };
    // SAFETY: the caller's promise.
    match unsafe { tcp::sendmsg(fd, &raw const empty, OF_WAITING) } {
        Err(errno @ (Errno::INVAL | Errno::FAULT | Errno::NOBUFS | Errno::PERM)) => Err(errno),
        _ => Ok(()),
    }
}

/// Sends a file as sendfile(2) does, or lets `kernel` do it while the connection is on TCP.
///
/// # Safety
/// `offset` is null or the application's.
pub(crate) unsafe fn send_file(
    out: i32,
    input: i32,
    offset: *mut i64,
    count: usize,
    kernel: impl FnOnce() -> isize,
) -> isize {
    if input < 0 {
        return kernel();
    }
    let Some(call) = table::enter(out) else {
        // Into a pipe it sends from sockets, too, which have no offset (`do_sendfile` of fs/read_write.c).
        if offset.is_null() && out >= 0 && may_be_connection(input) && is_pipe(out) {
            if let Some(said) = settle_for_moving(input, out, count) {
                return errno::count(said);
            }
            let result = kernel();
            if result < 0 {
                kernel_said([input, out]);
            }
            return result;
        }
        return kernel();
    };
    if call.is_active(out) {
        let has_place = offset.is_null() || may_be_of_program(offset.addr(), size_of::<i64>());
        if count == 0 || count > isize::MAX as usize || !has_place {
            // It looks at the file alone, or refuses the call.
            return kernel();
        }
        // SAFETY: the caller's promise.
        let offset = unsafe { offset.as_mut() };
        let start = match offset.as_deref() {
            Some(&start) => start,
            None => match place_of(input) {
                Ok(start) => start,
                Err(errno) => return errno::count(Err(errno)),
            },
        };
        if start < 0 || start.checked_add(count as i64).is_none() {
            // As above.
            return kernel();
        }
        let result = copy_file(&call, out, input, (start, offset), count.min(MOST_BYTES));
        if result < count.min(MOST_BYTES).cast_signed() {
            errno::keep(|| epoll::stalled(call.slot));
        }
        return result;
    }
    call.connection().by_kernel(kernel, |result| note_sent(&call, result, count))
}

#[cold]
fn is_pipe(fd: i32) -> bool {
    // SAFETY: the application named this descriptor for the duration of its call.
    let file = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    let kind = |status: rustix::fs::Stat| FileType::from_raw_mode(status.st_mode);
    errno::keep(|| rustix::fs::fstat(file).map(kind) == Ok(FileType::Fifo))
}

/// Where a file is read next.
fn place_of(input: i32) -> Result<i64, Errno> {
    // SAFETY: the application named this descriptor for the duration of its call.
    let file = unsafe { rustix::fd::BorrowedFd::borrow_raw(input) };
    match rustix::fs::seek(file, SeekFrom::Current(0)) {
        Ok(place) => Ok(place.cast_signed()),
        Err(Errno::SPIPE) => Err(Errno::INVAL),
        Err(errno) => Err(errno),
    }
}

/// The kernel moves as much of a file at once: a pipe's default 16 pages (`PIPE_DEF_BUFFERS` of linux/pipe_fs_i.h).
const FILE_PIECE: usize = 16 * PAGE;
const PAGE: usize = 4096;

/// Moves bytes from a file, from `start` on, to an upgraded connection through a buffer, and tells where that has ended. Of what can't be
/// read at a given place, as a pipe or a socket, nothing is read: what does not fit could not be put back. The kernel refuses it, too
/// (`splice_direct_to_actor` of fs/splice.c).
fn copy_file(
    call: &table::Call,
    out: i32,
    input: i32,
    (start, offset): (i64, Option<&mut i64>),
    count: usize,
) -> isize {
    // SAFETY: the application named this descriptor for the duration of its call.
    let file = unsafe { rustix::fd::BorrowedFd::borrow_raw(input) };
    // Where the file is opened with `O_DIRECT`, its device reads into memory that begins as a page does, and in whole blocks: so no piece
    // but the last is of another size than the kernel's.
    let mut memory = vec![0u8; count.min(FILE_PIECE) + PAGE];
    let begins = memory.as_ptr().align_offset(PAGE).min(PAGE);
    let buffer = &mut memory[begins..begins + count.min(FILE_PIECE)];
    let mut total = 0;
    let failed = loop {
        let wanted = (count - total).min(buffer.len());
        if wanted == 0 {
            break None;
        }
        let got = match rustix::io::pread(file, &mut buffer[..wanted], (start + total as i64) as u64) {
            Ok(0) => break None,
            Ok(got) => got,
            // It has a place, and is not read from it: a folder, an eventfd.
            Err(Errno::ISDIR) => break Some(Errno::INVAL),
            Err(Errno::SPIPE) if offset.is_none() => break Some(Errno::INVAL),
            Err(errno) => break Some(errno),
        };
        let list = one(buffer.as_ptr(), got);
        let mut source = match Buffers::new(&list) {
            Ok(source) => source,
            Err(errno) => break Some(errno),
        };
        if total > 0 {
            source.note_some();
        }
        // libc's is no cancellation point.
        let sent = put_off(|| call.connection().send(out, &mut source, 0));
        match sent {
            Ok(sent) => total += sent,
            Err(errno) => {
                if errno == Errno::PIPE && total == 0 && !is_quiet(call, &source) {
                    raise_sigpipe();
                }
                break Some(errno);
            }
        }
        if sent.is_ok_and(|sent| sent < got) {
            break None;
        }
    };
    let end = start + total as i64;
    match offset {
        Some(offset) => *offset = end,
        None if total > 0 => drop(rustix::fs::seek(file, SeekFrom::Start(end as u64))),
        None => {}
    }
    match failed {
        Some(errno) if total == 0 => errno::count(Err(errno)),
        _ => total as isize,
    }
}

/// Has the kernel alone serve `fd`, because a call that only it can serve is about to be made. False if that can't be.
pub(crate) fn settle(fd: i32, reason: Reason) -> bool {
    settle_until(fd, reason, Instant::now() + PATIENCE)
}

/// As [`settle`]; waits for the peer until `deadline`.
pub(crate) fn settle_until(fd: i32, reason: Reason, deadline: Instant) -> bool {
    table::enter(fd).is_none_or(|call| call.connection().settle(fd, reason, deadline))
}

/// Whether `fd` may be a connection that we look after. What is not pays for this question alone.
pub(crate) fn may_be_connection(fd: i32) -> bool {
    table::may_be_connection(fd)
}
