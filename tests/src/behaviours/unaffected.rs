//! What is no TCP connection works as ever, and is counted nowhere.

use super::{Behaviour, Tally};
use crate::calls::{self, Errno, Leave, fork, quietly};
use crate::say;
use crate::side::{Pattern, Side, await_readable, listening_port};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::whole("unix_sockets", unix_sockets, nothing, Tally::Upgraded(0)),
    Behaviour::whole("datagrams", datagrams, sends_datagrams, Tally::Upgraded(0)),
    Behaviour::whole("pipes_and_files", pipes_and_files, nothing, Tally::Upgraded(0)),
    Behaviour::whole("passed_descriptors", passed_descriptors, nothing, Tally::Upgraded(0)),
    Behaviour::whole("unconnected_sockets", unconnected, nothing, Tally::Upgraded(0)),
    Behaviour::whole("events_without_connections", events, nothing, Tally::Upgraded(0)),
    Behaviour::whole("waiting_while_another_thread_forks", waits_beside_forks, nothing, Tally::Upgraded(0)),
];

fn nothing(_side: &Side) {}

fn unix_sockets(_side: &Side) {
    let (one, other) = calls::unix_pair().expect("socketpair");
    assert_eq!(calls::send(one, b"hello", 0), Ok(5));
    assert_eq!(calls::recv(other, 3, libc::MSG_PEEK), Ok(b"hel".to_vec()));
    assert_eq!(calls::read(other, 10), Ok(b"hello".to_vec()));
    let data = Pattern::new(1).take(100_000);
    assert_eq!(calls::writev(other, &[&data[..50_000], &data[50_000..]]), Ok(100_000));
    assert_eq!(calls::recv(one, 100_000, libc::MSG_WAITALL), Ok(data));
    assert_eq!(calls::poll(&[(one, libc::POLLIN | libc::POLLOUT)], 0), Ok(vec![libc::POLLOUT]));
    calls::shutdown(other, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(one, 10, 0), Ok(vec![]));
    calls::close(other).expect("close");
    assert_eq!(calls::send(one, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
}

/// No signal of theirs that nobody handles ends the wait.
fn waits_beside_forks(_side: &Side) {
    let (reading, writing) = calls::pipe().expect("pipe");
    let set = calls::epoll_create().expect("epoll_create1");
    calls::epoll_add(set, reading, libc::EPOLLIN, 1).expect("EPOLL_CTL_ADD");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| quietly(|| calls::epoll_wait(set, 4, -1)));
        for _ in 0..300 {
            fork(Leave::AtOnce, || {}).wait_for_success();
        }
        calls::write(writing, b"x").expect("write");
        let ready = waiting.join().expect("it does not panic");
        say!("ready: {:?}", ready.map(|ready| ready.len()));
    });
}

fn datagrams(side: &Side) {
    let fd = calls::udp_socket(side.family).expect("socket");
    calls::bind(fd, side.family.own(0)).expect("bind");
    side.tell(u64::from(listening_port(fd)));
    side.sync("sent");
    await_readable(fd);
    assert_eq!(calls::recvfrom(fd, 100, 0), Ok(b"one".to_vec()));
    await_readable(fd);
    assert_eq!(calls::recv_into(fd, &mut [0; 2], libc::MSG_TRUNC), Ok(5));
    await_readable(fd);
    assert_eq!(calls::read(fd, 100), Ok(vec![]));
    assert_eq!(calls::recv(fd, 100, libc::MSG_DONTWAIT), Err(Errno::EAGAIN));
}

fn sends_datagrams(side: &Side) {
    let destination = side.destination();
    let fd = calls::udp_socket(side.family).expect("socket");
    calls::connect(fd, destination).expect("connect");
    assert_eq!(calls::send(fd, b"one", 0), Ok(3));
    assert_eq!(calls::writev(fd, &[b"th", b"ree"]), Ok(5));
    assert_eq!(calls::send(fd, b"", 0), Ok(0));
    side.sync("sent");
}

fn pipes_and_files(_side: &Side) {
    let (reading, writing) = calls::pipe().expect("pipe");
    assert_eq!(calls::write(writing, b"through the pipe"), Ok(16));
    assert_eq!(calls::unread(reading), Ok(16));
    assert_eq!(calls::readv(reading, &[4, 100]), Ok(b"through the pipe".to_vec()));
    assert_eq!(calls::recv(reading, 10, 0), Err(Errno::ENOTSOCK));
    assert_eq!(calls::send(writing, b"x", 0), Err(Errno::ENOTSOCK));
    let file = calls::file_with(b"0123456789").expect("memfd_create");
    assert_eq!(calls::read(file, 4), Ok(b"0123".to_vec()));
    assert_eq!(calls::sendfile(writing, file, 4), Ok(4));
    assert_eq!(calls::read(reading, 10), Ok(b"4567".to_vec()));
    assert_eq!(calls::splice(reading, writing, 1), Err(Errno::EINVAL));
    assert_eq!(calls::pread(file, 10, 8), Ok(2));
    let copy = calls::dup2(file, 50).expect("dup2");
    assert_eq!(calls::seek(copy, 9), Ok(9));
    assert_eq!(calls::read(file, 4), Ok(b"9".to_vec()));
}

fn passed_descriptors(_side: &Side) {
    let (one, other) = calls::unix_pair().expect("socketpair");
    let (reading, writing) = calls::pipe().expect("pipe");
    assert_eq!(calls::send_fd(one, b"take it", reading), Ok(7));
    let message = calls::recvmsg(other, &[100], 1, 0).expect("recvmsg");
    assert_eq!(message.data, b"take it");
    assert_eq!(message.fds.len(), 1);
    say!("passed {:?}", message.fds);
    assert_eq!(calls::write(writing, b"x"), Ok(1));
    assert_eq!(calls::read(message.fds[0], 10), Ok(b"x".to_vec()));
}

fn unconnected(side: &Side) {
    let fd = calls::stream_socket(side.family, 0).expect("socket");
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::ENOTCONN));
    assert_eq!(calls::send(fd, b"x", libc::MSG_NOSIGNAL), Err(Errno::EPIPE));
    assert_eq!(calls::read(fd, 10), Err(Errno::ENOTCONN));
    assert_eq!(calls::shutdown(fd, libc::SHUT_WR), Err(Errno::ENOTCONN));
    assert_eq!(calls::peer_address(fd), Err(Errno::ENOTCONN));
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT)], 0);
    calls::listen(fd, 5).expect("listen");
    assert_eq!(calls::recv(fd, 10, 0), Err(Errno::ENOTCONN));
    let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT)], 0);
    calls::close(fd).expect("close");
}

fn events(_side: &Side) {
    let epfd = calls::epoll_create().expect("epoll_create1");
    let event = calls::eventfd().expect("eventfd");
    calls::epoll_add(epfd, event, libc::EPOLLIN | libc::EPOLLET, 9).expect("EPOLL_CTL_ADD");
    assert_eq!(calls::epoll_wait(epfd, 4, 0), Ok(vec![]));
    assert_eq!(calls::write(event, &3u64.to_ne_bytes()), Ok(8));
    assert_eq!(calls::epoll_wait(epfd, 4, -1).map(|ready| ready.len()), Ok(1));
    assert_eq!(calls::epoll_wait(epfd, 4, 0), Ok(vec![]));
    assert_eq!(calls::read(event, 8), Ok(3u64.to_ne_bytes().to_vec()));
    assert_eq!(quietly(|| calls::poll(&[(event, libc::POLLIN)], 0)), Ok(vec![0]));
}
