//! Peers that lie, stall, or end at an awkward moment: by hand, on plain sockets.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use thallus_shuffle::{Cluster, NodeId, WorkerId, push, staged};

use common::{batch, errors, leave, schema, seats, sum, within};

const SMALL: push::Config = push::Config {
    window: 4 << 10,
    outgoing: 4 << 10,
    pool: 64 << 10,
    batch_rows: 100,
    patience: Duration::from_secs(30),
};

const ROWS: u32 = 1;
const END: u32 = 2;

/// A process of the push design that says whatever a test likes: the last of the cluster.
struct Peer(TcpStream);

impl Peer {
    fn frame(&mut self, kind: u32, shuffle: u64, (source, target): (u32, u32), value: u64, body: &[u8]) {
        let mut frame = Vec::new();
        frame.extend(u32::try_from(body.len()).unwrap().to_le_bytes());
        frame.extend(kind.to_le_bytes());
        frame.extend(shuffle.to_le_bytes());
        frame.extend(source.to_le_bytes());
        frame.extend(target.to_le_bytes());
        frame.extend(value.to_le_bytes());
        frame.extend(body);
        self.0.write_all(&frame).unwrap();
    }
}

/// Processes, and what the last one, which is none, has of connections to them.
fn with_peer(workers: &[usize], config: push::Config) -> (Vec<push::Node>, Vec<Peer>) {
    let (mut seats, cluster) = seats(workers);
    let last = NodeId(u32::try_from(seats.len() - 1).unwrap());
    let listener = TcpListener::from(seats.pop().unwrap());
    let joining = {
        let cluster = cluster.clone();
        thread::spawn(move || common::join::<push::Node>(seats, &cluster, config))
    };
    let mut peers: Vec<_> = (0..last.0)
        .map(|_| listener.accept().unwrap().0)
        .map(|stream| {
            let node = greet(&stream, &cluster, last);
            (node, Peer(stream))
        })
        .collect();
    peers.sort_by_key(|(node, _)| *node);
    (joining.join().unwrap(), peers.into_iter().map(|(_, peer)| peer).collect())
}

/// Greets as `me`. Returns who greeted.
fn greet(mut stream: &TcpStream, cluster: &Cluster, me: NodeId) -> u32 {
    let mut hello = [0; 64];
    stream.read_exact(&mut hello).unwrap();
    let theirs = u32::from_le_bytes(hello[12..16].try_into().unwrap());
    hello[12..16].copy_from_slice(&me.0.to_le_bytes());
    assert_eq!(hello[16..24], cluster.token().to_le_bytes());
    stream.write_all(&hello).unwrap();
    theirs
}

