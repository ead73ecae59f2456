//! Processes multiply and change: fork, vfork, exec, exit.
//!
//! A fork shares its parent's connections: both hold each block from before the fork until they close it. A vfork
//! child runs in its parent's memory, so hooks must change nothing there ([`is_stranger`]).

use std::cell::{Cell, UnsafeCell};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use libc::c_char;
use syscalls::{Sysno, syscall};
use thallus_transport::arena::Block;
use thallus_transport::connection::Connection;
use thallus_transport::reason::Reason;
use thallus_transport::settings::{IoUring, settings};
use thallus_transport::settle::{PATIENCE, SHORT_PATIENCE};
use thallus_transport::uninterrupted::Uninterrupted;
use thallus_transport::{alarm, chime, process, verbs};

use crate::ops::{epoll, stream};
use crate::table::{self, Quiet};
use crate::{config, errno, real, stats, symbols};

/// The table's locks, from before a fork until after it, on either side.
struct Held(UnsafeCell<Option<Quiet>>);

// SAFETY: used by the forking thread alone, which holds the very locks in it.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

/// The process that this memory belongs to, once there are connections.
static HOME: AtomicU32 = AtomicU32::new(0);

/// Whether this is a child whose birth no handler saw (vfork(2), clone(2), `_Fork`): hooks pass through, and change
/// nothing in memory that may still be its parent's.
pub(crate) fn is_stranger() -> bool {
    if in_vfork_child() {
        return true;
    }
    if !UNSEEN_CHILDREN.load(Ordering::Relaxed) {
        return false;
    }
    let home = HOME.load(Ordering::Relaxed);
    home != 0 && rustix::process::getpid().as_raw_nonzero().get().cast_unsigned() != home
}

/// Whether there may be children whose birth no handler saw. Until then no call asks which process this is.
static UNSEEN_CHILDREN: AtomicBool = AtomicBool::new(false);

/// The program is about to make a child in a way that runs no fork handlers.
pub(crate) fn before_unseen_child() {
    if config::enabled() {
        errno::keep(|| {
            UNSEEN_CHILDREN.store(true, Ordering::SeqCst);
            process::forking_unseen();
            table::grow_all_up();
        });
    }
}

/// To be called when this library is loaded.
pub(crate) fn loaded() {
    register_fork_handlers();
}

/// Somebody registers fork handlers by `register`, `handler` among them. Ours are registered first: then others run before ours when
/// the program forks, and after ours in the parent and the child, and so never wait for a lock while ours hold the table's. Libc's
/// malloc is locked when all have run. Another one locks itself by a handler, which has to run after ours, for ours allocate: they are
/// registered behind it, once more if need be.
pub(crate) fn registers_fork_handlers(handler: *const (), register: impl FnOnce() -> i32) -> i32 {
    let is_mallocs = symbols::share_an_object(handler, libc::malloc as *const ());
    if !is_mallocs {
        register_fork_handlers();
    }
    let result = register();
    if is_mallocs {
        register_once_more();
    }
    result
}

fn register_fork_handlers() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if !DONE.swap(true, Ordering::SeqCst) {
        // A malloc that is not libc's may register its handlers by the time that it is used first.
        drop(std::hint::black_box(Box::new(0_u8)));
        register_once_more();
    }
}

fn register_once_more() {
    // SAFETY: the handlers live as long as this library, which is never unloaded.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(in_parent), Some(in_child)) };
}

thread_local! {
    /// How many of the fork handlers' registrations this thread's fork has come by.
    static PREPARED: Cell<u32> = const { Cell::new(0) };
}

/// From the first connection on forks have to be known.
pub(crate) fn watch_forks() {
    if !WATCHING.load(Ordering::Acquire) {
        begin_to_watch();
    }
}

/// Whether the fork handlers have something to do.
static WATCHING: AtomicBool = AtomicBool::new(false);

/// Nobody waits for the thread that does it: it may be the one that a signal handler has interrupted, or that a fork has
/// left behind in the parent.
#[cold]
fn begin_to_watch() {
    /// The process in which a thread is at it.
    static BY: AtomicU32 = AtomicU32::new(0);
    let _uninterrupted = Uninterrupted::begin();
    let home = rustix::process::getpid().as_raw_nonzero().get().cast_unsigned();
    let before = BY.load(Ordering::SeqCst);
    if before == home || BY.compare_exchange(before, home, Ordering::SeqCst, Ordering::SeqCst).is_err() {
        return;
    }
    // Known since before some fork, perhaps.
    process::forked();
    HOME.store(home, Ordering::SeqCst);
    WATCHING.store(true, Ordering::Release);
    table::prepare();
}

