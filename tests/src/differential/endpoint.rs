//! One process of a program: makes the calls that it is told to make, and answers what came of them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll as raw_poll};
use rustix::io::Errno as RawErrno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType};

use super::program::{Control, Flag, How, Op, PollBy, ReceiveBy, SendBy, SocketOption};
use super::rules::{WAITS, reports_once};
use super::wire::{Arrival, Call, Command, MESSAGE_ROOM, Reply, bytes_of, control_path, digest};
use crate::calls::{self, Family, Fd, Outcome, quietly};

/// How long what was sent may take to arrive. It is there at once, but for Nagle's algorithm (40 ms) and a busy machine.
const ARRIVAL: Duration = Duration::from_secs(2);

/// Descriptors of our own are from here on.
const OWN: Fd = 900;

/// Does what comes over `control` until told to end, or nobody tells any more. Forks meet in `folder`.
pub fn serve(control: BorrowedFd<'_>, folder: &Path) {
    calls::catch(libc::SIGPIPE, true);
    calls::catch(libc::SIGUSR1, false);
    let mut endpoint = Endpoint { folder: folder.to_owned(), started: None, listener: None, pipe_signals: 0 };
    let mut room = vec![0; MESSAGE_ROOM];
    loop {
        let len = match rustix::net::recv(control, &mut room[..], RecvFlags::empty()) {
            Err(RawErrno::INTR) => continue,
            Ok((0, _)) | Err(_) => return,
            Ok((len, _)) => len,
        };
        let command = serde_json::from_slice(&room[..len]).expect("commands are well-formed");
        if command == Command::Quit {
            return;
        }
        let mut reply = quietly(|| endpoint.obey(command));
        let signals = calls::caught(libc::SIGPIPE);
        reply.pipe_signals = signals - endpoint.pipe_signals;
        endpoint.pipe_signals = signals;
        let text = serde_json::to_vec(&reply).expect("replies have no map with strange keys");
        while rustix::net::send(control, &text, SendFlags::NOSIGNAL) == Err(RawErrno::INTR) {}
    }
}

struct Endpoint {
    folder: PathBuf,
    started: Option<Started>,
    listener: Option<Fd>,
    pipe_signals: usize,
}

/// A thread with a call that may wait.
struct Started {
    thread: libc::pid_t,
    done: Receiver<Reply>,
    handle: JoinHandle<()>,
}

impl Endpoint {
    fn obey(&mut self, command: Command) -> Reply {
        match command {
            Command::Listen(family) => self.listen(family),
            Command::Connect(family, port) => of(connect(family, port)),
            Command::Accept => {
                let listener = self.listener.expect("a process listens before it accepts");
                of(calls::accept(listener).map(|fd| fd as usize))
            }
            Command::Do(Call { op: Op::Fork, .. }) => self.fork(),
            Command::Do(Call { op: Op::Interrupt, .. }) => self.interrupt(),
            Command::Do(call) => perform(&call, false),
            Command::Start(call) => self.start(call),
            Command::Check => self.check(),
            Command::Settle { fd, wanted } => {
                Reply { value: i64::from(settle(fd, wanted)), ..Reply::default() }
            }
            Command::Quit => unreachable!("the caller ends"),
        }
    }

    fn listen(&mut self, family: Family) -> Reply {
        let bound = calls::stream_socket(family, 0).and_then(|fd| {
            calls::bind(fd, family.own(0))?;
            calls::listen(fd, 64)?;
            self.listener = Some(fd);
            calls::local_address(fd)
        });
        of(bound.map(|address| address.port().into()))
    }

    fn fork(&self) -> Reply {
        let folder = self.folder.clone();
        // The program's other thread, if there is one, sleeps in a call and holds no lock of this program.
        let child = calls::fork(calls::Leave::Exit, || {
            let control = meet(&folder);
            serve(control.as_fd(), &folder);
        });
        Reply { value: child.0.into(), ..Reply::default() }
    }

    fn start(&mut self, call: Call) -> Reply {
        let (sender, done) = channel();
        let (named, name) = channel();
        let handle = std::thread::spawn(move || {
            // Nobody receives it if the process ends first.
            let _ = named.send(calls::thread_id());
            let _ = sender.send(quietly(|| perform(&call, true)));
        });
        let thread = name.recv().expect("the thread begins by telling its name");
        self.started = Some(Started { thread, done, handle });
        self.check()
    }

