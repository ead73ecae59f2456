//! Descriptors: copies, numbers, and programs that close whatever they find.

use libc::{EPOLLIN, O_RDONLY, POLLIN};

use super::peers::{demand, echo, ends_on_demand, request_echoes, sends_on_demand, stop};
use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Fd, quietly};
use crate::say;
use crate::side::{Side, await_hangup, await_readable, await_unread, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("a_copy_works", copy_works, sends_on_demand),
    Behaviour::connected("a_copy_outlives_the_original", copy_outlives, sends_on_demand),
    Behaviour::connected("end_only_after_the_last_copy", end_after_last_copy, awaits_the_end),
    Behaviour::connected("shutdown_reaches_all_copies", shutdown_of_copies, awaits_the_end),
    Behaviour::connected("flags_are_shared_by_copies", flags_of_copies, sends_on_demand),
    Behaviour::connected("every_way_to_copy", every_way_to_copy, sends_on_demand),
    Behaviour::connected("dup2_over_the_connection", dup2_over, awaits_the_end),
    Behaviour::connected("dup2_onto_itself", dup2_onto_itself, sends_on_demand),
    Behaviour::connected("dup2_of_another_connection_over_it", dup2_of_another, two_connections)
        .tally(Tally::Upgraded(2), Tally::Upgraded(2)),
    Behaviour::connected("closed_number_is_reused", closed_number_is_reused, two_connections)
        .tally(Tally::Upgraded(2), Tally::Upgraded(2)),
    Behaviour::connected("number_of_one_closed_unseen_is_accepted", accepted_in_its_place, awaits_the_end),
    Behaviour::connected("lowest_free_number", lowest_free_number, sends_on_demand),
    Behaviour::connected("listing_of_open_files", listing, sends_on_demand),
    Behaviour::connected("moved_to_a_high_number", moved_high, sends_on_demand),
    Behaviour::connected("moved_far_up", moved_far_up, sends_on_demand),
    Behaviour::whole("connected_far_up", echoes_far_up, asks_far_up, Tally::Upgraded(1)),
    Behaviour::connected("moved_to_standard_input", moved_to_stdin, echoes_until_the_end),
    Behaviour::connected("not_replaced_by_what_fails", not_replaced, sends_on_demand),
    Behaviour::connected("close_range_spares_it", close_range_spares, sends_on_demand),
    Behaviour::connected("close_range_takes_it", close_range_takes, awaits_the_end),
    Behaviour::connected("close_range_marks_it", close_range_marks, sends_on_demand),
    Behaviour::connected("everything_else_is_closed", everything_else_closed, sends_on_demand),
    Behaviour::connected("everything_is_closed_one_by_one", closed_one_by_one, sends_on_demand),
    Behaviour::connected("closefrom", closefrom, sends_on_demand),
    Behaviour::whole(
        "everything_is_closed_before_connecting",
        closes_before_listening,
        closes_before_connecting,
        Tally::Upgraded(1),
    ),
    Behaviour::connected("close_on_exec_is_kept", close_on_exec, sends_on_demand),
    Behaviour::connected("opened_again_through_proc", opened_again, sends_on_demand),
    Behaviour::connected("low_limit", low_limit, sends_on_demand),
    Behaviour::connected("many_copies", many_copies, ends_on_demand),
    Behaviour::connected("selected_after_moving", moved_and_waited_for, sends_on_demand),
];

fn awaits_the_end(side: &Side, fd: Fd) {
    side.sync("half way");
    let _ = calls::poll(&[(fd, POLLIN)], 0);
    side.sync("go on");
    assert_eq!(calls::recv(fd, 100, 0), Ok(vec![]));
    side.sync("done");
}

fn echoes_until_the_end(_side: &Side, fd: Fd) {
    say!("echoed {}", echo(fd));
}

/// What is accepted as its number is none of its: no byte of that is taken when the number is found to be another's.
fn accepted_in_its_place(side: &Side, fd: Fd) {
    side.sync("half way");
    side.sync("go on");
    let (listener, client) = quietly(calls::packet_sockets);
    assert_eq!(calls::send(client, b"for another", 0), Ok(11));
    calls::unseen_close(fd);
    assert_eq!(quietly(|| calls::accept4(listener, 0)), Ok(fd));
    assert_eq!(calls::recv(fd, 100, libc::MSG_DONTWAIT), Ok(b"for another".to_vec()));
    side.sync("done");
}

fn copy_works(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    demand(side);
    await_readable(copy);
    assert_eq!(calls::recv(copy, 2, 0), Ok(b"da".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"ta".to_vec()));
    let _ = calls::unread(copy);
    assert_eq!(calls::send(copy, b"x", 0), Ok(1));
    assert_eq!(calls::send(fd, b"y", 0), Ok(1));
    let _ = calls::local_address(copy);
    stop(side);
}