extern "C" fn before_fork() {
    // The first of them acts, and the last after the fork.
    if PREPARED.replace(PREPARED.get() + 1) != 0 {
        return;
    }
    table::share_unconnected();
    if WATCHING.load(Ordering::Acquire) {
        before_shared();
    }
    // Also before the first connection: epoll sets and listeners have locks.
    let mut quiet = table::quiesce();
    if let Some(quiet) = &mut quiet {
        quiet.for_each(|_, connection| {
            connection.block.hold_for_unborn();
        });
    }
    // SAFETY: `quiet` holds the locks that exclude other forking threads.
    unsafe { *HELD.0.get() = quiet };
}

/// There are connections that a child will have, too.
fn before_shared() {
    // Else each child looks for what it calls itself, by many page faults, and its siblings as well.
    real::resolve_all();
    if config::may_have_peers() && config::has_peers() {
        let deadline = Instant::now() + SHORT_PATIENCE;
        // The child could not use this process's queue pairs.
        errno::keep(|| {
            process::forking();
            table::for_each(|slot, connection, _| {
                if let Some(fd) = table::descriptor_of(slot) {
                    connection.leave_fabric(fd, deadline);
                }
            });
            verbs::discard_idle();
        });
    }
}

/// Whether more of the registrations follow, after a fork.
fn is_followed() -> bool {
    PREPARED.set(PREPARED.get().saturating_sub(1));
    PREPARED.get() != 0
}

extern "C" fn in_parent() {
    if is_followed() {
        return;
    }
    if WATCHING.load(Ordering::Acquire) {
        process::forking();
    }
    // SAFETY: this thread put it there.
    drop(unsafe { (*HELD.0.get()).take() });
}

extern "C" fn in_child() {
    if is_followed() {
        return;
    }
    process::forked();
    if WATCHING.load(Ordering::Acquire) {
        HOME.store(process::id(), Ordering::SeqCst);
    }
    // SAFETY: this thread put it there, in the parent.
    let quiet = unsafe { (*HELD.0.get()).take() };
    if let Some(mut quiet) = quiet {
        quiet.only_one_thread_left();
        quiet.for_each(|_, connection| {
            connection.block.born(process::id());
            connection.forked();
        });
        if let Some(epoll) = &mut quiet.epoll {
            epoll.forked(quiet.alone);
        }
    }
    chime::forked();
    alarm::forked();
    stats::forked();
    WRITTEN.store(false, Ordering::Relaxed);
    IS_TIDY.store(false, Ordering::Relaxed);
}

/// fork(2) returned `result`.
pub(crate) fn fork_returned(result: i32) {
    if result < 0 {
        errno::keep(|| table::for_each(|_, connection, _| connection.block.stillborn()));
    }
}

static VFORKS: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static IN_VFORK: Cell<bool> = const { Cell::new(false) };
}

/// Whether this is a vfork child, running in its parent's memory while the parent's thread waits.
fn in_vfork_child() -> bool {
    VFORKS.load(Ordering::Relaxed) != 0 && IN_VFORK.get()
}

/// The calling thread is about to vfork: until it goes on, its memory is the child's.
pub(crate) extern "C" fn before_vfork() {
    VFORKS.fetch_add(1, Ordering::SeqCst);
    IN_VFORK.set(true);
    process::renew_thread();
}

/// The thread goes on. `result` is the raw system call's.
pub(crate) extern "C" fn after_vfork(result: i32) -> i32 {
    IN_VFORK.set(false);
    process::renew_thread();
    VFORKS.fetch_sub(1, Ordering::SeqCst);
    if result < 0 {
        errno::set(rustix::io::Errno::from_raw_os_error(-result));
        return -1;
    }
    result
}

/// The descriptors that programs use that know of no others.
const STANDARD: std::ops::RangeInclusive<i32> = 0..=libc::STDERR_FILENO;

/// A program is about to be started beside this one: what it inherits, no hook may see. A connection that has left TCP comes
/// back if it is one of the standard descriptors, or meant to be inherited. Those that are inherited by chance stay.
pub(crate) fn before_spawn() {
    errno::keep(|| settle_inherited(|fd, connection| STANDARD.contains(&fd) || connection.is_bequeathed()));
}

/// Settles those connections that a program inherits that is about to start, and that it is to use, as `uses` tells.
fn settle_inherited(uses: impl Fn(i32, &Connection) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    for fd in table::descriptors() {
        if closes_on_exec(fd) {
            continue;
        }
        let Some(call) = table::enter(fd) else { continue };
        let connection = call.connection();
        if uses(fd, connection) {
            connection.settle(fd, Reason::InheritedByExec, deadline);
        } else {
            connection.pin_inherited(fd, Reason::InheritedByExec, deadline);
        }
    }
}

