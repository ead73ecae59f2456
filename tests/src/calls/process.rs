//! Processes: forks, programs, and how they end.

use std::ffi::CString;
use std::os::raw::{c_int, c_void};
use std::os::unix::ffi::OsStrExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::{Errno, Fd, Outcome};

/// How a process ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself, with this status.
    Exit(c_int),
    /// By this signal.
    Signal(c_int),
}

/// How a child leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leave {
    /// exit(3), which runs what was registered with atexit(3).
    Exit,
    /// _exit(2), which runs nothing.
    AtOnce,
}

/// A child process.
#[derive(Debug)]
pub struct Child(pub libc::pid_t);

impl Child {
    /// waitpid(2)
    pub fn wait(self) -> End {
        let mut status = 0;
        // SAFETY: waitpid writes one int.
        while unsafe { libc::waitpid(self.0, &raw mut status, 0) } < 0 {
            assert_eq!(Errno::last(), Errno::EINTR, "waitpid");
        }
        let end = end(status);
        crate::say!("child ended: {end:?}");
        end
    }

    /// As [`Self::wait`], for a child that must have succeeded.
    pub fn wait_for_success(self) {
        assert_eq!(self.wait(), End::Exit(0), "the child failed");
    }
}

/// A number that a process shares with its forks.
#[derive(Clone, Copy, Debug)]
pub struct SharedCount(&'static AtomicU64);

impl SharedCount {
    /// Zero, in memory that stays mapped.
    #[allow(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Self {
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
        let page = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                size_of::<AtomicU64>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(page, libc::MAP_FAILED, "mmap: {}", Errno::last());
        // SAFETY: mapped for ever, zeroed, and aligned to a page.
        Self(unsafe { &*page.cast::<AtomicU64>() })
    }

    /// Its value.
    pub fn get(self) -> u64 {
        self.0.load(Ordering::SeqCst)
    }

    /// Changes it for all.
    pub fn set(self, value: u64) {
        self.0.store(value, Ordering::SeqCst);
    }
}

/// fork(2). The child runs `body`, then leaves with status 0, or 101 if it panicked.
///
/// Only for a process with one thread: the child has but one.
pub fn fork(leave: Leave, body: impl FnOnce()) -> Child {
    // SAFETY: the process has one thread, so that no lock is held by a thread that the child lacks.
    let pid = unsafe { libc::fork() };
    assert!(pid >= 0, "fork: {}", Errno::last());
    if pid > 0 {
        return Child(pid);
    }
    let status = if catch_unwind(AssertUnwindSafe(body)).is_ok() { 0 } else { 101 };
    match leave {
        Leave::Exit => std::process::exit(status),
        Leave::AtOnce => exit_at_once(status),
    }
}

/// fork(2) that fails: with what.
pub fn fork_in_vain() -> Errno {
    // SAFETY: a child leaves at once.
    let pid = unsafe { libc::fork() };
    let errno = Errno::last();
    if pid == 0 {
        exit_at_once(0);
    }
    assert!(pid < 0, "fork: there is a child");
    errno
}

/// A child that stands still until [`Traced::kill_at_stop`].
#[derive(Debug)]
pub struct Traced(Child);

/// Where a traced child stops.
#[derive(Clone, Copy, Debug)]
pub enum Stops {
    /// At each entry into a system call and each exit from one. SIGKILL takes a process just so that a system call has had
    /// its effect, but the process does not know.
    SystemCalls,
    /// After each instruction.
    Instructions,
}

/// fork(2), with a child that this process traces (ptrace(2)).
pub fn fork_traced(body: impl FnOnce()) -> Traced {
    let child = fork(Leave::AtOnce, || {
        // SAFETY: takes no pointer.
        unsafe { libc::ptrace(libc::PTRACE_TRACEME) };
        // SAFETY: takes no pointer.
        unsafe { libc::raise(libc::SIGSTOP) };
        body();
    });
    let traced = Traced(child);
    assert!(libc::WIFSTOPPED(traced.next_status()), "the child did not stop");
    traced
}