/// The last process ends the shuffle for one, and is gone for the other: it fails there, and goes on here.
#[test]
fn who_has_failed_still_takes_rows_of_those_who_go_on() {
    within(|| {
        for dropped_before in [true, false] {
            let (nodes, mut peers) = with_peer(&[1, 1, 1], SMALL);
            let (failing, failing_receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
            let (mut sender, receiver) = nodes[1].shuffle(1, &schema()).unwrap().remove(0);
            failing.finish().unwrap();
            // Nobody has read these when it fails.
            sender.send_to(WorkerId(0), batch(0..200)).unwrap();
            sender.send_to(WorkerId(0), batch(0..200)).unwrap();
            peers[1].frame(END, 1, (2, 0), 0, &[]);
            drop(peers.remove(0));
            if dropped_before {
                let told = errors([failing_receiver]);
                assert!(told[0].contains("process 2 is gone"), "{told:?}");
                (0..100).for_each(|_| sender.send_to(WorkerId(0), batch(0..100)).unwrap());
            } else {
                (0..100).for_each(|_| sender.send_to(WorkerId(0), batch(0..100)).unwrap());
                assert!(errors([failing_receiver])[0].contains("process 2 is gone"));
            }
            sender.finish().unwrap();
            assert_eq!(sum(receiver.map(Result::unwrap)), (0, 0));
            drop(peers);
            leave(nodes);
        }
    });
}

#[test]
fn rows_of_a_worker_that_has_ended_arrive_though_its_process_has_failed_since() {
    within(|| {
        let (nodes, mut peers) = with_peer(&[1, 1, 1], SMALL);
        let (mut ended, failing) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        let (other, mut receiver) = nodes[1].shuffle(1, &schema()).unwrap().remove(0);
        // More than the other takes without reading: the rest, and the end, wait here.
        (0..6).for_each(|_| ended.send_to(WorkerId(1), batch(0..100)).unwrap());
        ended.finish().unwrap();
        other.finish().unwrap();
        peers[1].frame(END, 1, (2, 0), 0, &[]);
        drop(peers.remove(0));
        assert!(errors([failing])[0].contains("process 2 is gone"));
        assert_eq!(sum(receiver.by_ref().map(Result::unwrap)).0, 600);
        drop((receiver, peers));
        leave(nodes);
    });
}

#[test]
fn whoever_does_not_say_goodbye_makes_leaving_fail() {
    within(|| {
        let config = push::Config { patience: Duration::from_millis(200), ..SMALL };
        let (mut nodes, _peers) = with_peer(&[1, 1], config);
        assert!(!nodes.remove(0).leave());
    });
}

#[test]
fn rows_that_would_take_no_room_are_refused() {
    within(|| {
        for body in [&[][..], &[0; 8]] {
            let (nodes, mut peers) = with_peer(&[1, 1], SMALL);
            let (sender, receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
            peers[0].frame(ROWS, 1, (1, 0), 0, body);
            let told = errors([receiver]);
            assert!(told[0].contains("process 1 breaks the protocol: Rows of"), "{told:?}");
            drop(sender);
        }
    });
}

/// One byte now and then is not "in time".
#[test]
fn a_stranger_that_stutters_does_not_hold_up_the_meeting() {
    within(|| {
        let (mut seats, cluster) = seats(&[1, 1]);
        let config = push::Config { patience: Duration::from_millis(200), ..SMALL };
        let mut stranger = TcpStream::connect(cluster.address(NodeId(1))).unwrap();
        stranger.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
        let stuttering = thread::spawn(move || {
            let is_heard = |_: &u32| {
                let is_open = |error: std::io::Error| error.kind() == std::io::ErrorKind::WouldBlock;
                stranger.write_all(b"x").is_ok() && stranger.read(&mut [0]).is_err_and(is_open)
            };
            (0..64).take_while(is_heard).count()
        });
        assert!(push::Node::join(seats.remove(1), cluster, NodeId(1), config).is_err());
        assert!(stuttering.join().unwrap() < 60, "it was listened to");
    });
}

/// Joins as `me` of three of which one has been there, as `gone` plays it, and one never comes. What is said, long before the time
/// is over.
fn meets_in_vain(me: usize, gone: usize, play: impl FnOnce(&Cluster, &TcpListener)) -> String {
    let (mut seats, cluster) = seats(&[1, 1, 1]);
    let seat = seats.remove(me);
    // The one that never comes does not listen either.
    let listener = TcpListener::from(seats.remove(if gone > me { gone - 1 } else { gone }));
    drop(seats);
    let joining = {
        let (cluster, me) = (cluster.clone(), NodeId(u32::try_from(me).unwrap()));
        thread::spawn(move || push::Node::join(seat, cluster, me, SMALL).unwrap_err())
    };
    play(&cluster, &listener);
    let since = Instant::now();
    let told = joining.join().unwrap().to_string();
    assert!(since.elapsed() < SMALL.patience / 3, "{told}");
    told
}

#[test]
fn who_was_there_and_is_gone_is_not_waited_for_when_meeting() {
    within(|| {
        for (me, gone) in [(1, 0), (2, 0), (2, 1)] {
            let told = meets_in_vain(me, gone, |cluster, _| {
                let (me, gone) = (NodeId(u32::try_from(me).unwrap()), u32::try_from(gone).unwrap());
                let mut stream = TcpStream::connect(cluster.address(me)).unwrap();
                let mut hello = b"THALSHUF".to_vec();
                hello.extend([1, gone].iter().flat_map(|number: &u32| number.to_le_bytes()));
                hello.extend(cluster.token().to_le_bytes());
                hello.extend([3, 3].iter().flat_map(|number: &u32| number.to_le_bytes()));
                hello.extend([4096, 0, 0, 0].iter().flat_map(|number: &u64| number.to_le_bytes()));
                stream.write_all(&hello).unwrap();
                stream.read_exact(&mut hello).unwrap();
            });
            assert!(told.starts_with(&format!("process {gone} is gone")), "{told}");
        }
        for (me, gone) in [(0, 1), (0, 2), (1, 2)] {
            for answers in [false, true] {
                let told = meets_in_vain(me, gone, |cluster, listener| {
                    let (stream, _) = listener.accept().unwrap();
                    if answers {
                        greet(&stream, cluster, NodeId(u32::try_from(gone).unwrap()));
                    }
                });
                assert!(told.starts_with(&format!("process {gone} is gone")), "{told}");
            }
        }
    });
}

/// A request of the staged design.
fn request(id: u64, shuffle: u64, source: u32, most: u64) -> Vec<u8> {
    let mut bytes = b"THALFTCH".to_vec();
    bytes.extend([42, id, shuffle].iter().flat_map(|number| number.to_le_bytes()));
    bytes.extend([source, 1].iter().flat_map(|worker| worker.to_le_bytes()));
    bytes.extend([0, most, 0].iter().flat_map(|number: &u64| number.to_le_bytes()));
    bytes
}

/// One that is answered with an error. False if there is no answer for a while.
fn is_refused(stream: &mut TcpStream, id: u64, shuffle: u64) -> bool {
    stream.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    stream.write_all(&request(id, shuffle, 0, 1)).unwrap();
    let mut head = [0; 64];
    if stream.read_exact(&mut head).is_err() {
        return false;
    }
    let length = u32::from_le_bytes(head[20..24].try_into().unwrap()) as usize;
    let mut text = vec![0; length];
    stream.read_exact(&mut text).unwrap();
    assert!(String::from_utf8(text).unwrap().contains("too many shuffles"));
    head[16] == 1
}

/// A client of the first process, which has said what it is.
fn client_of(cluster: &Cluster) -> TcpStream {
    let mut client = TcpStream::connect(cluster.address(NodeId(0))).unwrap();
    let mut hello = [0; 64];
    client.read_exact(&mut hello).unwrap();
    assert!(hello.starts_with(b"THALHERE"));
    client
}

fn two_staged() -> (Vec<staged::Node>, Cluster) {
    let (seats, cluster) = seats(&[1, 1]);
    (common::join(seats, &cluster, staged::Config::default()), cluster)
}

#[test]
fn rows_are_asked_for_where_they_are() {
    within(|| {
        let (nodes, cluster) = two_staged();
        let mut client = client_of(&cluster);
        client.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        client.write_all(&request(1, 1, 1, 1 << 20)).unwrap();
        assert_eq!(client.read(&mut [0]).unwrap(), 0, "it is sent away");
        leave(nodes);
    });
}

#[test]
fn shuffles_that_nobody_here_has_opened_are_bounded() {
    within(|| {
        for most in [0, 1] {
            let (nodes, cluster) = two_staged();
            let mut client = client_of(&cluster);
            let many: Vec<u8> = (0..4096).flat_map(|n| request(n, n, 0, most)).collect();
            client.write_all(&many).unwrap();
            while nodes[0].served().requests < 4096 {
                thread::yield_now();
            }
            let mut other = client_of(&cluster);
            // Two threads look at requests.
            assert!((10_000..10_010).any(|n| is_refused(&mut other, n, n)));
            drop(client);
            if most > 0 {
                // What it waited for is forgotten.
                assert!((20_000..20_100).any(|n| !is_refused(&mut other, n, n)));
            }
            drop(other);
            leave(nodes);
        }
    });
}

/// Reads so many answers, each of one chunk. How many were rows.
fn answers(stream: &mut TcpStream, count: usize) -> usize {
    let answer = |_: &usize| {
        let mut head = [0; 64];
        stream.read_exact(&mut head).unwrap();
        let mut body = vec![0; u32::from_le_bytes(head[20..24].try_into().unwrap()) as usize];
        stream.read_exact(&mut body).unwrap();
        head[16] == 0
    };
    (0..count).filter(answer).count()
}

/// Whether a server has read so many requests soon.
fn are_read(node: &staged::Node, requests: u64) -> bool {
    let deadline = Instant::now() + Duration::from_secs(10);
    while node.served().requests < requests && Instant::now() < deadline {
        thread::sleep(Duration::from_millis(5));
    }
    node.served().requests >= requests
}

/// It has asked here, but nobody here has asked it yet.
#[test]
fn who_has_asked_and_is_gone_is_not_waited_for() {
    within(|| {
        let (mut seats, cluster) = seats(&[1, 1]);
        drop(seats.remove(1));
        let node = staged::Node::join(seats.remove(0), cluster.clone(), NodeId(0), staged::Config::default())
            .unwrap();
        let mut client = client_of(&cluster);
        client.write_all(&request(1, 1, 0, 1 << 20)).unwrap();
        assert!(are_read(&node, 1));
        drop(client);
        let (mut sender, receiver) = node.shuffle(1, &schema()).unwrap().remove(0);
        sender.send_to(WorkerId(1), batch(0..10)).unwrap();
        sender.finish().unwrap();
        let since = Instant::now();
        let told = errors([receiver]);
        assert!(told[0].starts_with("process 1 is gone"), "{told:?}");
        assert!(node.leave(), "what it would have fetched is dropped");
        assert!(since.elapsed() < staged::Config::default().patience / 3);
    });
}

#[test]
fn many_may_wait_for_a_worker_on_one_connection() {
    within(|| {
        let (nodes, cluster) = two_staged();
        let (mut sender, own) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        let (other, unread) = nodes[1].shuffle(1, &schema()).unwrap().remove(0);
        let mut client = client_of(&cluster);
        let many: Vec<u8> = (0..6_000).flat_map(|n| request(n, 1, 0, 1 << 20)).collect();
        client.write_all(&many).unwrap();
        assert!(are_read(&nodes[0], 6_000));
        sender.send_to(WorkerId(1), batch(0..10)).unwrap();
        sender.finish().unwrap();
        assert_eq!(answers(&mut client, 6_000), 6_000);
        drop((client, other, own, unread));
        drop(nodes);
    });
}

/// It is not read on before it takes what it has asked for.
#[test]
fn who_asks_for_much_at_once_gets_it() {
    within(|| {
        let (nodes, cluster) = two_staged();
        let (mut sender, own) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        (0..2).for_each(|_| sender.send_to(WorkerId(1), batch(0..2_500)).unwrap());
        sender.finish().unwrap();
        let mut client = client_of(&cluster);
        let mut asking = client.try_clone().unwrap();
        let asking = thread::spawn(move || {
            // The first of two batches.
            let many: Vec<u8> = (0..10_000).flat_map(|n| request(n, 1, 0, 30_000)).collect();
            asking.write_all(&many).unwrap();
        });
        assert!(are_read(&nodes[0], 4_096));
        thread::sleep(Duration::from_millis(100));
        assert!(nodes[0].served().requests < 7_000);
        assert_eq!(answers(&mut client, 10_000), 10_000);
        asking.join().unwrap();
        assert_eq!(nodes[0].served().requests, 10_000);
        // And it goes on.
        client.write_all(&request(1, 1, 0, 30_000)).unwrap();
        assert_eq!(answers(&mut client, 1), 1);
        drop((client, own));
        drop(nodes);
    });
}

#[test]
fn a_block_in_parts_of_nothing_is_no_block() {
    within(|| {
        let (mut seats, cluster) = seats(&[1, 1]);
        let listener = TcpListener::from(seats.pop().unwrap());
        let serving = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let hello: Vec<u8> =
                [42_u64, 7, 0, 0, 0, 0, 0].iter().flat_map(|number| number.to_le_bytes()).collect();
            stream.write_all(b"THALHERE").unwrap();
            stream.write_all(&hello).unwrap();
            let mut request = [0; 64];
            while stream.read_exact(&mut request).is_ok() {
                let mut head = b"THALCHNK".to_vec();
                head.extend(&request[16..24]);
                head.extend([0, 0, 0, 1].iter().flat_map(|number: &u32| number.to_le_bytes()));
                head.extend([0, 0, 9, 1].iter().flat_map(|number: &u64| number.to_le_bytes()));
                if stream.write_all(&head).is_err() {
                    return;
                }
            }
        });
        let node =
            staged::Node::join(seats.remove(0), cluster, NodeId(0), staged::Config::default()).unwrap();
        let (sender, receiver) = node.shuffle(1, &schema()).unwrap().remove(0);
        sender.finish().unwrap();
        let told = errors([receiver]);
        assert!(told[0].contains("process 1 breaks the protocol"), "{told:?}");
        drop(node);
        serving.join().unwrap();
    });
}