fn copy_outlives(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    calls::close(fd).expect("close");
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EBADF));
    demand(side);
    await_readable(copy);
    assert_eq!(calls::recv(copy, 10, 0), Ok(b"data".to_vec()));
    let again = calls::dup(copy).expect("dup");
    calls::close(copy).expect("close");
    demand(side);
    await_readable(again);
    assert_eq!(calls::recv(again, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn end_after_last_copy(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    calls::close(fd).expect("close");
    side.sync("half way");
    side.sync("go on");
    calls::close(copy).expect("close");
    side.sync("done");
}

fn shutdown_of_copies(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    side.sync("half way");
    side.sync("go on");
    calls::shutdown(copy, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
    side.sync("done");
}

fn flags_of_copies(side: &Side, fd: Fd) {
    let copy = calls::dup(fd).expect("dup");
    calls::set_nonblocking(copy, true).expect("FIONBIO");
    let _ = calls::status(fd);
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EAGAIN));
    let status = calls::status(copy).expect("F_GETFL");
    calls::set_status(fd, status & !libc::O_NONBLOCK).expect("F_SETFL");
    let _ = calls::status(copy);
    calls::set_close_on_exec(copy, true).expect("F_SETFD");
    let _ = calls::closes_on_exec(fd);
    let _ = calls::closes_on_exec(copy);
    stop(side);
}

fn every_way_to_copy(side: &Side, fd: Fd) {
    let ways: &[fn(Fd) -> Fd] = &[
        |fd| calls::dup(fd).expect("dup"),
        |fd| calls::dup2(fd, 40).expect("dup2"),
        |fd| calls::dup3(fd, 41, libc::O_CLOEXEC).expect("dup3"),
        |fd| calls::dup_from(fd, 50).expect("F_DUPFD"),
        |fd| calls::dup_cloexec_from(fd, 60).expect("F_DUPFD_CLOEXEC"),
    ];
    for way in ways {
        let copy = way(fd);
        let _ = calls::closes_on_exec(copy);
        demand(side);
        await_readable(copy);
        assert_eq!(calls::read(copy, 10), Ok(b"data".to_vec()));
        calls::close(copy).expect("close");
    }
    assert_eq!(calls::dup3(fd, fd, 0), Err(Errno::EINVAL));
    assert_eq!(calls::dup3(fd, 45, libc::O_NONBLOCK), Err(Errno::EINVAL));
    stop(side);
}

/// How the JDK closes a socket that another thread may be using.
fn dup2_over(side: &Side, fd: Fd) {
    let (reading, _writing) = calls::pipe().expect("pipe");
    side.sync("half way");
    side.sync("go on");
    assert_eq!(calls::dup2(reading, fd), Ok(fd));
    let _ = calls::file_kind(fd);
    let _ = calls::poll(&[(fd, POLLIN)], 0);
    side.sync("done");
}

fn dup2_onto_itself(side: &Side, fd: Fd) {
    assert_eq!(calls::dup2(fd, fd), Ok(fd));
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

/// Makes a second connection, between the same two sides.
fn second_connection(side: &Side) -> Fd {
    quietly(|| side.connection())
}

fn two_connections(side: &Side, fd: Fd) {
    let second = second_connection(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    request_echoes(second, 30, 500);
    side.sync("done");
}

fn dup2_of_another(side: &Side, fd: Fd) {
    let second = second_connection(side);
    assert_eq!(calls::dup2(second, fd), Ok(fd));
    calls::close(second).expect("close");
    for _ in 0..3 {
        await_readable(fd);
    }
    serve_until(fd, side);
}

fn serve_until(fd: Fd, side: &Side) {
    for round in 0..30usize {
        let request = receive_exactly(fd, 1 + round * 7919 % 500);
        super::peers::send_all(fd, &request);
    }
    side.sync("done");
}

fn closed_number_is_reused(side: &Side, fd: Fd) {
    calls::close(fd).expect("close");
    // A file takes the number, then a connection that has not been upgraded, then one that has.
    let file = calls::file_with(b"contents").expect("memfd_create");
    assert_eq!(file, fd);
    assert_eq!(calls::read(fd, 10), Ok(b"contents".to_vec()));
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::ENOTSOCK));
    assert_eq!(calls::seek(fd, 0), Ok(0));
    calls::close(fd).expect("close");
    let second = second_connection(side);
    serve_until(second, side);
}

fn lowest_free_number(side: &Side, fd: Fd) {
    let null = calls::open("/dev/null", O_RDONLY).expect("open");
    let (reading, writing) = calls::pipe().expect("pipe");
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    let _ = calls::dup(fd);
    let _ = calls::eventfd();
    calls::close(null).expect("close");
    calls::close(writing).expect("close");
    let _ = calls::open("/dev/null", O_RDONLY);
    let _ = calls::dup_from(fd, 0);
    let _ = calls::stream_socket(side.family, 0);
    calls::close(reading).expect("close");
    demand(side);
    let _ = calls::epoll_wait(epfd, 4, -1);
    let _ = calls::open("/dev/null", O_RDONLY);
    stop(side);
}

fn listing(side: &Side, fd: Fd) {
    calls::open_descriptors(512);
    demand(side);
    let _ = calls::recv(fd, 10, 0);
    let _ = calls::open("/dev/null", O_RDONLY);
    calls::open_descriptors(512);
    stop(side);
}

fn moved_high(side: &Side, fd: Fd) {
    let high = calls::dup2(fd, 1000).expect("dup2");
    calls::close(fd).expect("close");
    demand(side);
    assert_eq!(calls::recv(high, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(calls::send(high, b"x", 0), Ok(1));
    stop(side);
}

/// Descriptors that few programs have.
const FAR_UP: Fd = 5000;

fn moved_far_up(side: &Side, fd: Fd) {
    calls::limit_descriptors(FAR_UP as u64 + 100);
    let high = calls::dup2(fd, FAR_UP).expect("dup2");
    calls::close(fd).expect("close");
    demand(side);
    assert_eq!(calls::recv(high, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(calls::send(high, b"x", 0), Ok(1));
    stop(side);
}

fn echoes_far_up(side: &Side) {
    calls::limit_descriptors(FAR_UP as u64 + 100);
    let listener = side.listen();
    let high = calls::dup2(listener, FAR_UP).expect("dup2");
    calls::close(listener).expect("close");
    say!("echoed {}", echo(side.accept(high)));
}

/// From the first call on, by one that asks a pipe of that height, too.
fn asks_far_up(side: &Side) {
    calls::limit_descriptors(FAR_UP as u64 + 100);
    let destination = side.destination();
    let socket = side.socket();
    let high = calls::dup2(socket, FAR_UP).expect("dup2");
    calls::close(socket).expect("close");
    let (reading, writing) = calls::pipe().expect("pipe");
    let reading = calls::dup2(reading, FAR_UP + 1).expect("dup2");
    calls::connect(high, destination).expect("connect");
    request_echoes(high, 50, 3000);
    assert_eq!(calls::write(writing, b"x"), Ok(1));
    assert_eq!(calls::read(reading, 10), Ok(b"x".to_vec()));
    assert_eq!(calls::close(FAR_UP + 2), Err(Errno::EBADF));
    calls::close(high).expect("close");
}

/// As an inetd service is started: the connection becomes descriptor 0, here for a while.
fn moved_to_stdin(_side: &Side, fd: Fd) {
    let control = quietly(|| calls::dup_from(0, 100)).expect("F_DUPFD");
    assert_eq!(calls::dup2(fd, 0), Ok(0));
    calls::close(fd).expect("close");
    request_echoes(0, 50, 3000);
    assert_eq!(calls::dup2(control, 0), Ok(0));
    say!("50 echoes");
}

fn not_replaced(side: &Side, fd: Fd) {
    let (other, _) = calls::pipe().expect("pipe");
    assert_eq!(calls::dup3(other, fd, libc::O_NONBLOCK), Err(Errno::EINVAL));
    assert_eq!(calls::close_range(3, libc::c_uint::MAX, 1), Err(Errno::EINVAL));
    calls::limit_descriptors(3);
    assert_eq!(calls::dup2(0, fd), Err(Errno::EBADF));
    calls::limit_descriptors(256);
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn close_range_spares(side: &Side, fd: Fd) {
    let kept = calls::dup2(fd, 20).expect("dup2");
    calls::close_range(21, libc::c_uint::MAX, 0).expect("close_range");
    calls::close_range(3, 19, 0).expect("close_range");
    calls::open_descriptors(512);
    demand(side);
    assert_eq!(calls::recv(kept, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn close_range_takes(side: &Side, fd: Fd) {
    side.sync("half way");
    side.sync("go on");
    calls::close_range(fd, fd as libc::c_uint, 0).expect("close_range");
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::EBADF));
    side.sync("done");
}

fn close_range_marks(side: &Side, fd: Fd) {
    let mark = libc::CLOSE_RANGE_CLOEXEC as libc::c_int;
    calls::close_range(3, libc::c_uint::MAX, mark).expect("close_range");
    assert_eq!(calls::closes_on_exec(fd), Ok(true));
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(calls::close_range(9, 3, 0), Err(Errno::EINVAL));
    stop(side);
}

fn everything_else_closed(side: &Side, fd: Fd) {
    for other in calls::open_descriptors(512) {
        if other > 2 && other != fd {
            let _ = calls::close(other);
        }
    }
    calls::open_descriptors(512);
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    let _ = calls::open("/dev/null", O_RDONLY);
    stop(side);
}

/// As daemons do, without looking what is open.
fn closed_one_by_one(side: &Side, fd: Fd) {
    let mut closed = Vec::new();
    quietly(|| {
        for other in 3..20_000 {
            if other != fd && calls::close(other).is_ok() {
                closed.push(other);
            }
        }
    });
    say!("closed {closed:?}");
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    assert_eq!(calls::send(fd, b"x", 0), Ok(1));
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, fd, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    demand(side);
    assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
    stop(side);
}

fn closefrom(side: &Side, fd: Fd) {
    let kept = calls::dup2(fd, 3).expect("dup2");
    calls::closefrom(4);
    calls::open_descriptors(512);
    demand(side);
    assert_eq!(calls::recv(kept, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}

fn closes_before_listening(side: &Side) {
    calls::close_range(3, libc::c_uint::MAX, 0).expect("close_range");
    let listener = side.listen();
    calls::closefrom(listener + 1);
    let fd = side.accept(listener);
    for other in fd + 1..1024 {
        let _ = quietly(|| calls::close(other));
    }
    say!("echoed {}", echo(fd));
}

fn closes_before_connecting(side: &Side) {
    calls::closefrom(3);
    let fd = side.connect();
    calls::close_range(fd + 1, libc::c_uint::MAX, 0).expect("close_range");
    request_echoes(fd, 30, 500);
    calls::close_range(fd + 1, libc::c_uint::MAX, 0).expect("close_range");
    request_echoes(fd, 30, 500);
    calls::close(fd).expect("close");
}

fn close_on_exec(side: &Side, fd: Fd) {
    assert_eq!(calls::closes_on_exec(fd), Ok(false));
    calls::set_close_on_exec(fd, true).expect("F_SETFD");
    assert_eq!(calls::closes_on_exec(fd), Ok(true));
    demand(side);
    let _ = calls::recv(fd, 10, 0);
    assert_eq!(calls::closes_on_exec(fd), Ok(true));
    stop(side);
}

fn opened_again(side: &Side, fd: Fd) {
    // proc(5): a socket cannot be opened through its link.
    assert_eq!(calls::open(&format!("/proc/self/fd/{fd}"), libc::O_RDWR), Err(Errno::ENXIO));
    stop(side);
}

/// A program that allows itself few descriptors still finds its own free.
fn low_limit(side: &Side, fd: Fd) {
    calls::limit_descriptors(16);
    demand(side);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    let opened = quietly(|| {
        let mut opened = Vec::new();
        while let Ok(other) = calls::open("/dev/null", O_RDONLY) {
            opened.push(other);
        }
        opened
    });
    say!("opened {opened:?}");
    assert_eq!(calls::dup(fd), Err(Errno::EMFILE));
    demand(side);
    await_unread(fd, 4);
    assert_eq!(calls::recv(fd, 10, 0), Ok(b"data".to_vec()));
    stop(side);
    // Statistics need one, too.
    calls::limit_descriptors(64);
}

fn many_copies(side: &Side, fd: Fd) {
    let copies: Vec<Fd> = (0..1000).map(|_| quietly(|| calls::dup(fd)).expect("dup")).collect();
    say!("copies from {:?} to {:?}", copies.first(), copies.last());
    for &copy in copies.iter().rev() {
        quietly(|| calls::close(copy)).expect("close");
    }
    side.sync("end now");
    side.sync("ended");
    assert_eq!(calls::recv(fd, 10, 0), Ok(vec![]));
    assert_eq!(calls::send(fd, b"x", 0), Ok(1));
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    side.sync("close now");
    side.sync("closed");
    await_hangup(fd);
}

fn moved_and_waited_for(side: &Side, fd: Fd) {
    let copy = calls::dup_from(fd, 30).expect("F_DUPFD");
    calls::close(fd).expect("close");
    demand(side);
    assert_eq!(calls::poll(&[(copy, POLLIN)], -1), Ok(vec![POLLIN]));
    assert_eq!(calls::select(&[copy], &[], &[], None).map(|found| found.read), Ok(vec![copy]));
    let epfd = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(epfd, copy, EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
    assert_eq!(calls::recv(copy, 10, 0), Ok(b"data".to_vec()));
    stop(side);
}