impl Traced {
    /// Lets the child run to stop number `stop`, and kills it there. How it ended: it may have been at its end before.
    pub fn kill_at_stop(self, stops: Stops, stop: usize) -> End {
        let request = match stops {
            Stops::SystemCalls => libc::PTRACE_SYSCALL,
            Stops::Instructions => libc::PTRACE_SINGLESTEP,
        };
        for _ in 0..stop {
            // SAFETY: takes no pointer that is used.
            let ret = unsafe { libc::ptrace(request, self.0.0, 0, 0) };
            assert_eq!(ret, 0, "ptrace: {}", Errno::last());
            let status = self.next_status();
            if !libc::WIFSTOPPED(status) {
                return end(status);
            }
        }
        super::kill(self.0.0, libc::SIGKILL).expect("kill");
        end(self.next_status())
    }

    fn next_status(&self) -> c_int {
        let mut status = 0;
        // SAFETY: waitpid writes one int.
        let pid = unsafe { libc::waitpid(self.0.0, &raw mut status, 0) };
        assert_eq!(pid, self.0.0, "waitpid: {}", Errno::last());
        status
    }
}

fn end(status: c_int) -> End {
    if libc::WIFSIGNALED(status) {
        End::Signal(libc::WTERMSIG(status))
    } else {
        End::Exit(libc::WEXITSTATUS(status))
    }
}

/// A program to run: this one, as a small helper, with or without the library.
#[derive(Debug)]
pub struct Program {
    path: CString,
    arguments: Vec<CString>,
    environment: Vec<CString>,
}

impl Program {
    /// This executable as the helper `name`; see `behaviour --helper`.
    pub fn helper(name: &str, arguments: &[&str], shimmed: bool) -> Self {
        let path = std::env::current_exe().expect("/proc is mounted");
        let path = CString::new(path.as_os_str().as_bytes()).expect("no path has a NUL byte");
        let text = |text: &str| CString::new(text).expect("no argument has a NUL byte");
        let mut all = vec![path.clone(), text("--helper"), text(name)];
        all.extend(arguments.iter().map(|argument| text(argument)));
        let environment = std::env::vars_os()
            .filter(|(key, _)| shimmed || key != "LD_PRELOAD")
            .map(|(key, value)| [key.as_bytes(), b"=", value.as_bytes()].concat())
            .map(|variable| CString::new(variable).expect("no variable has a NUL byte"))
            .collect();
        Self { path, arguments: all, environment }
    }

    /// The path, arguments and environment as exec(3) takes them.
    pub(super) fn pointers(
        &self,
    ) -> (*const libc::c_char, Vec<*const libc::c_char>, Vec<*const libc::c_char>) {
        (self.path.as_ptr(), pointers(&self.arguments), pointers(&self.environment))
    }

    /// A program that is not there.
    pub fn missing() -> Self {
        Self { path: c"/nowhere/nothing".to_owned(), arguments: Vec::new(), environment: Vec::new() }
    }

    /// A program that is none, though it may be executed as far as access(2) tells.
    pub fn folder() -> Self {
        Self { path: c"/".to_owned(), ..Self::missing() }
    }

    /// One that is not there, with `count` arguments.
    pub fn missing_with(count: usize) -> Self {
        Self { arguments: vec![c"nothing".to_owned(); count], ..Self::missing() }
    }

    /// execve(2). Does not return unless it fails.
    pub fn exec(&self) -> Errno {
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        // SAFETY: a path that ends with NUL, and two lists of such strings that end with null.
        unsafe { libc::execve(self.path.as_ptr(), arguments.as_ptr(), environment.as_ptr()) };
        Errno::last()
    }