    fn interrupt(&mut self) -> Reply {
        if let Some(started) = &self.started {
            calls::signal_thread(started.thread, libc::SIGUSR1);
        }
        Reply::default()
    }

    fn check(&mut self) -> Reply {
        let Some(started) = &self.started else { return Reply::default() };
        loop {
            let asleep = is_asleep(started.thread);
            match started.done.try_recv() {
                Ok(reply) => {
                    // A fork in which it is still ending would leave the child locks that it holds (those of Rust's library, for one).
                    let ended = self.started.take().map(|started| started.handle.join());
                    assert!(matches!(ended, Some(Ok(()))), "the thread with the call ends");
                    return Reply { done: Some(Box::new(reply)), ..Reply::default() };
                }
                Err(TryRecvError::Disconnected) => panic!("the thread with the call is gone"),
                Err(TryRecvError::Empty) if asleep => return Reply { waits: true, ..Reply::default() },
                Err(TryRecvError::Empty) => std::thread::yield_now(),
            }
        }
    }
}

/// A fork's way to be told what to do: standard input is its parent's.
fn meet(folder: &Path) -> OwnedFd {
    let null = rustix::fs::open("/dev/null", rustix::fs::OFlags::RDONLY, rustix::fs::Mode::empty());
    rustix::stdio::dup2_stdin(null.expect("there is /dev/null")).expect("standard input is open");
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None);
    let socket = rustix::io::fcntl_dupfd_cloexec(socket.expect("a Unix socket"), OWN).expect("a descriptor");
    let address = SocketAddrUnix::new(control_path(folder)).expect("the path is short");
    rustix::net::connect(&socket, &address).expect("somebody listens there");
    socket
}

fn connect(family: Family, port: u16) -> Outcome<usize> {
    let fd = calls::stream_socket(family, 0)?;
    calls::connect(fd, family.other(port))?;
    Ok(fd as usize)
}

fn of(outcome: Outcome<usize>) -> Reply {
    match outcome {
        Ok(value) => Reply { value: value as i64, ..Reply::default() },
        Err(errno) => Reply { value: -1, error: errno.0, ..Reply::default() },
    }
}

fn of_bytes(outcome: Outcome<Vec<u8>>) -> Reply {
    let digest = outcome.as_ref().map(|bytes| digest(bytes)).unwrap_or_default();
    Reply { digest, ..of(outcome.map(|bytes| bytes.len())) }
}

fn unit(outcome: Outcome<()>) -> Reply {
    of(outcome.map(|()| 0))
}

/// Makes the calls of one operation; `patient`: without a time limit.
fn perform(call: &Call, patient: bool) -> Reply {
    match &call.op {
        Op::Send { fd, len, by, flags } => send(call, *fd, *len, *by, Flag::bits(flags)),
        Op::Receive { fd, .. } if call.guarded && !is_readable(*fd) => {
            Reply { waits: true, ..Reply::default() }
        }
        Op::Receive { fd, len, by, flags } => receive(*fd, *len, *by, flags),
        Op::Poll { by, events } => poll(*by, &call.fds, *events, patient),
        Op::NewSet => of(calls::epoll_create().map(|fd| fd as usize)),
        Op::Control { set, fd, how, events } => of(match how {
            Control::Add => calls::epoll_add(*set, *fd, events.cast_signed(), call.data),
            Control::Modify => calls::epoll_modify(*set, *fd, events.cast_signed(), call.data),
            Control::Delete => calls::epoll_delete(*set, *fd),
        }),
        Op::Wait { set } => wait(*set, patient),
        Op::Shutdown { fd, how } => {
            let outcome = calls::shutdown(
                *fd,
                match how {
                    How::Reading => libc::SHUT_RD,
                    How::Writing => libc::SHUT_WR,
                    How::Both => libc::SHUT_RDWR,
                },
            );
            await_acknowledgement(*fd);
            of(outcome)
        }
        Op::Close { fd } => unit(calls::close(*fd)),
        Op::Dup { fd } => of(calls::dup(*fd).map(|fd| fd as usize)),
        Op::Dup2 { fd, onto } => of(calls::dup2(*fd, *onto).map(|fd| fd as usize)),
        Op::SetOption { fd, option, value } => set_option(*fd, *option, *value),
        Op::GetOption { fd, option } => get_option(*fd, *option),
        Op::Nonblocking { fd, on } => {
            let status = calls::status(*fd).map(|flags| flags & !libc::O_NONBLOCK);
            unit(
                status.and_then(|flags| {
                    calls::set_status(*fd, if *on { flags | libc::O_NONBLOCK } else { flags })
                }),
            )
        }
        Op::Unread { fd } => of(calls::unread(*fd)),
        Op::Unsent { fd } => of(calls::unsent(*fd)),
        Op::Addresses { fd } => addresses(*fd),
        Op::SendFile { fd, len } => send_file(call, *fd, *len),
        Op::Splice { fd, len } => splice(call, *fd, *len),
        Op::Start { .. } | Op::Interrupt | Op::Drain { .. } | Op::Fork | Op::Exit | Op::Kill => {
            unreachable!("no call of one process: {:?}", call.op)
        }
    }
}

