//! Other sides that several areas use: they do what the observing side asks for, and nothing else.

use std::fs::OpenOptions;
use std::net::SocketAddr;

use thallus_transport::arena::{Block, MEMFD_NAME, View, flag};

use crate::calls::{self, Child, Fd, Leave, fork, quietly};
use crate::side::{Side, receive_exactly};

/// Sends "data" whenever [`demand`] asks for it, until [`stop`].
pub(super) fn sends_on_demand(side: &Side, fd: Fd) {
    while side.told() == 1 {
        assert_eq!(calls::send(fd, b"data", 0), Ok(4));
        side.sync("sent");
    }
}

/// Asks [`sends_on_demand`] for four bytes; they are on their way when this returns.
pub(super) fn demand(side: &Side) {
    side.tell(1);
    side.sync("sent");
}

/// Lets [`sends_on_demand`] go.
pub(super) fn stop(side: &Side) {
    side.tell(0);
}

/// Does nothing until the observing side syncs on "done".
pub(super) fn waits(side: &Side, _fd: Fd) {
    side.sync("done");
}

/// Shuts its sending down at "end now", closes at "close now".
pub(super) fn ends_on_demand(side: &Side, fd: Fd) {
    side.sync("end now");
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("ended");
    side.sync("close now");
    calls::close(fd).expect("close");
    side.sync("closed");
}

/// Dies at "blocked".
pub(super) fn is_killed_on_demand(side: &Side, _fd: Fd) {
    side.sync("blocked");
    calls::kill_self();
}

/// Sends until a write would block; how many bytes that took.
pub(super) fn fill(fd: Fd) -> usize {
    let piece = [b'f'; 32768];
    let mut total = 0;
    while let Ok(sent) = quietly(|| calls::send(fd, &piece, libc::MSG_DONTWAIT)) {
        total += sent;
    }
    total
}

/// Learns at "full" how many bytes [`fill`] took, reads them at "drain now", and stays until "done".
pub(super) fn drains_on_demand(side: &Side, fd: Fd) {
    side.sync("full");
    let total = side.told() as usize;
    side.sync("drain now");
    receive_exactly(fd, total);
    side.sync("drained");
    side.sync("done");
}

/// Sends back whatever comes, until the stream ends; how many bytes that was.
pub(super) fn echo(fd: Fd) -> usize {
    let mut total = 0;
    loop {
        let data = quietly(|| calls::recv(fd, 65536, 0)).expect("recv");
        if data.is_empty() {
            return total;
        }
        total += data.len();
        send_all(fd, &data);
    }
}

/// Sends all of `data`.
pub(super) fn send_all(fd: Fd, data: &[u8]) {
    let mut rest = data;
    while !rest.is_empty() {
        let sent = quietly(|| calls::send(fd, rest, 0)).expect("send");
        rest = &rest[sent..];
    }
}

/// Requests that are echoed, and then the end, which comes back.
pub(super) fn asks_to_the_end(side: &Side, fd: Fd) {
    request_echoes(fd, 60, 3000);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    side.sync("done");
}

/// Sends `rounds` requests, each of another size up to `largest` bytes, and checks that each comes back.
pub(super) fn request_echoes(fd: Fd, rounds: usize, largest: usize) {
    for round in 0..rounds {
        let request = crate::side::Pattern::new(round as u64).take(1 + round * 7919 % largest);
        send_all(fd, &request);
        assert_eq!(receive_exactly(fd, request.len()), request, "echo {round}");
    }
}

/// Forks a child that alone has the connection when it begins: one that two processes have stays on TCP.
pub(super) fn hand_to_child(fd: Fd, leave: Leave, body: impl FnOnce()) -> Child {
    let (reading, writing) = quietly(calls::pipe).expect("pipe");
    let child = fork(leave, || {
        quietly(|| calls::close(writing)).expect("close");
        assert_eq!(quietly(|| calls::read(reading, 1)), Ok(vec![]));
        body();
    });
    quietly(|| {
        calls::close(fd).expect("close");
        calls::close(writing).expect("close");
        calls::close(reading).expect("close");
    });
    child
}

/// This process's arenas, at which `thallus pin` looks. Without the library there are none.
pub(super) fn own_arenas() -> Vec<View> {
    let name = format!("/memfd:{MEMFD_NAME} (deleted)");
    let files =
        std::fs::read_dir("/proc/self/fd").expect("/proc is mounted").flatten().map(|entry| entry.path());
    // All of them before any is opened again, and found, too.
    let arenas: Vec<_> = files
        .filter(|path| std::fs::read_link(path).is_ok_and(|target| target.as_os_str() == name.as_str()))
        .collect();
    let view = |path| {
        let file = OpenOptions::new().read(true).write(true).open(path).expect("our own arena");
        View::open(file.into()).expect("it can be mapped").expect("an arena")
    };
    arenas.into_iter().map(view).collect()
}

/// Answers what [`request_echoes`] asks.
pub(super) fn answer_echoes(fd: Fd, rounds: usize, largest: usize) {
    for round in 0..rounds {
        let request = receive_exactly(fd, 1 + round * 7919 % largest);
        send_all(fd, &request);
    }
}

/// How many connections of this process have left TCP; none without the library.
pub(super) fn left_tcp() -> usize {
    count_by_flags(|block| block.has(flag::READY))
}

/// The same, for shared memory.
pub(super) fn left_for_memory() -> usize {
    count_by_flags(|block| block.has(flag::READY) && !block.has(flag::VERBS))
}

fn count_by_flags(counts: impl Fn(&Block) -> bool) -> usize {
    let has_left = |view: &View| {
        view.blocks().filter(|(_, block)| block.connection().is_some() && counts(block)).count()
    };
    own_arenas().iter().map(has_left).sum()
}

/// Asks for it as `thallus pin` does.
pub(super) fn ask_for_tcp() {
    for (_, block) in own_arenas().iter().flat_map(View::blocks) {
        if let Some(connection) = block.connection() {
            block.ask_for_tcp(connection);
        }
    }
}

/// Connections by which two sides do something at the same moment, each a little earlier or later than with the one before.
pub(super) const MOMENTS: u64 = 40;

/// The server's end of connection `number` of [`MOMENTS`], at its moment.
pub(super) fn accept_for_a_moment(side: &Side, listener: Fd, number: u64) -> Fd {
    let fd = side.accept(listener);
    side.answer_warm_up(fd);
    side.sync("now");
    delay(number);
    fd
}

/// The client's.
pub(super) fn connect_for_a_moment(side: &Side, destination: SocketAddr, number: u64) -> Fd {
    let fd = side.connect_to(destination);
    side.warm_up(fd);
    side.sync("now");
    delay(MOMENTS - number);
    fd
}

fn delay(times: u64) {
    for _ in 0..times * 100 {
        std::hint::spin_loop();
    }
}