    /// posix_spawn(3); `onto` are pairs of a descriptor and the number that the program finds it at.
    pub fn spawn(&self, onto: &[(Fd, Fd)]) -> Outcome<Child> {
        let (arguments, environment) = (pointers(&self.arguments), pointers(&self.environment));
        let mut actions = FileActions::new();
        for &(fd, at) in onto {
            actions.dup2(fd, at);
        }
        let mut pid = 0;
        // SAFETY: strings and lists as in `exec`, initialised file actions, default attributes.
        let ret = unsafe {
            libc::posix_spawn(
                &raw mut pid,
                self.path.as_ptr(),
                &raw const actions.0,
                std::ptr::null(),
                arguments.as_ptr().cast(),
                environment.as_ptr().cast(),
            )
        };
        if ret == 0 { Ok(Child(pid)) } else { Err(Errno(ret)) }
    }

    /// What vfork(2) and exec do: a child that shares the memory of its parent, which stands still until the
    /// child has become the program. `onto` as for [`Self::spawn`]; what keeps its number is marked to stay open.
    pub fn vfork_and_exec(&self, onto: &[(Fd, Fd)]) -> Outcome<Child> {
        let mut start = Start {
            path: self.path.as_ptr(),
            arguments: pointers(&self.arguments),
            environment: pointers(&self.environment),
            onto: onto.to_vec(),
        };
        let mut stack = vec![0u128; 4096];
        let top = stack.as_mut_ptr_range().end.cast::<c_void>();
        // SAFETY: the child runs `become_program` on a stack of its own while this thread is suspended.
        let pid = unsafe {
            libc::clone(
                become_program,
                top,
                libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD,
                (&raw mut start).cast(),
            )
        };
        Errno::check(pid as isize).map(|pid| Child(pid as libc::pid_t))
    }
}

struct Start {
    path: *const libc::c_char,
    arguments: Vec<*const libc::c_char>,
    environment: Vec<*const libc::c_char>,
    onto: Vec<(Fd, Fd)>,
}

extern "C" fn become_program(start: *mut c_void) -> c_int {
    // SAFETY: `vfork_and_exec` passes its `Start`, and waits until this process has gone.
    let start = unsafe { &*start.cast::<Start>() };
    for &(fd, at) in &start.onto {
        if fd == at {
            // SAFETY: takes numbers.
            unsafe { libc::fcntl(fd, libc::F_SETFD, 0) };
        } else {
            // SAFETY: takes numbers.
            unsafe { libc::dup2(fd, at) };
        }
    }
    // SAFETY: as in `Program::exec`.
    unsafe { libc::execve(start.path, start.arguments.as_ptr(), start.environment.as_ptr()) };
    // SAFETY: takes no pointer, does not return.
    unsafe { libc::_exit(127) }
}

fn pointers(strings: &[CString]) -> Vec<*const libc::c_char> {
    strings.iter().map(|string| string.as_ptr()).chain([std::ptr::null()]).collect()
}

struct FileActions(libc::posix_spawn_file_actions_t);

impl FileActions {
    fn new() -> Self {
        // SAFETY: all-zero is valid storage for init to fill.
        let mut actions = Self(unsafe { std::mem::zeroed() });
        // SAFETY: the storage is valid and not yet initialised.
        let ret = unsafe { libc::posix_spawn_file_actions_init(&raw mut actions.0) };
        assert_eq!(ret, 0, "posix_spawn_file_actions_init: {}", Errno(ret));
        actions
    }

    fn dup2(&mut self, fd: Fd, at: Fd) {
        // SAFETY: the actions are initialised.
        let ret = unsafe { libc::posix_spawn_file_actions_adddup2(&raw mut self.0, fd, at) };
        assert_eq!(ret, 0, "posix_spawn_file_actions_adddup2: {}", Errno(ret));
    }
}

impl Drop for FileActions {
    fn drop(&mut self) {
        // SAFETY: the actions are initialised, and not used again.
        unsafe { libc::posix_spawn_file_actions_destroy(&raw mut self.0) };
    }
}

/// _exit(2)
pub fn exit_at_once(status: c_int) -> ! {
    // SAFETY: takes no pointer, does not return.
    unsafe { libc::_exit(status) }
}

/// Ends this process as `kill -9` does.
pub fn kill_self() -> ! {
    // SAFETY: takes no pointer.
    let pid = unsafe { libc::getpid() };
    let _ = super::kill(pid, libc::SIGKILL);
    unreachable!("nothing survives SIGKILL");
}