fn send(call: &Call, fd: Fd, len: usize, by: SendBy, flags: i32) -> Reply {
    let bytes = bytes_of(call.stream, len);
    let (first, second) = bytes.split_at(len / 2);
    match by {
        SendBy::Send => of(calls::send(fd, &bytes, flags)),
        SendBy::Write => of(calls::write(fd, &bytes)),
        SendBy::Sendto => of(calls::sendto(fd, &bytes, flags)),
        SendBy::Writev => of(calls::writev(fd, &[first, &[], second])),
        SendBy::Sendmsg => of(calls::sendmsg(fd, &[first, second], flags)),
        SendBy::Sendmmsg => {
            let sent = calls::sendmmsg(fd, &[first, second], flags);
            let detail = sent.as_ref().map(|sent| format!("{} messages", sent.len())).unwrap_or_default();
            Reply { detail, ..of(sent.map(|sent| sent.iter().sum())) }
        }
        SendBy::More => {
            in_two(|flags, piece| calls::send(fd, piece, flags), [first, second], [libc::MSG_MORE, 0])
        }
        SendBy::Corked => {
            let cork = |on| calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_CORK, on);
            if let Err(errno) = cork(1) {
                return of(Err(errno));
            }
            let reply = in_two(|flags, piece| calls::send(fd, piece, flags), [first, second], [0, 0]);
            let uncorked = cork(0);
            Reply { detail: format!("{} uncorked {uncorked:?}", reply.detail), ..reply }
        }
    }
}

/// Two sends; the value is the sum.
fn in_two(send: impl Fn(i32, &[u8]) -> Outcome<usize>, pieces: [&[u8]; 2], flags: [i32; 2]) -> Reply {
    match (send(flags[0], pieces[0]), pieces[0].len()) {
        (Ok(sent), len) if sent == len => match send(flags[1], pieces[1]) {
            Ok(more) => of(Ok(sent + more)),
            Err(errno) => Reply { detail: format!("then {errno}"), ..of(Ok(sent)) },
        },
        (outcome, _) => of(outcome),
    }
}

fn receive(fd: Fd, len: usize, by: ReceiveBy, flags: &[Flag]) -> Reply {
    let bits = Flag::bits(flags);
    if flags.contains(&Flag::Trunc) {
        // TCP stores nothing.
        let mut buffer = vec![0; len];
        let outcome = calls::recv_into(fd, &mut buffer, bits);
        buffer.truncate(outcome.unwrap_or(0));
        return of_bytes(outcome.map(|_| buffer));
    }
    let half = len / 2;
    match by {
        ReceiveBy::Recv => of_bytes(calls::recv(fd, len, bits)),
        ReceiveBy::Read => of_bytes(calls::read(fd, len)),
        ReceiveBy::Recvfrom => of_bytes(calls::recvfrom(fd, len, bits)),
        ReceiveBy::Readv => of_bytes(calls::readv(fd, &[half, 0, len - half])),
        ReceiveBy::Recvmsg => {
            of_bytes(calls::recvmsg(fd, &[half, len - half], 0, bits).map(|received| received.data))
        }
        ReceiveBy::Recvmmsg => {
            let messages = calls::recvmmsg(fd, &[half, len - half], bits | libc::MSG_DONTWAIT);
            let detail = messages.as_ref().map(|all| format!("{} messages", all.len())).unwrap_or_default();
            Reply { detail, ..of_bytes(messages.map(|messages| messages.concat())) }
        }
        ReceiveBy::RecvChk => of_bytes(calls::recv_chk(fd, len, bits)),
        ReceiveBy::ReadChk => of_bytes(calls::read_chk(fd, len)),
    }
}

