//! Where `AF_UNIX` streams are found: paths, names that are none, listeners that have gone.

use std::path::PathBuf;

use super::connecting::{
    asks_by_events, copies_first, echoes_one, forks_first, passes_and_moves_first, passes_first,
};
use super::peers::{answer_echoes, echo, request_echoes, send_all};
use super::unix_streams::look;
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Family, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{Side, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    whole("path", serves_at_a_path, asks_at_a_path, Tally::Upgraded(1)),
    whole("path_unlinked_after_accept", serves_at_an_unlinked_path, asks_at_a_path, Tally::Upgraded(1)),
    whole("path_of_a_closed_listener", serves_when_it_listens_no_more, asks_at_a_path, Tally::Total(1)),
    whole("path_relative_to_a_folder", serves_at_a_relative_path, asks_at_a_path, Tally::Upgraded(1)),
    whole("path_relative_at_the_client", serves_at_a_path, asks_at_a_relative_path, Tally::Upgraded(1)),
    whole("path_by_a_link", serves_at_a_path, asks_at_a_link, Tally::Upgraded(1)),
    whole("path_renamed", serves_at_a_renamed_path, asks_at_a_path, Tally::Upgraded(1)),
    whole("two_listeners_at_one_path", serves_twice_at_a_path, asks_twice_at_a_path, Tally::Upgraded(2)),
    whole("sent_before_it_is_accepted", accepts_late, sends_early, Tally::Upgraded(1)),
    whole("sent_and_closed_before_it_is_accepted", accepts_what_is_closed, sends_and_closes, Tally::Total(1)),
    whole("listener_closed_before_it_accepts", closes_its_listener, is_never_accepted, Tally::Stayed(0))
        .tally(Tally::Stayed(0), Tally::Stayed(1)),
    whole("many_in_the_backlog", accepts_many, connects_many, Tally::Upgraded(5)),
    whole("registered_before_it_connects", echoes_one, connects_what_is_registered, Tally::Upgraded(1)),
    whole("registered_and_left_alone", echoes_one, connects_what_is_registered, Tally::Upgraded(0))
        .environment(&[("THALLUS_UNIX", "!all")]),
    whole("copied_before_it_connects", echoes_one, copies_first, STAYED)
        .alone(&["shared-before-upgrade"])
        .tally(STAYED, Tally::Unknown),
    whole("shared_by_a_fork_before_it_connects", echoes_one, forks_first, STAYED)
        .alone(&["shared-before-upgrade"])
        .tally(STAYED, Tally::Unknown),
    whole("passed_on_before_it_connects", echoes_one, passes_first, STAYED)
        .alone(&["shared-before-upgrade"])
        .tally(STAYED, Tally::Unknown),
    whole("passed_on_and_moved_before_it_connects", echoes_one, passes_and_moves_first, STAYED)
        .alone(&["shared-before-upgrade"])
        .tally(STAYED, Tally::Unknown),
    whole("without_a_name", talks_to_a_child, does_nothing, Tally::Stayed(0)),
    // The kernel counts no bytes: the two sides find out together.
    unseen("server_reads_unseen", serves_reading_unseen, asks_often),
    unseen("client_reads_unseen", serves_often, asks_reading_unseen),
];

const STAYED: Tally = Tally::Stayed(1);
const UNSEEN: Tally = Tally::Mixed(0, &[("unseen-bytes", 1)]);

const fn whole(name: &'static str, left: fn(&Side), right: fn(&Side), tally: Tally) -> Behaviour {
    Behaviour::whole(name, left, right, tally).unix_only()
}

/// They have not met yet when it happens.
const fn unseen(name: &'static str, left: fn(&Side), right: fn(&Side)) -> Behaviour {
    whole(name, left, right, Tally::Stayed(1))
        .environment(&[("THALLUS_UPGRADE_AFTER", "16")])
        .tally(STAYED, UNSEEN)
}

/// As nginx does with the sockets to its upstreams: the kernel tells of a hang-up at first.
fn connects_what_is_registered(side: &Side) {
    const ALL: libc::c_int = libc::EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    let destination = side.destination();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let unused = calls::stream_socket(side.family, libc::SOCK_NONBLOCK).expect("socket");
    calls::epoll_add(epfd, unused, ALL, 3).expect("EPOLL_CTL_ADD");
    calls::close(unused).expect("close");
    let fd = calls::stream_socket(side.family, libc::SOCK_NONBLOCK).expect("socket");
    calls::epoll_add(epfd, fd, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait(epfd, 4, 0).map(|ready| ready.len()), Ok(1));
    calls::epoll_modify(epfd, fd, ALL, 2).expect("EPOLL_CTL_MOD");
    calls::connect(fd, destination).expect("connect");
    asks_by_events(epfd, fd, 2);
}