/// setgid(2) and setuid(2), for ever.
pub fn become_user(uid: libc::uid_t, gid: libc::gid_t) -> Outcome<()> {
    // SAFETY: an empty list needs no pointer.
    Errno::check(unsafe { libc::setgroups(0, std::ptr::null()) } as isize)?;
    // SAFETY: takes no pointer.
    Errno::check(unsafe { libc::setgid(gid) } as isize)?;
    // SAFETY: takes no pointer.
    Errno::check(unsafe { libc::setuid(uid) } as isize)?;
    Ok(())
}

/// seteuid(2), which can be taken back.
pub fn act_for(uid: libc::uid_t) -> Outcome<()> {
    // SAFETY: takes no pointer.
    Errno::check(unsafe { libc::seteuid(uid) } as isize).map(drop)
}

/// Whether others of the same user may trace this process: prctl(2), `PR_SET_DUMPABLE`.
pub fn be_dumpable(yes: bool) {
    // SAFETY: takes no pointer.
    let result = unsafe { libc::prctl(libc::PR_SET_DUMPABLE, libc::c_ulong::from(yes), 0, 0, 0) };
    assert_eq!(result, 0, "prctl: {}", Errno::last());
}

/// Has `handler` run in each child that this process forks (`pthread_atfork(3)`).
pub fn at_fork_in_child(handler: unsafe extern "C" fn()) {
    // SAFETY: a function, which lives for ever.
    let ret = unsafe { libc::pthread_atfork(None, None, Some(handler)) };
    assert_eq!(ret, 0, "pthread_atfork: {}", Errno(ret));
}

/// Whether this process is root.
pub fn is_root() -> bool {
    // SAFETY: takes no pointer.
    unsafe { libc::geteuid() == 0 }
}

/// Sets the soft limit on open descriptors.
pub fn limit_descriptors(limit: u64) {
    limit_resource(libc::RLIMIT_NOFILE, limit);
}

/// Sets the soft limit of a resource (`RLIMIT_…`).
pub fn limit_resource(resource: libc::__rlimit_resource_t, limit: u64) {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut limits: libc::rlimit = unsafe { std::mem::zeroed() };
    // SAFETY: getrlimit writes one rlimit.
    let got = unsafe { libc::getrlimit(resource, &raw mut limits) };
    limits.rlim_cur = limit;
    // SAFETY: setrlimit reads one rlimit.
    let set = unsafe { libc::setrlimit(resource, &raw const limits) };
    assert_eq!((got, set), (0, 0), "setrlimit: {}", Errno::last());
}

/// The CPU time that this process has used, in user and kernel mode.
pub fn cpu_time() -> Duration {
    // SAFETY: all-zero is a valid value of this plain C struct.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: getrusage writes one rusage.
    let ret = unsafe { libc::getrusage(libc::RUSAGE_SELF, &raw mut usage) };
    assert_eq!(ret, 0, "getrusage: {}", Errno::last());
    let duration = |time: libc::timeval| {
        Duration::from_secs(time.tv_sec as u64) + Duration::from_micros(time.tv_usec as u64)
    };
    duration(usage.ru_utime) + duration(usage.ru_stime)
}

/// From now on a system call fails with `errno`, as it may under a sandbox: with these values of arguments, by their index
/// (seccomp(2)).
pub fn forbid(call: libc::c_long, arguments: &[(u32, u32)], errno: Errno) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    // Offsets in struct seccomp_data: the number of the call, and the low halves of its arguments.
    const NUMBER: u32 = 0;
    const ARGUMENTS: u32 = 16;
    let load = |offset| libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: offset };
    let unless_equal = |value, skip| libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: skip, k: value };
    let result = |value| libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: value };
    let mut program = vec![load(NUMBER), unless_equal(call as u32, 2 * arguments.len() as u8 + 1)];
    for (at, &(index, value)) in arguments.iter().enumerate() {
        let behind = 2 * (arguments.len() - at - 1) as u8 + 1;
        program.extend([load(ARGUMENTS + 8 * index), unless_equal(value, behind)]);
    }
    program.push(result(libc::SECCOMP_RET_ERRNO | errno.0 as u32));
    program.push(result(libc::SECCOMP_RET_ALLOW));
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // As if it had been there when the program started: no hook sees it.
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::syscall(libc::SYS_prctl, libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(ret, 0, "prctl: {}", Errno::last());
    let (option, mode) = (libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER);
    // SAFETY: the filter and its program outlive the call.
    let ret = unsafe { libc::syscall(libc::SYS_prctl, option, mode, &raw const filter) };
    assert_eq!(ret, 0, "seccomp: {}", Errno::last());
}

