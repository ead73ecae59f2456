//! libc's own functions behind the hooks, found by `dlsym(RTLD_NEXT)` at their first use, or before the first module is loaded.

use std::cell::Cell;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};

use libc::{
    c_char, c_int, c_long, c_uint, c_void, epoll_event, fd_set, iovec, mmsghdr, msghdr, nfds_t, off_t,
    off64_t, pid_t, pollfd, sigset_t, size_t, sockaddr, socklen_t, ssize_t, timespec, timeval,
};

/// What clone(2) starts.
pub(crate) type Start = Option<unsafe extern "C" fn(*mut c_void) -> c_int>;

/// Finds `name` in the libraries behind this one; null if there is none.
pub(crate) fn find(name: &CStr) -> *mut c_void {
    // SAFETY: a valid handle and a terminated name.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// Looks for what `slot` stands for, unless that is known: what [`find`] finds may be the hook by then ([`crate::symbols`]).
#[cold]
fn resolve(slot: &AtomicPtr<c_void>, unknown: *mut c_void, name: &CStr) -> *mut c_void {
    let found = crate::errno::keep(|| find(name));
    settle(slot, unknown, found)
}

/// As [`resolve`], by way of `through` where the function is not libc's own but another library's, which `next` then leads to.
#[cold]
fn resolve_through(
    slot: &AtomicPtr<c_void>,
    unknown: *mut c_void,
    name: &CStr,
    next: &AtomicPtr<c_void>,
    through: *mut c_void,
) -> *mut c_void {
    let found = crate::errno::keep(|| find(name));
    if found.is_null() || crate::symbols::is_libcs(found) {
        return settle(slot, unknown, found);
    }
    next.store(found, Ordering::Release);
    ANY_BEYOND.store(true, Ordering::Release);
    settle(slot, unknown, through)
}

/// Fills `slot` with what was found, unless nothing was or another thread was faster; what is there then.
fn settle(slot: &AtomicPtr<c_void>, unknown: *mut c_void, found: *mut c_void) -> *mut c_void {
    if found.is_null() {
        return found;
    }
    match slot.compare_exchange(unknown, found, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => found,
        Err(known) => known,
    }
}

/// Whether there is such a function at all.
static ANY_BEYOND: AtomicBool = AtomicBool::new(false);

thread_local! {
    /// How many calls of functions of other libraries behind this one the thread is in.
    static BEYOND: Cell<u32> = const { Cell::new(0) };
}

/// A call of a function of another library behind this one.
struct Beyond;

impl Beyond {
    fn begin() -> Self {
        BEYOND.set(BEYOND.get() + 1);
        Self
    }
}

impl Drop for Beyond {
    fn drop(&mut self) {
        BEYOND.set(BEYOND.get() - 1);
    }
}

/// Whether the thread is in a function of another library behind this one, whose calls of `syscall` are then for the kernel: they make
/// the call that it was asked for, which would otherwise lead to the hook and from there to that function again, without end.
pub(crate) fn is_beyond() -> bool {
    ANY_BEYOND.load(Ordering::Acquire) && BEYOND.get() != 0
}

/// What a function that this libc lacks does: fails with `ENOSYS`.
fn missing() {
    crate::errno::set(rustix::io::Errno::NOSYS);
}

macro_rules! originals {
    ($($name:ident($($arg:ident: $type:ty),*) -> $result:ty, else $absent:expr;)*) => {
        $(
            /// libc's own.
            ///
            /// # Safety
            /// As for the function of that name.
            #[allow(non_snake_case, reason = "libc's name")]
            #[inline]
            pub(crate) unsafe fn $name($($arg: $type),*) -> $result {
                let known = slot::$name.load(Ordering::Acquire);
                // SAFETY: the symbol of this name has this type in every libc that we run with.
                let function: unsafe extern "C-unwind" fn($($type),*) -> $result = unsafe { std::mem::transmute(known) };
                // SAFETY: the caller's promise.
                unsafe { function($($arg),*) }
            }
        )*

        /// What is called until the original is known: so that whoever knows it only jumps.
        #[allow(non_snake_case, reason = "libc's names")]
        mod unknown {
            use super::*;
            $(
                /// # Safety
                /// As for the function of that name.
                #[cold]
                pub(super) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
                    if resolve_original::$name().is_null() {
                        missing();
                        return $absent;
                    }
                    // SAFETY: the caller's promise.
                    unsafe { super::$name($($arg),*) }
                }
            )*
        }

        /// What is called where the original is another library's.
        #[allow(non_snake_case, reason = "libc's names")]
        mod through {
            use super::*;
            $(
                /// # Safety
                /// As for the function of that name.
                pub(super) unsafe extern "C-unwind" fn $name($($arg: $type),*) -> $result {
                    let _beyond = Beyond::begin();
                    let next = next::$name.load(Ordering::Acquire);
                    // SAFETY: as for libc's.
                    let function: unsafe extern "C-unwind" fn($($type),*) -> $result = unsafe { std::mem::transmute(next) };
                    // SAFETY: the caller's promise.
                    unsafe { function($($arg),*) }
                }
            )*
        }

        /// Where those are.
        #[allow(non_upper_case_globals, reason = "libc's names")]
        mod next {
            use super::*;
            $(pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());)*
        }

        #[allow(non_snake_case, reason = "libc's names")]
        mod resolve_original {
            use super::*;
            $(
                #[cold]
                pub(super) fn $name() -> *mut c_void {
                    let through = through::$name as unsafe extern "C-unwind" fn($($type),*) -> $result as *mut c_void;
                    resolve_through(&slot::$name, address::$name(), name::$name, &next::$name, through)
                }
            )*
        }

        /// Where the originals are.
        #[allow(non_upper_case_globals, reason = "libc's names")]
        mod slot {
            use super::*;
            $(pub(super) static $name: AtomicPtr<c_void> = AtomicPtr::new(address::$name());)*
        }

        /// Of what is called until then.
        #[allow(non_snake_case, reason = "libc's names")]
        mod address {
            use super::*;
            $(
                pub(super) const fn $name() -> *mut c_void {
                    unknown::$name as unsafe extern "C-unwind" fn($($type),*) -> $result as *mut c_void
                }
            )*
        }

        #[allow(non_upper_case_globals, reason = "libc's names")]
        mod name {
            use std::ffi::CStr;
            $(
                pub(super) const $name: &CStr =
                    match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                        Ok(name) => name,
                        Err(_) => panic!(),
                    };
            )*
        }

        /// Looks for all of these that are not known yet.
        #[cold]
        fn resolve_originals() {
            $(
                if slot::$name.load(Ordering::Acquire) == address::$name() {
                    resolve_original::$name();
                }
            )*
        }
    };
}

