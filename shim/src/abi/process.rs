//! fork, vfork, exec, posix_spawn, exit, and `syscall` itself.

use libc::{c_char, c_int, c_long, c_void, pid_t};
use thallus_transport::buffers::may_be_of_program;
use thallus_transport::reason::Reason;

use super::{descriptor, guard, memory, message, open, stream, wait};
use crate::errno;
use crate::ops::process;
use crate::real::{self, Start};

/// fork(2).
///
/// # Safety
/// As for fork(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> pid_t {
    // SAFETY: the program's own call.
    let result = unsafe { real::fork() };
    process::fork_returned(result);
    result
}

/// What pthread_atfork(3) calls, which each module has its own of (LSB, `__register_atfork`).
///
/// # Safety
/// As for pthread_atfork(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn __register_atfork(
    prepare: Handler,
    parent: Handler,
    child: Handler,
    module: *mut c_void,
) -> c_int {
    let handler = prepare.or(parent).or(child).map_or(std::ptr::null(), |handler| handler as *const ());
    process::registers_fork_handlers(handler, || {
        // SAFETY: the program's own arguments.
        unsafe { real::__register_atfork(prepare, parent, child, module) }
    })
}

/// A fork handler, or none.
type Handler = Option<extern "C" fn()>;

/// `_Fork(3)`: fork(2) without its handlers.
///
/// # Safety
/// As for `_Fork(3)`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> pid_t {
    process::before_unseen_child();
    // SAFETY: the program's own call.
    unsafe { real::_Fork() }
}

/// clone(2), as libc offers it: variadic in C, the last three arguments where named ones would arrive.
///
/// # Safety
/// As for clone(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    start: Start,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: usize,
    tls: usize,
    child: usize,
) -> c_int {
    process::before_unseen_child();
    // SAFETY: the program's own arguments.
    unsafe { real::clone(start, stack, flags, argument, parent, tls, child) }
}

/// vfork(2). The child runs on this very stack and returns from it first, so the return address is kept in a
/// register over the system call, as libc's own does.
///
/// # Safety
/// As for vfork(2).
#[unsafe(naked)]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vfork() -> pid_t {
    #[cfg(target_arch = "x86_64")]
    std::arch::naked_asm!(
        "sub rsp, 8",
        "call {before}",
        "add rsp, 8",
        "pop rdi",
        "mov eax, {number}",
        "syscall",
        "push rdi",
        "test eax, eax",
        "jz 2f",
        "mov edi, eax",
        "sub rsp, 8",
        "call {after}",
        "add rsp, 8",
        "2:",
        "ret",
        before = sym process::before_vfork,
        after = sym process::after_vfork,
        number = const libc::SYS_vfork,
    );
    // The kernel has no vfork there, but a clone that is one.
    #[cfg(target_arch = "aarch64")]
    std::arch::naked_asm!(
        "stp x29, x30, [sp, #-16]!",
        "bl {before}",
        "ldp x29, x30, [sp], #16",
        "mov x0, {flags}",
        "mov x1, xzr",
        "mov x2, xzr",
        "mov x3, xzr",
        "mov x4, xzr",
        "mov x8, {number}",
        "svc #0",
        "cbz x0, 2f",
        "stp x29, x30, [sp, #-16]!",
        "bl {after}",
        "ldp x29, x30, [sp], #16",
        "2:",
        "ret",
        before = sym process::before_vfork,
        after = sym process::after_vfork,
        flags = const libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
        number = const libc::SYS_clone,
    );
}

pub(super) type Strings = *const *const c_char;

macro_rules! executes {
    ($($name:ident($($arg:ident: $type:ty),*) $(unless $nothing:ident($path:ident))?;)*) => {$(
        /// The function of that name in exec(3).
        ///
        /// # Safety
        /// As for that function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($arg: $type),*) -> c_int {
            guard(|| {
                let fails = false $(|| process::$nothing($path))?;
                let before = (!fails).then(process::before_exec);
                // SAFETY: the program's own arguments.
                let failed = unsafe { real::$name($($arg),*) };
                if let Some(before) = before {
                    process::exec_failed(before);
                }
                failed
            })
        }
    )*};
}

executes! {
    execve(path: *const c_char, arguments: Strings, environment: Strings) unless is_nothing_at(path);
    execv(path: *const c_char, arguments: Strings) unless is_nothing_at(path);
    execvp(path: *const c_char, arguments: Strings);
    execvpe(path: *const c_char, arguments: Strings, environment: Strings);
    fexecve(fd: c_int, arguments: Strings, environment: Strings);
    execveat(fd: c_int, path: *const c_char, arguments: Strings, environment: Strings, flags: c_int);
}