/// A folder that both sides know, and nobody else has; gone with its owner.
struct Folder {
    path: PathBuf,
    is_own: bool,
}

impl Folder {
    /// Makes one, and tells the other side.
    fn make(side: &Side) -> Self {
        let number = std::process::id();
        let folder = Self { path: path_of(number), is_own: true };
        std::fs::create_dir(&folder.path).expect("no other process has this number");
        side.tell(u64::from(number));
        folder
    }

    /// The other side's.
    fn theirs(side: &Side) -> Self {
        Self { path: path_of(side.told() as u32), is_own: false }
    }

    fn name(&self, name: &str) -> String {
        self.path.join(name).to_str().expect("it is text").to_owned()
    }
}

/// As long for any number: lengths of names are in the transcript.
fn path_of(number: u32) -> PathBuf {
    format!("/tmp/thallus-test-names-{number:010}").into()
}

impl Drop for Folder {
    fn drop(&mut self) {
        if self.is_own {
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

fn listen_at(path: &str) -> Fd {
    let listener = calls::stream_socket(Family::Unix, 0).expect("socket");
    calls::bind_path(listener, path).expect("bind");
    calls::listen(listener, 8).expect("listen");
    listener
}

fn connect_to(path: &str) -> Fd {
    let fd = calls::stream_socket(Family::Unix, 0).expect("socket");
    calls::connect_path(fd, path).expect("connect");
    fd
}

fn serve(side: &Side, fd: Fd) {
    side.answer_warm_up(fd);
    for of_peer in [false, true] {
        let _ = calls::name_of(fd, of_peer);
    }
    say!("echoed {}", echo(fd));
    calls::close(fd).expect("close");
}

fn ask(side: &Side, fd: Fd) {
    side.warm_up(fd);
    for of_peer in [false, true] {
        let _ = calls::name_of(fd, of_peer);
    }
    request_echoes(fd, 30, 2000);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    let _ = calls::recvfrom_with(fd, 1, 110, 0);
    calls::close(fd).expect("close");
}

fn serves_at_a_path(side: &Side) {
    let folder = Folder::make(side);
    let listener = listen_at(&folder.name("socket"));
    side.sync("listening");
    serve(side, side.accept(listener));
}

fn asks_at_a_path(side: &Side) {
    let folder = Folder::theirs(side);
    side.sync("listening");
    ask(side, connect_to(&folder.name("socket")));
}

fn serves_at_an_unlinked_path(side: &Side) {
    let folder = Folder::make(side);
    let listener = listen_at(&folder.name("socket"));
    side.sync("listening");
    let fd = side.accept(listener);
    std::fs::remove_file(folder.name("socket")).expect("it is there");
    serve(side, fd);
}

/// docs/limitations.md, "When a connection is upgraded": nobody may find it.
fn serves_when_it_listens_no_more(side: &Side) {
    let folder = Folder::make(side);
    let listener = listen_at(&folder.name("socket"));
    side.sync("listening");
    let fd = side.accept(listener);
    calls::close(listener).expect("close");
    serve(side, fd);
}

fn serves_at_a_relative_path(side: &Side) {
    let folder = Folder::make(side);
    std::env::set_current_dir(&folder.path).expect("it is there");
    let listener = listen_at("socket");
    side.sync("listening");
    serve(side, side.accept(listener));
}

fn asks_at_a_relative_path(side: &Side) {
    let folder = Folder::theirs(side);
    side.sync("listening");
    std::env::set_current_dir(&folder.path).expect("it is there");
    ask(side, connect_to("./socket"));
}

fn asks_at_a_link(side: &Side) {
    let folder = Folder::theirs(side);
    side.sync("listening");
    std::os::unix::fs::symlink("socket", folder.name("link")).expect("the name is free");
    ask(side, connect_to(&folder.name("link")));
}

/// Bound at another path than the one that it is found at.
fn serves_at_a_renamed_path(side: &Side) {
    let folder = Folder::make(side);
    let listener = listen_at(&folder.name("before"));
    std::fs::rename(folder.name("before"), folder.name("socket")).expect("it is there");
    side.sync("listening");
    serve(side, side.accept(listener));
}

fn serves_twice_at_a_path(side: &Side) {
    let folder = Folder::make(side);
    for _ in 0..2 {
        let listener = listen_at(&folder.name("socket"));
        side.sync("listening");
        serve(side, side.accept(listener));
        calls::close(listener).expect("close");
        std::fs::remove_file(folder.name("socket")).expect("it is there");
    }
}

fn asks_twice_at_a_path(side: &Side) {
    let folder = Folder::theirs(side);
    for _ in 0..2 {
        side.sync("listening");
        ask(side, connect_to(&folder.name("socket")));
    }
}

/// A socket is connected, and takes bytes, before anybody accepts it.
fn accepts_late(side: &Side) {
    let listener = side.listen();
    side.sync("sent");
    let fd = side.accept(listener);
    let _ = calls::unread(fd);
    side.sync("accepted");
    assert_eq!(receive_exactly(fd, 200), b"0123456789".repeat(20));
    serve(side, fd);
}

fn sends_early(side: &Side) {
    let fd = side.connect();
    look(fd);
    let _ = calls::peer_credentials(fd);
    for _ in 0..20 {
        assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
        let _ = calls::recv(fd, 1, libc::MSG_DONTWAIT);
    }
    look(fd);
    side.sync("sent");
    side.sync("accepted");
    ask(side, fd);
}

fn accepts_what_is_closed(side: &Side) {
    let listener = side.listen();
    side.sync("closed");
    let fd = side.accept(listener);
    look(fd);
    let _ = calls::send(fd, b"x", libc::MSG_NOSIGNAL);
    assert_eq!(receive_exactly(fd, 200), b"0123456789".repeat(20));
    let _ = calls::recvfrom_with(fd, 1, 110, 0);
}

fn sends_and_closes(side: &Side) {
    let fd = side.connect();
    for _ in 0..20 {
        assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    }
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn closes_its_listener(side: &Side) {
    let listener = side.listen();
    side.sync("sent");
    calls::close(listener).expect("close");
    side.sync("closed");
}

fn is_never_accepted(side: &Side) {
    let fd = side.connect();
    for _ in 0..20 {
        assert_eq!(calls::send(fd, b"0123456789", 0), Ok(10));
    }
    side.sync("sent");
    side.sync("closed");
    look(fd);
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
    let _ = calls::pending_error(fd);
    let _ = calls::recv(fd, 10, 0);
    let _ = calls::recv(fd, 10, 0);
}

const MANY: usize = 5;

/// The last one first: which of them is which, only the connections themselves tell.
fn accepts_many(side: &Side) {
    let listener = side.listen();
    side.sync("connected");
    let fds: Vec<Fd> = (0..MANY).map(|_| side.accept(listener)).collect();
    for fd in fds.into_iter().rev() {
        assert_eq!(receive_exactly(fd, 5), b"early");
        serve(side, fd);
    }
}

fn connects_many(side: &Side) {
    let destination = side.destination();
    let fds: Vec<Fd> = (0..MANY)
        .map(|_| {
            let fd = side.connect_to(destination);
            assert_eq!(calls::send(fd, b"early", 0), Ok(5));
            fd
        })
        .collect();
    side.sync("connected");
    for fd in fds.into_iter().rev() {
        ask(side, fd);
    }
}

/// What socketpair(2) makes is left alone.
fn talks_to_a_child(side: &Side) {
    let (here, there) = calls::unix_pair().expect("socketpair");
    let child = fork(Leave::Exit, || {
        quietly(|| calls::close(here)).expect("close");
        let _ = quietly(|| echo(there));
    });
    calls::close(there).expect("close");
    request_echoes(here, 60, 3000);
    let _ = calls::name_of(here, true);
    calls::close(here).expect("close");
    child.wait_for_success();
    side.sync("done");
}

fn does_nothing(side: &Side) {
    side.sync("done");
}

/// Messages before those of which one end moves one by a call that no hook sees.
const SEEN: usize = 4;
/// Bytes of each that follows: those that wait somewhere when the two meet must not hide the others.
const LONG: usize = 5000;

fn serves_reading_unseen(side: &Side) {
    let fd = side.accept(side.listen());
    answer_echoes(fd, SEEN, 1);
    assert_eq!(calls::unseen_recv(fd, 10), Ok(b"unseen".to_vec()));
    send_all(fd, b"answer");
    echo(fd);
}

fn serves_often(side: &Side) {
    let fd = side.accept(side.listen());
    answer_echoes(fd, SEEN, 1);
    assert_eq!(receive_exactly(fd, 6), b"unseen");
    send_all(fd, b"answer");
    echo(fd);
}

fn asks_often(side: &Side) {
    let fd = side.connect_to(side.destination());
    request_echoes(fd, SEEN, 1);
    send_all(fd, b"unseen");
    assert_eq!(receive_exactly(fd, 6), b"answer");
    request_echoes(fd, 50, LONG);
}

fn asks_reading_unseen(side: &Side) {
    let fd = side.connect_to(side.destination());
    request_echoes(fd, SEEN, 1);
    send_all(fd, b"unseen");
    assert_eq!(calls::unseen_recv(fd, 10), Ok(b"answer".to_vec()));
    request_echoes(fd, 50, LONG);
}