/// libc is about to start a shell beside this program, which knows of the standard descriptors, and of what it is told.
pub(crate) fn before_shell() {
    let deadline = Instant::now() + PATIENCE;
    let is_bequeathed =
        |fd: i32| table::enter_adult(fd).is_some_and(|call| call.connection().is_bequeathed());
    errno::keep(|| {
        for fd in table::descriptors() {
            if (STANDARD.contains(&fd) || is_bequeathed(fd)) && !closes_on_exec(fd) {
                stream::settle_until(fd, Reason::InheritedByExec, deadline);
            }
        }
    });
}

/// The program says that one it is going to start is to have `fd`.
pub(crate) fn hands_on(fd: i32) {
    errno::keep(|| stream::settle(fd, Reason::InheritedByExec));
}

/// `fd` is to stay open when a program is started, as the original `call` tells the kernel.
pub(crate) fn bequeathed(fd: i32, call: impl FnOnce() -> i32) -> i32 {
    if table::is_borrowed() {
        hands_on(fd);
        return call();
    }
    let result = call();
    if result == 0
        && let Some(entered) = table::enter(fd)
    {
        entered.connection().bequeath();
    }
    result
}

/// This process has given something of this library's the further descriptor `fd`.
pub(crate) fn copied(fd: i32) {
    if let Some(entered) = table::enter_adult(fd)
        && !entered.connection().block.held_only_by(process::id())
    {
        entered.connection().copied_by(process::id());
    }
}

/// Whether this process has closed a connection or a listener. What it has open when it becomes another program, it has not
/// just forgotten.
static IS_TIDY: AtomicBool = AtomicBool::new(false);

/// This process closes a connection or a listener.
pub(crate) fn closes() {
    IS_TIDY.store(true, Ordering::Relaxed);
}

/// Whether there is certainly nothing at `path`, which is the program's: to be asked before anything is done for what is there. Where a sandbox
/// forbids the question, or the program may not be executed, exec itself tells.
pub(crate) fn is_nothing_at(path: *const c_char) -> bool {
    // SAFETY: the kernel reads the path, and says so if it can't.
    let found = unsafe { syscall!(Sysno::faccessat, libc::AT_FDCWD, path, libc::F_OK) };
    matches!(found, Err(syscalls::Errno::ENOENT | syscalls::Errno::ENOTDIR))
}

/// What was done for a program that was about to replace this one.
#[derive(Debug, Default)]
pub(crate) struct Preparations {
    let_go: Vec<&'static Block>,
    /// The statistics.
    written: Option<PathBuf>,
}

/// A program is about to replace this one. A connection can be meant for it alone if nobody else has it, or if this process
/// has closed others, which was forked with them. Gives back what [`exec_failed`] takes.
pub(crate) fn before_exec() -> Preparations {
    // A vfork child's connections are its parent's.
    let is_stranger = is_stranger();
    let id = process::id();
    let is_tidy = IS_TIDY.load(Ordering::Relaxed);
    let is_heir = |connection: &Connection| {
        let inherits = is_tidy || connection.is_bequeathed_by(id) || connection.block.held_only_by(id);
        connection.is_bequeathed() || !is_stranger && inherits
    };
    errno::keep(|| settle_inherited(|fd, connection| STANDARD.contains(&fd) || is_heir(connection)));
    if is_stranger {
        return Preparations::default();
    }
    settle_fabrics(false);
    errno::keep(|| {
        let written = if stats::has_connections() { stats::write(false) } else { None };
        Preparations { let_go: let_go_of_those_that_close(), written }
    })
}

/// Lets go of connections that others have, too, and whose descriptors here are all close-on-exec: or they would count as
/// shared as long as the program runs. This process's own are the kernel's to close.
fn let_go_of_those_that_close() -> Vec<&'static Block> {
    let inherited: Vec<_> = table::descriptors()
        .filter(|&fd| !closes_on_exec(fd))
        .filter_map(|fd| Some(std::ptr::from_ref(table::enter_adult(fd)?.slot)))
        .collect();
    let mut let_go = Vec::new();
    table::for_each(|slot, connection, _| {
        if !inherited.contains(&std::ptr::from_ref(slot)) && !connection.block.held_only_by(process::id()) {
            connection.block.release(process::id());
            let_go.push(connection.block);
        }
    });
    let_go
}

/// Also if it is closed: a vfork child closes what its parent, whose table this is, has open.
fn closes_on_exec(fd: i32) -> bool {
    // SAFETY: a number; the kernel says whether it is open.
    let borrowed = unsafe { rustix::fd::BorrowedFd::borrow_raw(fd) };
    rustix::io::fcntl_getfd(borrowed).map_or(true, |flags| flags.contains(rustix::io::FdFlags::CLOEXEC))
}

