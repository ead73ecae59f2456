//! How connections begin, and which of them are left on TCP.

use libc::{EPOLLIN, POLLOUT, SOCK_CLOEXEC, SOCK_NONBLOCK};
use thallus_transport::arena::{State, View};

use super::peers::{echo, own_arenas, request_echoes, send_all};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, Leave, fork, quietly};
use crate::say;
use crate::side::{ARRIVAL, Side, await_readable, listening_port, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("nonblocking_connect", echoes_one, connects_nonblocking, Tally::Upgraded(1)),
    Behaviour::whole("nonblocking_connect_by_epoll", echoes_one, connects_by_epoll, Tally::Upgraded(1)),
    Behaviour::whole(
        "registered_before_it_connects",
        echoes_one,
        connects_what_is_registered,
        Tally::Upgraded(1),
    ),
    Behaviour::whole(
        "a_copy_registered_before_it_connects",
        echoes_one,
        connects_a_registered_copy,
        Tally::Upgraded(1),
    ),
    Behaviour::whole(
        "reported_once_before_it_connects",
        echoes_one,
        connects_what_has_been_reported,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("connect_twice", echoes_one, connects_twice, Tally::Upgraded(1)),
    Behaviour::whole("connect_refused", nobody_listens, is_refused, Tally::Upgraded(0)),
    Behaviour::whole("connect_refused_then_accepted", listens_late, is_refused_first, Tally::Upgraded(1)),
    Behaviour::whole("accept4_flags", accepts_with_flags, asks, Tally::Upgraded(1)),
    Behaviour::whole("listen_twice", listens_twice, asks_before_it_is_accepted, Tally::Upgraded(1)),
    Behaviour::whole("announced_by_another_first", takes_over, asks_sixty_times, Tally::AtLeast(20, 60)),
    // The client looks first at its second call, and then at its sixteenth.
    Behaviour::whole(
        "announced_after_the_client_has_looked",
        takes_over_late,
        asks_before_it_is_accepted,
        Tally::Upgraded(1),
    )
    .environment(&[("THALLUS_UPGRADE_AFTER", "2")]),
    Behaviour::whole("accept_without_anyone", accepts_nobody, asks, Tally::Upgraded(1)),
    Behaviour::whole("a_port_of_its_own", echoes_one, binds_first, Tally::Upgraded(1)),
    Behaviour::whole("the_same_addresses_again", echoes_three, connects_from_one_port, Tally::Upgraded(3)),
    Behaviour::whole("bytes_before_accept", accepts_late, writes_at_once, Tally::Upgraded(1)),
    Behaviour::whole("gone_before_accept", accepts_the_dead, writes_and_closes, Tally::Stayed(1)),
    Behaviour::whole("reset_while_it_is_young", writes_to_the_dead, writes_and_closes, Tally::Stayed(1))
        .tally(Tally::Mixed(0, &[("peer-without-thallus", 1)]), Tally::Stayed(1))
        .over_verbs(Tally::Mixed(0, &[("no-answer", 1)]), Tally::Stayed(1)),
    Behaviour::whole("server_speaks_first", speaks_first, listens_first, Tally::Upgraded(1)).over_verbs(
        Tally::Mixed(0, &[("peer-without-thallus", 1)]),
        Tally::Mixed(0, &[("peer-spoke-first", 1)]),
    ),
    Behaviour::whole("one_request_for_each_connection", answers_one_each, asks_one_each, Tally::Total(200)),
    Behaviour::whole("many_at_once", echoes_sixty, asks_on_sixty, Tally::Upgraded(60)),
    Behaviour::whole("nothing_is_hoped_for_any_more", reads_each_byte, writes_much, Tally::Total(1)),
    Behaviour::whole("never_used", accepts_and_waits, connects_and_waits, Tally::Stayed(1)),
    Behaviour::whole("undone_and_made_again", echoes_two, disconnects::<16>, Tally::Upgraded(2))
        .tally(Tally::Upgraded(2), Tally::Total(2)),
    Behaviour::whole("undone_by_two_bytes", echoes_two, disconnects::<2>, Tally::Upgraded(2))
        .tally(Tally::Upgraded(2), Tally::Total(2)),
    Behaviour::whole("copied_before", echoes_one, copies_first, Tally::Stayed(1))
        .alone(&["shared-before-upgrade"])
        // What the copy carries nobody counts.
        .tally(Tally::Stayed(1), Tally::Unknown),
    Behaviour::whole("shared_by_a_fork_before", echoes_one, forks_first, Tally::Stayed(1))
        .alone(&["shared-before-upgrade"])
        .tally(Tally::Stayed(1), Tally::Unknown),
    Behaviour::whole("passed_on_before", echoes_one, passes_first, Tally::Stayed(1))
        .alone(&["shared-before-upgrade"])
        .tally(Tally::Stayed(1), Tally::Unknown),
    Behaviour::whole("passed_on_and_moved_before", echoes_one, passes_and_moves_first, Tally::Stayed(1))
        .alone(&["shared-before-upgrade"])
        .tally(Tally::Stayed(1), Tally::Unknown),
    Behaviour::whole("with_itself", nothing, connects_to_itself, Tally::Upgraded(0))
        .tally(Tally::Upgraded(0), Tally::Stayed(1)),
    Behaviour::whole("both_ends_in_one_process", nothing, both_ends, Tally::Upgraded(0))
        .tally(Tally::Upgraded(0), Tally::Total(2))
        .by_itself(),
    Behaviour::whole(
        "over_the_hosts_own_address",
        echoes_on_any,
        connects_to_own_address,
        Tally::Upgraded(1),
    ),
    Behaviour::whole("client_of_another_user", echoes_one, asks_as_nobody, Tally::Upgraded(1)).needs_root(),
    Behaviour::whole("server_of_another_user", echoes_as_nobody, asks, Tally::Upgraded(1)).needs_root(),
    Behaviour::whole("two_other_users", echoes_as_nobody, asks_as_daemon, Tally::Upgraded(1)).needs_root(),
    Behaviour::whole("after_a_fork_that_failed", echoes_after_vain_fork, asks, Tally::Upgraded(1))
        .needs_root(),
    Behaviour::whole("backend_of_another_user", backend_as_nobody, asks, Tally::Stayed(1)).needs_root(),
    Behaviour::whole("port_not_listed", echoes_one, asks, Tally::Mixed(0, &[("not-selected", 1)]))
        .environment(&[("THALLUS_PORTS", "1,2-3")]),
    Behaviour::whole("port_listed", echoes_one, asks, Tally::Upgraded(1))
        .environment(&[("THALLUS_PORTS", "1,1024-65535")]),
    Behaviour::whole("without_a_fabric", echoes_one, asks, Tally::Mixed(0, &[("disabled", 1)]))
        .environment(&[("THALLUS_FABRIC", "off")]),
    Behaviour::whole("by_shared_memory_only", echoes_one, asks, Tally::Upgraded(1))
        .environment(&[("THALLUS_FABRIC", "shm")]),
    Behaviour::whole("switched_off", echoes_one, asks, Tally::Unknown).environment(&[("THALLUS", "off")]),
    Behaviour::whole("wrong_settings", echoes_one, asks, Tally::Upgraded(1)).environment(&[
        ("THALLUS_PORTS", "http"),
        ("THALLUS_FABRIC", "carrier-pigeon"),
        ("THALLUS_SPIN_US", "-1"),
        ("THALLUS_RING", "huge"),
    ]),
    Behaviour::whole("a_small_ring", echoes_one, asks_much, Tally::Upgraded(1))
        .environment(&[("THALLUS_RING", "64K")]),
];

/// Messages that a client sends before it is accepted: calls enough to look for the server's announcement twice if it looks at
/// the first, and once if it looks at the second.
const ASKED_EARLY: usize = 12;

const NOBODY: u32 = 65534;
const DAEMON: u32 = 1;

fn nothing(_side: &Side) {}

fn echoes(side: &Side, count: usize) {
    let listener = side.listen();
    for _ in 0..count {
        let fd = side.accept(listener);
        say!("echoed {}", echo(fd));
        calls::close(fd).expect("close");
    }
}

pub(super) fn echoes_one(side: &Side) {
    echoes(side, 1);
}

fn echoes_two(side: &Side) {
    echoes(side, 2);
}

fn echoes_three(side: &Side) {
    echoes(side, 3);
}

/// As nginx does, to set the backlog.
fn listens_twice(side: &Side) {
    let listener = side.listen_quietly();
    calls::listen(listener, 128).expect("listen");
    side.tell(u64::from(listening_port(listener)));
    echoes_what_was_asked(side, listener);
}

/// Accepts what [`asks_before_it_is_accepted`].
fn echoes_what_was_asked(side: &Side, listener: Fd) {
    side.sync("asked");
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
}

fn asks_before_it_is_accepted(side: &Side) {
    let fd = side.connect();
    for _ in 0..ASKED_EARLY {
        send_all(fd, &[0; 10]);
    }
    side.sync("asked");
    assert_eq!(receive_exactly(fd, 10 * ASKED_EARLY), vec![0; 10 * ASKED_EARLY]);
    request_echoes(fd, 30, 500);
    say!("30 echoes");
}

fn takes_over(side: &Side) {
    let listener = take_over(side);
    for _ in 0..60 {
        let fd = side.accept(listener);
        quietly(|| echo(fd));
        quietly(|| calls::close(fd)).expect("close");
    }
}

fn takes_over_late(side: &Side) {
    let listener = take_over(side);
    echoes_what_was_asked(side, listener);
}

/// Listens on a port that another process has listened on first, which ends: as when a server replaces another.
fn take_over(side: &Side) -> Fd {
    let listen_at = |port| {
        quietly(|| {
            let listener = calls::stream_socket(side.family, SOCK_CLOEXEC).expect("socket");
            calls::set_option(listener, libc::SOL_SOCKET, libc::SO_REUSEPORT, 1).expect("SO_REUSEPORT");
            calls::bind(listener, side.family.own(port)).expect("bind");
            calls::listen(listener, 64).expect("listen");
            listener
        })
    };
    let (reading, writing) = calls::pipe().expect("pipe");
    let (held, holding) = calls::pipe().expect("pipe");
    let first = fork(Leave::AtOnce, || {
        let port = listening_port(listen_at(0));
        quietly(|| {
            calls::close(holding).expect("close");
            calls::write(writing, &port.to_be_bytes()).expect("write");
            // Until the parent listens as well.
            assert_eq!(calls::read(held, 1), Ok(Vec::new()));
        });
    });
    let port = quietly(|| calls::read(reading, 2)).expect("read");
    let port = u16::from_be_bytes(port.try_into().expect("two bytes"));
    let listener = listen_at(port);
    quietly(|| calls::close(holding)).expect("close");
    first.wait_for_success();
    side.tell(u64::from(port));
    listener
}

fn asks_sixty_times(side: &Side) {
    let destination = side.destination();
    for _ in 0..60 {
        let fd = quietly(|| side.connect_to(destination));
        quietly(|| request_echoes(fd, 20, 100));
        quietly(|| calls::close(fd)).expect("close");
    }
}

fn asks(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 30, 500);
    say!("30 echoes");
}