fn poll(by: PollBy, fds: &[Fd], events: i16, patient: bool) -> Reply {
    let wanted: Vec<_> = fds.iter().map(|&fd| (fd, events)).collect();
    let limit = (!patient).then_some(Duration::ZERO);
    let ready = match by {
        PollBy::Poll => calls::poll(&wanted, if patient { -1 } else { 0 }),
        PollBy::Ppoll => calls::ppoll(&wanted, limit, None),
        PollBy::Select => {
            let found = calls::select(fds, fds, fds, limit);
            let all = found.map(|found| {
                let bits = fds.iter().map(|fd| {
                    u32::from(found.read.contains(fd))
                        | u32::from(found.write.contains(fd)) << 2
                        | u32::from(found.except.contains(fd)) << 1
                });
                fds.iter().map(|&fd| fd as u64).zip(bits).collect()
            });
            return of_ready(all);
        }
    };
    of_ready(ready.map(|all| {
        let bits = all.iter().map(|&events| u32::from(events.cast_unsigned()));
        fds.iter().map(|&fd| fd as u64).zip(bits).collect()
    }))
}

/// What an epoll set reports, and what it reports further as long as it reports anything, up to [`WAITS`] times.
fn wait(set: Fd, patient: bool) -> Reply {
    let mut ready: Vec<(u64, u32)> = Vec::new();
    for turn in 0..WAITS {
        let got = calls::epoll_wait(set, 64, if patient && turn == 0 { -1 } else { 0 });
        let got = match got {
            Ok(got) if got.is_empty() => break,
            Ok(got) => got,
            Err(_) if turn > 0 => break,
            Err(errno) => return of_ready(Err(errno)),
        };
        for one in got {
            match ready.iter_mut().find(|(data, _)| *data == one.data && !reports_once(*data)) {
                Some((_, events)) => *events |= one.events,
                None => ready.push((one.data, one.events)),
            }
        }
    }
    ready.sort_unstable();
    of_ready(Ok(ready))
}

fn of_ready(ready: Outcome<Vec<(u64, u32)>>) -> Reply {
    let reply = of(ready.as_ref().map(|_| 0).map_err(|&errno| errno));
    let ready = ready.unwrap_or_default().into_iter().filter(|&(_, events)| events != 0).collect();
    Reply { ready, ..reply }
}

fn set_option(fd: Fd, option: SocketOption, value: i32) -> Reply {
    let socket = |name| calls::set_option(fd, libc::SOL_SOCKET, name, value);
    of(match option {
        SocketOption::Error => socket(libc::SO_ERROR),
        SocketOption::Type => socket(libc::SO_TYPE),
        SocketOption::KeepAlive => socket(libc::SO_KEEPALIVE),
        SocketOption::UrgentInline => socket(libc::SO_OOBINLINE),
        SocketOption::NoDelay => calls::set_option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY, value),
        SocketOption::ReceiveTimeout => {
            calls::set_receive_timeout(fd, Duration::from_millis(value.unsigned_abs().into()))
        }
        SocketOption::Linger => calls::set_linger(fd, 0),
    })
}

fn get_option(fd: Fd, option: SocketOption) -> Reply {
    let socket = |name| calls::option(fd, libc::SOL_SOCKET, name);
    let value = match option {
        SocketOption::Error => socket(libc::SO_ERROR),
        SocketOption::Type => socket(libc::SO_TYPE),
        SocketOption::KeepAlive => socket(libc::SO_KEEPALIVE),
        SocketOption::UrgentInline => socket(libc::SO_OOBINLINE),
        SocketOption::NoDelay => calls::option(fd, libc::IPPROTO_TCP, libc::TCP_NODELAY),
        // The first half of a structure: seconds, and whether to linger.
        SocketOption::ReceiveTimeout => socket(libc::SO_RCVTIMEO),
        SocketOption::Linger => socket(libc::SO_LINGER),
    };
    of(value.map(|value| value as usize))
}