/// The program could not be started: this one goes on.
pub(crate) fn exec_failed(before: Preparations) {
    errno::keep(|| {
        for block in before.let_go {
            block.hold(process::id());
        }
        stats::take_back(before.written);
    });
}

static WRITTEN: AtomicBool = AtomicBool::new(false);

/// The process ends now, by `_exit` or at the end of `exit`.
pub(crate) fn exiting() {
    if !is_stranger() && !WRITTEN.swap(true, Ordering::SeqCst) {
        settle_fabrics(true);
        if !config::is_suspended() {
            errno::keep(|| {
                table::for_each(|slot, connection, _| {
                    connection.announce_exit(|| table::descriptor_of(slot))
                });
            });
        }
        stats::write(true);
    }
}

/// The kernel takes a queue pair from a process that ends, with all that it has not sent yet. `ends`: no other program follows.
fn settle_fabrics(ends: bool) {
    if config::may_have_peers() && config::has_peers() {
        errno::keep(|| {
            for waits in [false, true] {
                table::for_each(|slot, connection, _| {
                    if let Some(fd) = table::descriptor_of(slot) {
                        connection.settle_fabric(fd, ends, waits);
                    }
                });
            }
        });
    }
}

/// Whether the program is told that it may set no io_uring up, as in many containers: it falls back to calls that hooks see.
///
/// libuv sets one up for each loop, by which it changes several registrations of its epoll set at a time (`uv__epoll_ctl_prep` of
/// src/unix/linux.c, in Node from version 22 on), and takes `epoll_ctl` where that fails.
pub(crate) fn denies_io_uring() -> bool {
    let asks_for_it = || {
        let number = std::env::var("UV_USE_IO_URING").ok().and_then(|text| text.trim().parse::<i64>().ok());
        number.is_some_and(|number| number != 0)
    };
    config::enabled()
        && match settings().io_uring {
            IoUring::Allow => false,
            IoUring::Deny => true,
            IoUring::Auto => errno::keep(|| symbols::have_libuv() && !asks_for_it()),
        }
}

/// Why no connection of this process may leave TCP any more; 0 as long as they may.
static OUT_OF_SIGHT: AtomicU32 = AtomicU32::new(0);

/// From now on the program may do I/O that no hook sees: connections stay where the kernel sees all of their bytes.
pub(crate) fn leaves_sight(reason: Reason) {
    let first =
        || OUT_OF_SIGHT.compare_exchange(0, reason as u32, Ordering::SeqCst, Ordering::SeqCst).is_ok();
    if config::enabled() && first() {
        let deadline = Instant::now() + PATIENCE;
        errno::keep(|| {
            table::for_each(|slot, connection, _| {
                if let Some(fd) = table::descriptor_of(slot) {
                    connection.settle(fd, reason, deadline);
                }
            });
        });
    }
}

/// Whether that has happened, and why.
pub(crate) fn out_of_sight() -> Option<Reason> {
    match OUT_OF_SIGHT.load(Ordering::Relaxed) {
        0 => None,
        code => Reason::from_code(code),
    }
}

/// The program is about to forbid itself system calls, and this library's are not among those that it knows to need. `call` is the
/// original.
pub(crate) fn enter_sandbox<T: PartialOrd + From<i8>>(call: impl FnOnce() -> T) -> T {
    retire(Reason::Sandbox, call)
}

/// The calling thread is about to get descriptors of its own, by `call`: from then on a number means one thing in it, and another in the
/// process's other threads, if there are some.
pub(crate) fn part_descriptors(call: impl FnOnce() -> i32) -> i32 {
    // Each has a folder there, and the folder a link besides its own two.
    let is_alone = rustix::fs::stat("/proc/self/task").is_ok_and(|tasks| tasks.st_nlink <= 3);
    if is_alone { call() } else { retire(Reason::OwnDescriptors, call) }
}

/// Connections become the kernel's, and no more are looked after. `call` is what asks for that.
fn retire<T: PartialOrd + From<i8>>(reason: Reason, call: impl FnOnce() -> T) -> T {
    if !config::enabled() || is_stranger() {
        return call();
    }
    let deadline = Instant::now() + PATIENCE;
    let written = errno::keep(|| {
        for fd in table::descriptors() {
            if table::is_connection(fd) && stream::settle_until(fd, reason, deadline) {
                epoll::hand_over(fd);
                table::let_go(fd);
            }
        }
        if stats::has_connections() { stats::write(false) } else { None }
    });
    config::suspend(true);
    let result = call();
    if result < T::from(0) {
        config::suspend(false);
        errno::keep(|| stats::take_back(written));
    }
    result
}