fn asks_much(side: &Side) {
    let fd = side.connect();
    request_echoes(fd, 300, 60_000);
    say!("300 echoes");
}

fn connects_nonblocking(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, SOCK_NONBLOCK | SOCK_CLOEXEC).expect("socket");
    assert_eq!(calls::connect(fd, destination), Err(Errno::EINPROGRESS));
    assert_eq!(quietly(|| calls::poll(&[(fd, POLLOUT)], ARRIVAL)), Ok(vec![POLLOUT]));
    assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
    let _ = calls::status(fd);
    let _ = calls::closes_on_exec(fd);
    for round in 0..30u64 {
        assert_eq!(calls::send(fd, &round.to_be_bytes(), libc::MSG_NOSIGNAL), Ok(8));
        assert_eq!(calls::poll(&[(fd, libc::POLLIN)], -1), Ok(vec![libc::POLLIN]));
        assert_eq!(calls::recv(fd, 100, 0), Ok(round.to_be_bytes().to_vec()));
    }
}

fn connects_by_epoll(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    let epfd = calls::epoll_create().expect("epoll_create1");
    assert_eq!(calls::connect(fd, destination), Err(Errno::EINPROGRESS));
    calls::epoll_add(epfd, fd, libc::EPOLLOUT, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(quietly(|| calls::epoll_wait(epfd, 4, -1)).map(|ready| ready.len()), Ok(1));
    assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
    calls::epoll_modify(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_MOD");
    for round in 0..30u64 {
        assert_eq!(calls::send(fd, &round.to_be_bytes(), 0), Ok(8));
        assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
        assert_eq!(calls::recv(fd, 100, 0), Ok(round.to_be_bytes().to_vec()));
    }
}

/// As nginx does with the sockets to its upstreams.
fn connects_what_is_registered(side: &Side) {
    const ALL: libc::c_int = EPOLLIN | libc::EPOLLOUT | libc::EPOLLRDHUP | libc::EPOLLET;
    let destination = side.destination();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let other = calls::epoll_create().expect("epoll_create1");
    // Closed unconnected, so that the next socket, which has its number, is in another set only.
    let unused = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    calls::epoll_add(other, unused, ALL, 3).expect("EPOLL_CTL_ADD");
    calls::close(unused).expect("close");
    let fd = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    calls::epoll_add(other, fd, EPOLLIN, 4).expect("EPOLL_CTL_ADD");
    calls::epoll_delete(other, fd).expect("EPOLL_CTL_DEL");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    calls::epoll_modify(epfd, fd, ALL, 2).expect("EPOLL_CTL_MOD");
    assert_eq!(calls::connect(fd, destination), Err(Errno::EINPROGRESS));
    asks_by_events(epfd, fd, 2);
    assert_eq!(quietly(|| calls::epoll_wait(other, 4, 0)).map(|ready| ready.len()), Ok(0));
}

/// A one-shot registration that has told of the hang-up of what is not connected tells nothing more until it is asked for more.
fn connects_what_has_been_reported(side: &Side) {
    let destination = side.destination();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    let once = EPOLLIN | libc::EPOLLONESHOT;
    calls::epoll_add(epfd, fd, once, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
    calls::connect(fd, destination).expect("connect");
    for round in 0..30u64 {
        assert_eq!(calls::send(fd, &round.to_be_bytes(), 0), Ok(8));
        await_readable(fd);
        assert_eq!(quietly(|| calls::epoll_wait(epfd, 4, 0)).map(|ready| ready.len()), Ok(0));
        assert_eq!(receive_exactly(fd, 8), round.to_be_bytes());
    }
    calls::epoll_modify(epfd, fd, once, 2).expect("EPOLL_CTL_MOD");
    assert_eq!(calls::send(fd, b"more", 0), Ok(4));
    assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
    assert_eq!(receive_exactly(fd, 4), b"more");
}

fn connects_a_registered_copy(side: &Side) {
    let destination = side.destination();
    let epfd = calls::epoll_create().expect("epoll_create1");
    let original = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    let fd = calls::dup(original).expect("dup");
    calls::close(original).expect("close");
    calls::epoll_add(epfd, fd, EPOLLIN | libc::EPOLLOUT | libc::EPOLLET, 2).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::connect(fd, destination), Err(Errno::EINPROGRESS));
    asks_by_events(epfd, fd, 2);
}

/// Asks for echoes on a connection that is in a set, edge-triggered, as `data`.
pub(super) fn asks_by_events(epfd: Fd, fd: Fd, data: u64) {
    let wait = |for_what: libc::c_int| {
        quietly(|| {
            loop {
                let ready = calls::epoll_wait(epfd, 4, -1).expect("epoll_wait");
                assert!(ready.iter().all(|ready| ready.data == data));
                if ready.iter().any(|ready| ready.has(for_what)) {
                    return;
                }
            }
        });
    };
    wait(libc::EPOLLOUT);
    assert_eq!(calls::pending_error(fd), Ok(Errno(0)));
    for round in 0..30u64 {
        assert_eq!(calls::send(fd, &round.to_be_bytes(), 0), Ok(8));
        wait(EPOLLIN);
        assert_eq!(calls::recv(fd, 100, 0), Ok(round.to_be_bytes().to_vec()));
        assert_eq!(quietly(|| calls::recv(fd, 100, 0)), Err(Errno::EAGAIN));
    }
}

/// As hiredis does to learn how its connect went.
fn connects_twice(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    assert_eq!(calls::connect(fd, destination), Err(Errno::EINPROGRESS));
    assert_eq!(quietly(|| calls::poll(&[(fd, POLLOUT)], ARRIVAL)), Ok(vec![POLLOUT]));
    let _ = calls::connect(fd, destination);
    assert_eq!(calls::connect(fd, destination), Err(Errno::EISCONN));
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    request_echoes(fd, 30, 500);
    assert_eq!(calls::connect(fd, destination), Err(Errno::EISCONN));
}

/// Tells a port that nobody listens on.
fn nobody_listens(side: &Side) {
    let listener = side.listen_quietly();
    let port = listening_port(listener);
    quietly(|| calls::close(listener)).expect("close");
    side.tell(u64::from(port));
    side.sync("done");
}

fn is_refused(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    assert_eq!(calls::connect(fd, destination), Err(Errno::ECONNREFUSED));
    assert!(calls::send(fd, b"x", libc::MSG_NOSIGNAL).is_err());
    let _ = calls::recv(fd, 1, 0);
    let _ = calls::poll(&[(fd, libc::POLLIN | POLLOUT)], 0);
    calls::close(fd).expect("close");
    let fd = calls::stream_socket(side.family, SOCK_NONBLOCK).expect("socket");
    let _ = quietly(|| calls::connect(fd, destination));
    let _ = quietly(|| calls::poll(&[(fd, POLLOUT)], ARRIVAL));
    let _ = calls::pending_error(fd);
    side.sync("done");
}

fn listens_late(side: &Side) {
    let listener = quietly(|| calls::stream_socket(side.family, 0)).expect("socket");
    quietly(|| calls::bind(listener, side.family.own(0))).expect("bind");
    side.tell(u64::from(listening_port(listener)));
    side.sync("refused");
    quietly(|| calls::listen(listener, 5)).expect("listen");
    side.sync("listening");
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
}

fn is_refused_first(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    assert_eq!(calls::connect(fd, destination), Err(Errno::ECONNREFUSED));
    side.sync("refused");
    side.sync("listening");
    // Linux lets the same socket try again.
    assert_eq!(calls::connect(fd, destination), Ok(0));
    request_echoes(fd, 30, 500);
    say!("30 echoes");
}

fn accepts_with_flags(side: &Side) {
    let listener = side.listen();
    await_readable(listener);
    let fd = calls::accept4(listener, SOCK_NONBLOCK | SOCK_CLOEXEC).expect("accept4");
    let _ = calls::status(fd);
    let _ = calls::closes_on_exec(fd);
    calls::set_nonblocking(fd, false).expect("FIONBIO");
    say!("echoed {}", echo(fd));
    assert_eq!(calls::accept4(listener, 0x1234_5678), Err(Errno::EINVAL));
}

fn accepts_nobody(side: &Side) {
    let listener = side.listen_quietly();
    calls::set_nonblocking(listener, true).expect("FIONBIO");
    assert_eq!(calls::accept(listener), Err(Errno::EAGAIN));
    side.tell(u64::from(listening_port(listener)));
    await_readable(listener);
    let fd = calls::accept(listener).expect("accept");
    // Linux does not hand O_NONBLOCK on to what a listener accepts.
    let _ = calls::status(fd);
    say!("echoed {}", echo(fd));
    assert_eq!(calls::accept(fd), Err(Errno::EINVAL));
    assert_eq!(calls::recv(listener, 1, 0), Err(Errno::ENOTCONN));
    assert_eq!(calls::send(listener, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
}

fn bound_socket(side: &Side, port: u16) -> Fd {
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    calls::set_option(fd, libc::SOL_SOCKET, libc::SO_REUSEADDR, 1).expect("SO_REUSEADDR");
    calls::bind(fd, side.family.own(port)).expect("bind");
    fd
}

fn binds_first(side: &Side) {
    let destination = side.destination();
    let fd = bound_socket(side, 0);
    calls::connect(fd, destination).expect("connect");
    request_echoes(fd, 30, 500);
    say!("30 echoes");
}

/// Three connections, one after the other, between the same two addresses and ports.
fn connects_from_one_port(side: &Side) {
    let destination = side.destination();
    let mut port = 0;
    for _ in 0..3 {
        let fd = bound_socket(side, port);
        port = listening_port(fd);
        calls::connect(fd, destination).expect("connect");
        request_echoes(fd, 30, 500);
        // The server ends first and keeps the port waiting, unless this side has reset: then nothing lingers.
        calls::set_linger(fd, 0).expect("SO_LINGER");
        calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
        assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
        calls::close(fd).expect("close");
    }
}

fn accepts_late(side: &Side) {
    let listener = side.listen();
    side.sync("sent");
    let fd = side.accept(listener);
    assert_eq!(receive_exactly(fd, 5), b"early");
    assert_eq!(calls::send(fd, b"late", 0), Ok(4));
    say!("echoed {}", echo(fd));
}

fn writes_at_once(side: &Side) {
    let fd = side.connect();
    assert_eq!(calls::send(fd, b"early", 0), Ok(5));
    side.sync("sent");
    assert_eq!(receive_exactly(fd, 4), b"late");
    request_echoes(fd, 30, 500);
}

fn accepts_the_dead(side: &Side) {
    let listener = side.listen();
    side.sync("closed");
    let fd = side.accept(listener);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"early".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
}

/// Makes more calls than an attempt to leave TCP needs, on a connection that its first write has reset.
fn writes_to_the_dead(side: &Side) {
    let listener = side.listen();
    side.sync("closed");
    let fd = side.accept(listener);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"early".to_vec()));
    assert_eq!(calls::send(fd, b"late", libc::MSG_NOSIGNAL), Ok(4));
    for _ in 0..12 {
        assert_eq!(calls::send(fd, b"late", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
    }
}

fn writes_and_closes(side: &Side) {
    let fd = side.connect();
    assert_eq!(calls::send(fd, b"early", 0), Ok(5));
    calls::close(fd).expect("close");
    side.sync("closed");
}

fn speaks_first(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    send_all(fd, b"220 at your service\r\n");
    say!("echoed {}", echo(fd));
}

fn listens_first(side: &Side) {
    let fd = side.connect();
    assert_eq!(receive_exactly(fd, 21), b"220 at your service\r\n");
    request_echoes(fd, 30, 500);
}

fn answers_one_each(side: &Side) {
    let listener = side.listen();
    quietly(|| {
        for _ in 0..200 {
            let fd = side.accept(listener);
            echo(fd);
            calls::close(fd).expect("close");
        }
    });
    say!("200 served");
}

fn asks_one_each(side: &Side) {
    let destination = side.destination();
    quietly(|| {
        for round in 0..200 {
            let fd = side.connect_to(destination);
            request_echoes(fd, 1, 100 + round);
            calls::close(fd).expect("close");
        }
    });
    say!("200 asked");
}

const SIXTY: usize = 60;

fn echoes_sixty(side: &Side) {
    let listener = side.listen();
    std::thread::scope(|scope| {
        for _ in 0..SIXTY {
            let fd = quietly(|| side.accept(listener));
            scope.spawn(move || {
                echo(fd);
                quietly(|| calls::close(fd)).expect("close");
            });
        }
    });
    say!("{SIXTY} served");
}

fn asks_on_sixty(side: &Side) {
    let destination = side.destination();
    let fds: Vec<Fd> = (0..SIXTY).map(|_| quietly(|| side.connect_to(destination))).collect();
    for _ in 0..30 {
        for &fd in &fds {
            request_echoes(fd, 1, 100);
        }
    }
    for fd in fds {
        quietly(|| calls::close(fd)).expect("close");
    }
    say!("{SIXTY} answered");
}

/// More calls than twice those after which a server expects no offer any more: it looks whenever there have been twice as many.
const MANY_CALLS: usize = 140_000;

fn reads_each_byte(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    for _ in 0..MANY_CALLS {
        assert_eq!(quietly(|| calls::recv(fd, 1, 0)).map(|bytes| bytes.len()), Ok(1));
    }
    let arenas = own_arenas();
    for (_, block) in arenas.iter().flat_map(View::blocks).filter(|(_, block)| block.connection().is_some()) {
        assert_ne!(block.state(), State::Plain, "it may still leave TCP");
    }
    side.sync("done");
}

fn writes_much(side: &Side) {
    let fd = side.connect();
    send_all(fd, &[b'm'; MANY_CALLS]);
    side.sync("done");
}

fn accepts_and_waits(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    side.sync("connected");
    side.sync("done");
    calls::close(fd).expect("close");
}

fn connects_and_waits(side: &Side) {
    let fd = side.connect();
    side.sync("connected");
    side.sync("done");
    calls::close(fd).expect("close");
}

/// A socket that is connected, disconnected by so many bytes of `AF_UNSPEC`, of which the kernel reads two, and connected again.
fn disconnects<const BYTES: usize>(side: &Side) {
    let destination = side.destination();
    let fd = side.connect_to(destination);
    request_echoes(fd, 30, 500);
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
    calls::disconnect_by(fd, BYTES).expect("connect to AF_UNSPEC");
    assert!(calls::peer_address(fd).is_err());
    calls::connect(fd, destination).expect("connect");
    request_echoes(fd, 30, 500);
}

/// The copy is the connection's, too.
pub(super) fn copies_first(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    let copy = calls::dup(fd).expect("dup");
    calls::connect(fd, destination).expect("connect");
    request_echoes(fd, 60, 500);
    request_echoes(copy, 60, 500);
}

/// A child connects, and the parent goes on.
pub(super) fn forks_first(side: &Side) {
    let destination = side.destination();
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    let child = calls::fork(calls::Leave::Exit, || {
        quietly(|| calls::connect(fd, destination)).expect("connect");
        request_echoes(fd, 60, 500);
    });
    assert_eq!(child.wait(), calls::End::Exit(0));
    request_echoes(fd, 60, 500);
}

/// A child is sent a socket, and goes on once it has been connected and used here.
pub(super) fn passes_first(side: &Side) {
    passes_before_it_connects(side, |fd| fd);
}

/// As above, and the socket gets another number before it connects.
pub(super) fn passes_and_moves_first(side: &Side) {
    passes_before_it_connects(side, |fd| {
        let moved = calls::dup(fd).expect("dup");
        calls::close(fd).expect("close");
        moved
    });
}

fn passes_before_it_connects(side: &Side, moved: impl FnOnce(Fd) -> Fd) {
    let destination = side.destination();
    let (ours, theirs) = calls::unix_pair().expect("socketpair");
    let child = calls::fork(Leave::Exit, || {
        quietly(|| calls::close(ours)).expect("close");
        let passed = quietly(|| calls::recvmsg(theirs, &[4], 1, 0)).expect("recvmsg").fds[0];
        assert_eq!(quietly(|| calls::recv(theirs, 1, 0)), Ok(b"t".to_vec()));
        request_echoes(passed, 60, 500);
    });
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    assert_eq!(calls::send_fd(ours, b"pass", fd), Ok(4));
    let fd = moved(fd);
    calls::connect(fd, destination).expect("connect");
    request_echoes(fd, 60, 500);
    assert_eq!(calls::send(ours, b"t", 0), Ok(1));
    assert_eq!(child.wait(), calls::End::Exit(0));
    request_echoes(fd, 60, 500);
}

/// A socket bound to a port and connected to the same port is its own peer.
fn connects_to_itself(side: &Side) {
    let fd = bound_socket(side, 0);
    let own = quietly(|| calls::local_address(fd)).expect("getsockname");
    calls::connect(fd, own).expect("connect");
    for _ in 0..30 {
        assert_eq!(calls::send(fd, b"echo", 0), Ok(4));
        assert_eq!(calls::recv(fd, 10, 0), Ok(b"echo".to_vec()));
    }
}

/// Client and server in one thread of one process.
fn both_ends(side: &Side) {
    let listener = side.listen_quietly();
    let client = side.connect_to(side.family.own(listening_port(listener)));
    let server = side.accept(listener);
    for _ in 0..30 {
        send_all(client, b"question");
        assert_eq!(receive_exactly(server, 8), b"question");
        send_all(server, b"answer");
        assert_eq!(receive_exactly(client, 6), b"answer");
    }
    calls::close(server).expect("close");
    assert_eq!(calls::recv(client, 1, 0), Ok(vec![]));
}

fn echoes_on_any(side: &Side) {
    let listener = quietly(|| {
        let listener = calls::stream_socket(side.family, 0).expect("socket");
        calls::bind(listener, side.family.unspecified()).expect("bind");
        calls::listen(listener, 5).expect("listen");
        listener
    });
    side.tell(u64::from(listening_port(listener)));
    let fd = quietly(|| side.accept(listener));
    say!("echoed {}", echo(fd));
}

fn connects_to_own_address(side: &Side) {
    let port = side.told() as u16;
    // A host without a network has no other address than loopback.
    let address = side.family.own_address(port).unwrap_or(side.family.own(port));
    let fd = side.connect_to(address);
    request_echoes(fd, 30, 500);
    say!("30 echoes");
}

fn asks_as_nobody(side: &Side) {
    calls::become_user(NOBODY, NOBODY).expect("setuid");
    asks(side);
}

fn asks_as_daemon(side: &Side) {
    calls::become_user(DAEMON, DAEMON).expect("setuid");
    asks(side);
}

fn echoes_as_nobody(side: &Side) {
    let listener = side.listen();
    calls::become_user(NOBODY, NOBODY).expect("setuid");
    let fd = side.accept(listener);
    say!("echoed {}", echo(fd));
}

/// As a server of which a limit is reached. It is the only process that has the connection, as before.
fn echoes_after_vain_fork(side: &Side) {
    let listener = side.listen();
    // Of root's there may be as many as it likes.
    calls::become_user(NOBODY, NOBODY).expect("setuid");
    let fd = side.accept(listener);
    calls::limit_resource(libc::RLIMIT_NPROC, 0);
    assert_eq!(calls::fork_in_vain(), Errno::EAGAIN);
    say!("echoed {}", echo(fd));
}

/// As sshd does: root accepts, and a child of another user serves. It cannot prove that the connection is its own:
/// a socket belongs to the user who made it.
fn backend_as_nobody(side: &Side) {
    let listener = side.listen();
    let fd = side.accept(listener);
    let child = fork(Leave::Exit, || {
        calls::become_user(NOBODY, NOBODY).expect("setuid");
        say!("echoed {}", echo(fd));
    });
    calls::close(fd).expect("close");
    child.wait_for_success();
}