fn addresses(fd: Fd) -> Reply {
    let detail = [calls::local_address(fd), calls::peer_address(fd)].map(|address| match address {
        Ok(address) => address.ip().to_string(),
        Err(errno) => errno.to_string(),
    });
    Reply { detail: detail.join(" "), ..Reply::default() }
}

fn send_file(call: &Call, fd: Fd, len: usize) -> Reply {
    let bytes = bytes_of(call.stream, len);
    let file = calls::file_with(&bytes).expect("a file in memory");
    let sent = calls::sendfile(fd, file, len);
    let _ = calls::close(file);
    of(sent)
}

fn splice(call: &Call, fd: Fd, len: usize) -> Reply {
    let (out, into) = calls::pipe().expect("a pipe");
    let bytes = bytes_of(call.stream, len);
    assert_eq!(calls::write(into, &bytes), Ok(len), "the pipe takes it");
    let spliced = calls::splice(out, fd, len);
    let _ = (calls::close(out), calls::close(into));
    of(spliced)
}

fn is_readable(fd: Fd) -> bool {
    calls::poll(&[(fd, libc::POLLIN)], 0) != Ok(vec![0])
}

/// Waits until it is there, but not for ever. Whether it came.
fn settle(fd: Fd, wanted: Arrival) -> bool {
    /// So often the kernel alone is asked: what has come over TCP it knows, and the library is not disturbed.
    const LOOKS: u32 = 20;
    let start = Instant::now();
    for look in 0.. {
        let asks = wanted.sudden || look >= LOOKS;
        if !wanted.sudden && arrived_in_kernel(fd, wanted) || asks && has_arrived(fd, wanted) {
            return true;
        }
        if asks {
            if start.elapsed() > ARRIVAL {
                return false;
            }
            std::thread::yield_now();
        }
    }
    unreachable!("it looks for ever")
}

/// Waits until the end that has been sent is acknowledged, which is an edge (`tcp_rcv_state_process` of net/ipv4/tcp_input.c), if no bytes are in
/// its way.
fn await_acknowledgement(fd: Fd) {
    /// `TCP_FIN_WAIT1`, `TCP_LAST_ACK` and `TCP_CLOSING` of linux/tcp_states.h.
    const UNACKNOWLEDGED: [i32; 3] = [4, 9, 11];
    /// An acknowledgement is late by 40 ms.
    const LATE: Duration = Duration::from_millis(200);
    let start = Instant::now();
    let state = || calls::option(fd, libc::IPPROTO_TCP, libc::TCP_INFO).map(|info| info & 0xff);
    while state().is_ok_and(|state| UNACKNOWLEDGED.contains(&state)) && start.elapsed() < LATE {
        std::thread::yield_now();
    }
}

fn arrived_in_kernel(fd: Fd, wanted: Arrival) -> bool {
    // SAFETY: the process keeps its descriptors open while it looks.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let unread = rustix::io::ioctl_fionread(fd).unwrap_or(0);
    let mut polled = [PollFd::new(&fd, PollFlags::RDHUP | PollFlags::OUT)];
    let asked = raw_poll(&mut polled, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
    asked.is_ok() && is_there(wanted, unread, u32::from(polled[0].revents().bits()))
}

fn has_arrived(fd: Fd, wanted: Arrival) -> bool {
    let unread = if wanted.unread > 0 { calls::unread(fd).unwrap_or(0) } else { 0 };
    let asked = if wanted.room { libc::POLLOUT } else { libc::POLLRDHUP };
    let events = calls::poll(&[(fd, asked)], 0).map_or(0, |ready| ready[0]);
    is_there(wanted, unread as u64, u32::from(events.cast_unsigned()))
}

fn is_there(wanted: Arrival, unread: u64, events: u32) -> bool {
    let has = |bits: i16| events & u32::from(bits.cast_unsigned()) != 0;
    unread >= wanted.unread
        && (!wanted.end || has(libc::POLLRDHUP | libc::POLLHUP | libc::POLLERR))
        && (!wanted.hangup || has(libc::POLLHUP | libc::POLLERR))
        && (!wanted.room || has(libc::POLLOUT | libc::POLLHUP | libc::POLLERR))
}

fn is_asleep(thread: libc::pid_t) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/self/task/{thread}/stat")).unwrap_or_default();
    // The state follows the name, which stands in parentheses and may hold any character.
    stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with('S'))
}