/// Asks for an io_uring nowhere, and for sandboxes without a filter, as libraries do that want to know what the kernel knows.
pub fn ask_for_what_is_refused() {
    let nowhere = std::ptr::null::<c_void>();
    let (set, filter) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_MODE_FILTER);
    refused("io_uring_setup(8, null)", || {
        // SAFETY: the kernel refuses a null pointer.
        unsafe { libc::syscall(libc::SYS_io_uring_setup, 8, nowhere) }
    });
    for flags in [0, libc::SECCOMP_FILTER_FLAG_TSYNC] {
        // SAFETY: as above.
        refused("seccomp(filter, null)", || unsafe { libc::syscall(libc::SYS_seccomp, set, flags, nowhere) });
    }
    refused("prctl(PR_SET_SECCOMP, filter, null)", || {
        // SAFETY: as above.
        unsafe { libc::prctl(libc::PR_SET_SECCOMP, filter, nowhere) }.into()
    });
}

fn refused(name: &str, call: impl FnOnce() -> libc::c_long) {
    let ret = call();
    let outcome = super::transcript::noted_number(Errno::check(ret as isize), || name.to_owned());
    assert!(outcome.is_err(), "{name}");
}

/// unshare(2) with `CLONE_FILES`: this thread has descriptors of its own from now on.
pub fn unshare_descriptors() {
    // SAFETY: takes a number.
    let ret = unsafe { libc::unshare(libc::CLONE_FILES) };
    assert_eq!(ret, 0, "unshare: {}", Errno::last());
}

/// From now on any other system call than these kills the process, as in the sandbox that a program makes for itself.
pub fn allow_only(allowed: &[libc::c_long]) {
    const LOAD: u16 = (libc::BPF_LD | libc::BPF_W | libc::BPF_ABS) as u16;
    const JUMP_IF_EQUAL: u16 = (libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K) as u16;
    const RETURN: u16 = (libc::BPF_RET | libc::BPF_K) as u16;
    let mut program = vec![libc::sock_filter { code: LOAD, jt: 0, jf: 0, k: 0 }];
    for &call in allowed {
        program.push(libc::sock_filter { code: JUMP_IF_EQUAL, jt: 0, jf: 1, k: call as u32 });
        program.push(libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_ALLOW });
    }
    program.push(libc::sock_filter { code: RETURN, jt: 0, jf: 0, k: libc::SECCOMP_RET_KILL_PROCESS });
    let filter = libc::sock_fprog { len: program.len() as u16, filter: program.as_mut_ptr() };
    // SAFETY: takes no pointer.
    let ret = unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    assert_eq!(ret, 0, "prctl: {}", Errno::last());
    // SAFETY: the filter and its program outlive the call.
    let ret = unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const filter) };
    assert_eq!(ret, 0, "seccomp: {}", Errno::last());
}

/// chroot(2) and chdir(2) into `folder`.
pub fn confine_to(folder: &str) {
    let path = CString::new(folder).expect("no path has a NUL byte");
    // SAFETY: the path ends with NUL.
    let ret = unsafe { libc::chroot(path.as_ptr()) };
    assert_eq!(ret, 0, "chroot: {}", Errno::last());
    // SAFETY: the path ends with NUL.
    let ret = unsafe { libc::chdir(c"/".as_ptr()) };
    assert_eq!(ret, 0, "chdir: {}", Errno::last());
}