originals! {
    connect(fd: c_int, address: *const sockaddr, length: socklen_t) -> c_int, else -1;
    accept(fd: c_int, address: *mut sockaddr, length: *mut socklen_t) -> c_int, else -1;
    accept4(fd: c_int, address: *mut sockaddr, length: *mut socklen_t, flags: c_int) -> c_int, else -1;
    listen(fd: c_int, backlog: c_int) -> c_int, else -1;
    shutdown(fd: c_int, how: c_int) -> c_int, else -1;
    setsockopt(fd: c_int, level: c_int, name: c_int, value: *const c_void, length: socklen_t) -> c_int, else -1;
    getsockopt(fd: c_int, level: c_int, name: c_int, value: *mut c_void, length: *mut socklen_t) -> c_int, else -1;
    close(fd: c_int) -> c_int, else -1;
    close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int, else -1;
    dup(fd: c_int) -> c_int, else -1;
    dup2(old: c_int, new: c_int) -> c_int, else -1;
    dup3(old: c_int, new: c_int, flags: c_int) -> c_int, else -1;
    fcntl(fd: c_int, command: c_int, argument: usize) -> c_int, else -1;
    fcntl64(fd: c_int, command: c_int, argument: usize) -> c_int, else -1;
    ioctl(fd: c_int, request: libc::c_ulong, argument: usize) -> c_int, else -1;
    read(fd: c_int, buffer: *mut c_void, count: size_t) -> ssize_t, else -1;
    readv(fd: c_int, list: *const iovec, count: c_int) -> ssize_t, else -1;
    recv(fd: c_int, buffer: *mut c_void, count: size_t, flags: c_int) -> ssize_t, else -1;
    recvfrom(fd: c_int, buffer: *mut c_void, count: size_t, flags: c_int, address: *mut sockaddr, length: *mut socklen_t) -> ssize_t, else -1;
    recvmsg(fd: c_int, message: *mut msghdr, flags: c_int) -> ssize_t, else -1;
    recvmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int, timeout: *mut timespec) -> c_int, else -1;
    write(fd: c_int, buffer: *const c_void, count: size_t) -> ssize_t, else -1;
    writev(fd: c_int, list: *const iovec, count: c_int) -> ssize_t, else -1;
    send(fd: c_int, buffer: *const c_void, count: size_t, flags: c_int) -> ssize_t, else -1;
    sendto(fd: c_int, buffer: *const c_void, count: size_t, flags: c_int, address: *const sockaddr, length: socklen_t) -> ssize_t, else -1;
    sendmsg(fd: c_int, message: *const msghdr, flags: c_int) -> ssize_t, else -1;
    sendmmsg(fd: c_int, messages: *mut mmsghdr, count: c_uint, flags: c_int) -> c_int, else -1;
    preadv2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t, else -1;
    pwritev2(fd: c_int, list: *const iovec, count: c_int, offset: off_t, flags: c_int) -> ssize_t, else -1;
    preadv64v2(fd: c_int, list: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t, else -1;
    pwritev64v2(fd: c_int, list: *const iovec, count: c_int, offset: off64_t, flags: c_int) -> ssize_t, else -1;
    sendfile(out: c_int, input: c_int, offset: *mut off_t, count: size_t) -> ssize_t, else -1;
    sendfile64(out: c_int, input: c_int, offset: *mut off64_t, count: size_t) -> ssize_t, else -1;
    splice(input: c_int, offset_in: *mut off64_t, out: c_int, offset_out: *mut off64_t, count: size_t, flags: c_uint) -> ssize_t, else -1;
    poll(fds: *mut pollfd, count: nfds_t, timeout: c_int) -> c_int, else -1;
    ppoll(fds: *mut pollfd, count: nfds_t, timeout: *const timespec, mask: *const sigset_t) -> c_int, else -1;
    select(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *mut timeval) -> c_int, else -1;
    pselect(count: c_int, read: *mut fd_set, write: *mut fd_set, except: *mut fd_set, timeout: *const timespec, mask: *const sigset_t) -> c_int, else -1;
    epoll_create(size: c_int) -> c_int, else -1;
    epoll_create1(flags: c_int) -> c_int, else -1;
    epoll_ctl(set: c_int, operation: c_int, fd: c_int, event: *mut epoll_event) -> c_int, else -1;
    epoll_wait(set: c_int, events: *mut epoll_event, most: c_int, timeout: c_int) -> c_int, else -1;
    epoll_pwait(set: c_int, events: *mut epoll_event, most: c_int, timeout: c_int, mask: *const sigset_t) -> c_int, else -1;
    epoll_pwait2(set: c_int, events: *mut epoll_event, most: c_int, timeout: *const timespec, mask: *const sigset_t) -> c_int, else -1;
    socket(domain: c_int, kind: c_int, protocol: c_int) -> c_int, else -1;
    fork() -> pid_t, else -1;
    __register_atfork(prepare: Option<extern "C" fn()>, parent: Option<extern "C" fn()>, child: Option<extern "C" fn()>, module: *mut c_void) -> c_int, else libc::ENOMEM;
    _Fork() -> pid_t, else -1;
    clone(start: Start, stack: *mut c_void, flags: c_int, argument: *mut c_void, parent: usize, tls: usize, child: usize) -> c_int, else -1;
    fdopen(fd: c_int, mode: *const c_char) -> *mut libc::FILE, else std::ptr::null_mut();
    execve(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int, else -1;
    execv(path: *const c_char, arguments: *const *const c_char) -> c_int, else -1;
    execvp(path: *const c_char, arguments: *const *const c_char) -> c_int, else -1;
    execvpe(path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char) -> c_int, else -1;
    fexecve(fd: c_int, arguments: *const *const c_char, environment: *const *const c_char) -> c_int, else -1;
    execveat(fd: c_int, path: *const c_char, arguments: *const *const c_char, environment: *const *const c_char, flags: c_int) -> c_int, else -1;
    posix_spawn(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int, else libc::ENOSYS;
    posix_spawnp(pid: *mut pid_t, path: *const c_char, actions: *const c_void, attributes: *const c_void, arguments: *const *mut c_char, environment: *const *mut c_char) -> c_int, else libc::ENOSYS;
    posix_spawn_file_actions_adddup2(actions: *mut c_void, fd: c_int, new: c_int) -> c_int, else libc::ENOSYS;
    system(command: *const c_char) -> c_int, else -1;
    popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE, else std::ptr::null_mut();
    vdprintf(fd: c_int, format: *const c_char, arguments: *mut c_void) -> c_int, else -1;
    __vdprintf_chk(fd: c_int, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int, else -1;
    vasprintf(text: *mut *mut c_char, format: *const c_char, arguments: *mut c_void) -> c_int, else -1;
    __vasprintf_chk(text: *mut *mut c_char, flag: c_int, format: *const c_char, arguments: *mut c_void) -> c_int, else -1;
    mlockall(flags: c_int) -> c_int, else -1;
    prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int, else -1;
    unshare(flags: c_int) -> c_int, else -1;
    syscall(number: c_long, a: usize, b: usize, c: usize, d: usize, e: usize, f: usize) -> c_long, else -1;
}

/// libc's note that the process has but one thread (sys/single_threaded.h); always 0 before glibc 2.32.
pub(crate) fn single_threaded() -> *const u8 {
    static SLOT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
    /// Stands for what libc lacks.
    static ABSENT: u8 = 0;
    let found = SLOT.load(Ordering::Relaxed);
    if !found.is_null() {
        return found.cast();
    }
    let found = crate::errno::keep(|| find(c"__libc_single_threaded"));
    let found = if found.is_null() { (&raw const ABSENT).cast_mut().cast() } else { found };
    SLOT.store(found, Ordering::Relaxed);
    found.cast()
}

/// libc's functions that only their callers may call, because they ask who that is.
macro_rules! addresses {
    ($($function:ident: $name:literal;)*) => {$(
        /// Where libc's own is.
        pub(crate) fn $function() -> *mut c_void {
            static SLOT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let known = SLOT.load(Ordering::Acquire);
            if !known.is_null() {
                return known;
            }
            match resolve(&SLOT, std::ptr::null_mut(), $name) {
                found if found.is_null() => no_module as extern "C" fn() -> *mut c_void as *mut c_void,
                found => found,
            }
        }
    )*};
}

addresses! {
    dlopen: c"dlopen";
    dlmopen: c"dlmopen";
}

/// Looks for everything that is not known yet, as long as what is found is libc's. And as long as the loader's lock can be had: it is held
/// while a module's constructors run, and these may wait for threads that use the hooks (LTTng's do).
pub(crate) fn resolve_all() {
    static DONE: AtomicBool = AtomicBool::new(false);
    if DONE.load(Ordering::Acquire) {
        return;
    }
    resolve_originals();
    single_threaded();
    // rustix finds the kernel's clock by a symbol of libc's.
    let _ = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    dlopen();
    dlmopen();
    DONE.store(true, Ordering::Release);
}

/// Stands for a function that loads modules, in a libc without one.
extern "C" fn no_module() -> *mut c_void {
    missing();
    std::ptr::null_mut()
}

/// Ends the process at once, as libc's `_exit` does.
pub(crate) fn exit_now(status: c_int) -> ! {
    loop {
        // SAFETY: takes a number and does not return.
        let _ = unsafe { syscalls::syscall!(syscalls::Sysno::exit_group, status) };
    }
}