macro_rules! spawns {
    ($($name:ident;)*) => {$(
        /// The function of that name in posix_spawn(3).
        ///
        /// # Safety
        /// As for that function.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name(
            pid: *mut pid_t,
            path: *const c_char,
            actions: *const c_void,
            attributes: *const c_void,
            arguments: *const *mut c_char,
            environment: *const *mut c_char,
        ) -> c_int {
            guard(|| {
                process::before_spawn();
                // SAFETY: the program's own arguments.
                unsafe { real::$name(pid, path, actions, attributes, arguments, environment) }
            })
        }
    )*};
}

spawns! {
    posix_spawn;
    posix_spawnp;
}

/// `posix_spawn_file_actions_adddup2(3)`: a connection that is handed on by it goes back to TCP.
///
/// # Safety
/// As for that function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn posix_spawn_file_actions_adddup2(
    actions: *mut c_void,
    fd: c_int,
    new: c_int,
) -> c_int {
    guard(|| {
        process::hands_on(fd);
        0
    });
    // SAFETY: the program's own arguments.
    unsafe { real::posix_spawn_file_actions_adddup2(actions, fd, new) }
}

/// system(3).
///
/// # Safety
/// As for system(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn system(command: *const c_char) -> c_int {
    guard(|| {
        process::before_shell();
        0
    });
    // SAFETY: the program's own argument.
    unsafe { real::system(command) }
}

/// popen(3).
///
/// # Safety
/// As for popen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn popen(command: *const c_char, mode: *const c_char) -> *mut libc::FILE {
    guard(|| {
        process::before_shell();
        0
    });
    // SAFETY: the program's own arguments.
    unsafe { real::popen(command, mode) }
}

/// `_exit(2)`.
#[unsafe(no_mangle)]
pub extern "C" fn _exit(status: c_int) -> ! {
    guard(|| {
        process::exiting();
        0
    });
    real::exit_now(status)
}

/// `_Exit(3)`.
#[unsafe(no_mangle)]
pub extern "C" fn _Exit(status: c_int) -> ! {
    _exit(status)
}

/// Operations of seccomp(2).
const SECCOMP_SET_MODE_STRICT: u32 = 0;
const SECCOMP_SET_MODE_FILTER: u32 = 1;

/// prctl(2), variadic in C: its arguments are where named ones would arrive.
///
/// # Safety
/// As for prctl(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(option: c_int, a: usize, b: usize, c: usize, d: usize) -> c_int {
    // SAFETY: the program's own arguments.
    let call = || unsafe { real::prctl(option, a, b, c, d) };
    let forbids = option == libc::PR_SET_SECCOMP && (a != libc::SECCOMP_MODE_FILTER as usize || is_filter(b));
    if forbids { guard(|| process::enter_sandbox(call)) } else { call() }
}

/// Whether the kernel may take what is at `address` for a filter. Libraries ask without one what it knows (`seccomp_api_get` of libseccomp).
fn is_filter(address: usize) -> bool {
    may_be_of_program(address, size_of::<libc::sock_fprog>())
}

/// unshare(2).
#[unsafe(no_mangle)]
pub extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: takes a number.
    let call = || unsafe { real::unshare(flags) };
    if flags & libc::CLONE_FILES != 0 { guard(|| process::part_descriptors(call)) } else { call() }
}

/// syscall(2): those that concern connections go where their libc functions go.
///
/// # Safety
/// As for the system call.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: usize,
    b: usize,
    c: usize,
    d: usize,
    e: usize,
    f: usize,
) -> c_long {
    fn pointer<T>(word: usize) -> *mut T {
        std::ptr::with_exposed_provenance_mut(word)
    }
    if real::is_beyond() {
        // SAFETY: the caller's promise.
        return unsafe { real::syscall(number, a, b, c, d, e, f) };
    }
    let fd = a as c_int;
    // SAFETY: the program's own arguments, by the kernel's conventions, which are the functions' own.
    unsafe {
        match number {
            libc::SYS_close => descriptor::close(fd).into(),
            libc::SYS_close_range => descriptor::close_range(a as u32, b as u32, c as c_int).into(),
            libc::SYS_dup => descriptor::dup(fd).into(),
            libc::SYS_dup3 => descriptor::dup3(fd, b as c_int, c as c_int).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_dup2 => descriptor::dup2(fd, b as c_int).into(),
            libc::SYS_read => stream::read(fd, pointer(b), c) as c_long,
            libc::SYS_write => stream::write(fd, pointer::<c_void>(b), c) as c_long,
            libc::SYS_readv => stream::readv(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_writev => stream::writev(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_recvfrom => {
                stream::recvfrom(fd, pointer(b), c, d as c_int, pointer(e), pointer(f)) as c_long
            }
            libc::SYS_sendto => {
                stream::sendto(fd, pointer::<c_void>(b), c, d as c_int, pointer(e), f as u32) as c_long
            }
            libc::SYS_recvmsg => message::recvmsg(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_sendmsg => message::sendmsg(fd, pointer(b), c as c_int) as c_long,
            libc::SYS_recvmmsg => message::recvmmsg(fd, pointer(b), c as u32, d as c_int, pointer(e)).into(),
            libc::SYS_sendmmsg => message::sendmmsg(fd, pointer(b), c as u32, d as c_int).into(),
            // The higher half of an offset is for machines of 32 bits.
            libc::SYS_preadv2 => {
                stream::preadv2(fd, pointer(b), c as c_int, d as libc::off_t, f as c_int) as c_long
            }
            libc::SYS_pwritev2 => {
                stream::pwritev2(fd, pointer(b), c as c_int, d as libc::off_t, f as c_int) as c_long
            }
            libc::SYS_sendfile => stream::sendfile(fd, b as c_int, pointer(c), d) as c_long,
            libc::SYS_splice => stream::splice(fd, pointer(b), c as c_int, pointer(d), e, f as u32) as c_long,
            libc::SYS_ioctl => descriptor::ioctl(fd, b as libc::c_ulong, c).into(),
            libc::SYS_fcntl => descriptor::fcntl(fd, b as c_int, c).into(),
            libc::SYS_setsockopt => {
                descriptor::setsockopt(fd, b as c_int, c as c_int, pointer::<c_void>(d), e as u32).into()
            }
            libc::SYS_getsockopt => {
                descriptor::getsockopt(fd, b as c_int, c as c_int, pointer(d), pointer(e)).into()
            }
            libc::SYS_shutdown => descriptor::shutdown(fd, b as c_int).into(),
            libc::SYS_connect => open::connect(fd, pointer(b), c as u32).into(),
            libc::SYS_accept => open::accept(fd, pointer(b), pointer(c)).into(),
            libc::SYS_accept4 => open::accept4(fd, pointer(b), pointer(c), d as c_int).into(),
            libc::SYS_listen => open::listen(fd, b as c_int).into(),
            libc::SYS_epoll_ctl => wait::epoll_ctl(fd, b as c_int, c as c_int, pointer(d)).into(),
            libc::SYS_epoll_pwait => {
                wait::epoll_pwait(fd, pointer(b), c as c_int, d as c_int, pointer(e)).into()
            }
            libc::SYS_epoll_pwait2 => {
                wait::epoll_pwait2(fd, pointer(b), c as c_int, pointer(d), pointer(e)).into()
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_epoll_wait => wait::epoll_wait(fd, pointer(b), c as c_int, d as c_int).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_poll => wait::poll(pointer(a), b as libc::nfds_t, c as c_int).into(),
            #[cfg(target_arch = "x86_64")]
            libc::SYS_select => wait::select(fd, pointer(b), pointer(c), pointer(d), pointer(e)).into(),
            libc::SYS_pselect6 => {
                let kernel = || real::syscall(number, a, b, c, d, e, f);
                wait::pselect6(fd, [b, c, d].map(pointer), pointer(e), pointer(f), kernel)
            }
            libc::SYS_ppoll => {
                let kernel = || real::syscall(number, a, b, c, d, e, f);
                wait::ppoll_itself(pointer(a), b as libc::nfds_t, pointer(c), pointer(d), kernel)
            }
            libc::SYS_execve => execve(pointer(a), pointer(b), pointer(c)).into(),
            libc::SYS_execveat => execveat(fd, pointer(b), pointer(c), pointer(d), e as c_int).into(),
            libc::SYS_io_uring_setup if process::denies_io_uring() => {
                errno::set(rustix::io::Errno::PERM);
                -1
            }
            libc::SYS_io_uring_setup => {
                let ring = real::syscall(number, a, b, c, d, e, f);
                if ring >= 0 {
                    // Nothing has been asked of it yet.
                    process::leaves_sight(Reason::IoUring);
                }
                ring
            }
            libc::SYS_seccomp
                if a as u32 == SECCOMP_SET_MODE_STRICT
                    || (a as u32 == SECCOMP_SET_MODE_FILTER && is_filter(c)) =>
            {
                process::enter_sandbox(|| real::syscall(number, a, b, c, d, e, f))
            }
            libc::SYS_clone | libc::SYS_clone3 => {
                process::before_unseen_child();
                real::syscall(number, a, b, c, d, e, f)
            }
            #[cfg(target_arch = "x86_64")]
            libc::SYS_fork | libc::SYS_vfork => {
                process::before_unseen_child();
                real::syscall(number, a, b, c, d, e, f)
            }
            libc::SYS_unshare => unshare(fd).into(),
            libc::SYS_mlockall => memory::mlockall(fd).into(),
            libc::SYS_exit_group => _exit(fd),
            _ => real::syscall(number, a, b, c, d, e, f),
        }
    }
}
