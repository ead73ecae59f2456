//! Staged shuffles: rows arrive once, whatever the sizes; connections are made on demand and closed; who fails ends it for those
//! who need its rows, with a reason.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use thallus_shuffle::staged::{Config, Node};
use thallus_shuffle::{Cluster, Error, NodeId, Partition, Seat, WorkerId};

use common::{batch, errors, halves, join, leave, schema, seats, sum, within};

fn small() -> Config {
    Config { chunk: 1 << 10, fetch: 8 << 10, pool: 64 << 10, batch_rows: 100, queue: 2, ..Config::default() }
}

fn nodes(workers: &[usize], config: Config) -> Vec<Node> {
    common::nodes(workers, config)
}

/// Two shuffles, one behind the other, by all workers; then once more.
fn twice(workers: &[usize], config: Config, rows: i64, first: &Partition, second: &Partition) -> Vec<Node> {
    let nodes = nodes(workers, config);
    let all: usize = workers.iter().sum();
    for round in 0..2 {
        let sums: Vec<(usize, i64)> = thread::scope(|scope| {
            let one = halves(&nodes, round * 2);
            let two = halves(&nodes, round * 2 + 1);
            let running: Vec<_> = one
                .into_iter()
                .zip(two)
                .map(|((mut sender, middle), (mut next, receiver))| {
                    scope.spawn(move || {
                        let me = i64::from(sender.worker().0);
                        sender.partition(first).unwrap();
                        for from in (0..rows).step_by(1_000) {
                            let to = rows.min(from + 1_000);
                            sender.send(batch((from..to).map(|n| me * rows + n))).unwrap();
                        }
                        sender.finish().unwrap();
                        next.partition(second).unwrap();
                        middle.for_each(|batch| next.send(batch.unwrap()).unwrap());
                        next.finish().unwrap();
                        sum(receiver.map(Result::unwrap))
                    })
                })
                .collect();
            running.into_iter().map(|running| running.join().unwrap()).collect()
        });
        let total = rows * all as i64;
        assert_eq!(sums.iter().map(|(count, _)| count).sum::<usize>(), total as usize);
        assert_eq!(sums.iter().map(|(_, sum)| sum).sum::<i64>(), total * (total - 1) / 2);
    }
    nodes
}

#[test]
fn all_rows_of_all_workers_arrive() {
    within(|| {
        leave(twice(&[2, 1, 3], Config::default(), 50_000, &Partition::Hash(vec![0]), &Partition::Random(3)))
    });
}

#[test]
fn small_chunks_and_queues_that_are_full_lose_nothing() {
    within(|| leave(twice(&[4; 4], small(), 5_000, &Partition::Random(1), &Partition::Hash(vec![0]))));
}

#[test]
fn all_rows_for_one_worker() {
    let bounds: ArrayRef = Arc::new(Int64Array::from(vec![i64::MAX; 3]));
    let skewed = Partition::Range { column: 0, bounds };
    within(move || leave(twice(&[1; 4], small(), 5_000, &skewed, &Partition::Hash(vec![0]))));
}

#[test]
fn connections_are_shared_by_all_workers_of_a_process_or_not() {
    within(|| {
        for (share, connections) in [(true, 1), (false, 3)] {
            let config = Config { share, ..small() };
            let nodes = twice(&[3, 3], config, 1_000, &Partition::Hash(vec![0]), &Partition::Hash(vec![0]));
            for node in &nodes {
                assert_eq!(node.fetched().connections, connections, "sharing: {share}");
                assert_eq!(node.served().connections, connections, "sharing: {share}");
                let (fetched, served) = (node.fetched(), node.served());
                // Two rounds of two shuffles, with three workers who ask three others.
                assert!(fetched.requests >= 36 && served.requests >= 36);
                assert!(fetched.chunks >= fetched.requests);
            }
            leave(nodes);
        }
    });
}

#[test]
fn there_is_room_for_the_connections_of_all_others() {
    within(|| {
        for (share, workers) in [(false, &[3, 3][..]), (true, &[1; 4])] {
            let config = Config { share, connections: 1, ..small() };
            leave(twice(workers, config, 1_000, &Partition::Random(1), &Partition::Hash(vec![0])));
        }
    });
}

#[test]
fn who_is_not_let_in_does_not_take_the_process_for_gone() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let nodes: Vec<Node> = join(seats, &cluster, Config { connections: 1, ..small() });
        let _open = nodes[1].shuffle(1, &schema()).unwrap();
        let (sender, receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        sender.finish().unwrap();
        // Strangers have all that there are.
        let mut strangers: Vec<TcpStream> = Vec::new();
        let is_let_in = |mut stranger: &TcpStream| stranger.read_exact(&mut [0; 64]).is_ok();
        while strangers.last().is_none_or(is_let_in) {
            strangers.push(TcpStream::connect(cluster.address(NodeId(1))).unwrap());
        }
        let told = errors([receiver]);
        assert!(told[0].starts_with("process 1: it is gone, or has too many connections: "), "{told:?}");
    });
}

#[test]
fn a_connection_that_nobody_uses_is_closed_and_made_again() {
    within(|| {
        let nodes = nodes(&[1, 1], Config { idle: Duration::from_millis(50), ..small() });
        for id in 0..3 {
            let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, id).into_iter().unzip();
            for mut sender in senders {
                sender.send_to(WorkerId(0), batch(0..10)).unwrap();
                sender.finish().unwrap();
            }
            assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)).0, 20);
            let deadline = Instant::now() + Duration::from_secs(60);
            while nodes[0].fetched().idle <= id && Instant::now() < deadline {
                thread::sleep(Duration::from_millis(5));
            }
            assert_eq!((nodes[0].fetched().connections, nodes[0].fetched().idle), (id + 1, id + 1));
        }
        leave(nodes);
    });
}

#[test]
fn no_rows_end_as_well_and_without_waiting_for_leave() {
    within(|| {
        let nodes = nodes(&[2, 2], Config::default());
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        for mut sender in senders {
            sender.partition(&Partition::Hash(vec![0])).unwrap();
            sender.send(batch([])).unwrap();
            sender.finish().unwrap();
        }
        assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)), (0, 0));
        leave(nodes);
    });
}

#[test]
fn rows_larger_than_what_is_asked_for_pass() {
    within(|| {
        let schema = Arc::new(Schema::new(vec![Field::new("t", DataType::Utf8, true)]));
        let nodes = nodes(&[1, 1], small());
        let mut halves: Vec<_> = nodes.iter().flat_map(|node| node.shuffle(1, &schema).unwrap()).collect();
        let (mut sender, mine) = halves.remove(0);
        let (other, receiver) = halves.remove(0);
        let sizes = [3 << 20, 0, 1, 8 << 20, 4 << 10, 5_000];
        for bytes in sizes {
            let text: ArrayRef = Arc::new(StringArray::from(vec![Some("x".repeat(bytes)), None]));
            sender.send_to(WorkerId(1), RecordBatch::try_new(schema.clone(), vec![text]).unwrap()).unwrap();
        }
        sender.finish().unwrap();
        other.finish().unwrap();
        let mut lengths = Vec::new();
        for batch in receiver {
            let batch = batch.unwrap();
            let text = batch.column(0).as_any().downcast_ref::<StringArray>().unwrap();
            lengths.extend(text.iter().map(|text| text.map(str::len)));
            assert!(text.iter().flatten().all(|text| text.bytes().all(|byte| byte == b'x')));
        }
        assert_eq!(lengths, sizes.into_iter().flat_map(|bytes| [Some(bytes), None]).collect::<Vec<_>>());
        drop(mine);
        leave(nodes);
    });
}

#[test]
fn memory_is_used_again_and_goes_back() {
    within(|| {
        let nodes = nodes(&[1, 1], Config { batch_rows: 1_000, fetch: 64 << 10, ..Config::default() });
        for id in 0..10 {
            let mut halves = halves(&nodes, id);
            let (mut sender, mine) = halves.remove(0);
            let (other, receiver) = halves.remove(0);
            (0..100).for_each(|_| sender.send_to(WorkerId(1), batch(0..1_000)).unwrap());
            sender.finish().unwrap();
            other.finish().unwrap();
            assert_eq!(sum(receiver.map(Result::unwrap)).0, 100_000);
            drop(mine);
        }
        let status = nodes[1].pool();
        assert_eq!(status.used_bytes, 0);
        assert!(status.reused > 5 * status.allocated, "{status:?}");
        leave(nodes);
    });
}

#[test]
fn a_slow_reader_holds_up_nobody_else() {
    within(|| {
        let nodes = nodes(&[1, 2], small());
        let mut halves = halves(&nodes, 1).into_iter();
        let (mut sender, own) = halves.next().unwrap();
        let (one, mut slow) = halves.next().unwrap();
        let (two, fast) = halves.next().unwrap();
        for _ in 0..1_000 {
            sender.send_to(WorkerId(1), batch(0..100)).unwrap();
            sender.send_to(WorkerId(2), batch(0..100)).unwrap();
        }
        sender.finish().unwrap();
        one.finish().unwrap();
        two.finish().unwrap();
        // The two share a connection.
        assert_eq!(slow.next().unwrap().unwrap().num_rows(), 100);
        assert_eq!(sum(fast.map(Result::unwrap)).0, 100_000);
        assert_eq!(sum(slow.map(Result::unwrap)).0, 99_900);
        drop(own);
        leave(nodes);
    });
}

/// A client that asks for much and reads nothing.
#[test]
fn a_client_that_never_reads_holds_up_nobody_else() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let config = Config {
            responders: 1,
            handlers: 1,
            fetch: 1 << 30,
            patience: Duration::from_secs(2),
            ..small()
        };
        let mut nodes: Vec<Node> = join(seats, &cluster, config);
        let mut halves = halves(&nodes, 1).into_iter();
        let (mut sender, own) = halves.next().unwrap();
        let (other, receiver) = halves.next().unwrap();
        for _ in 0..20 {
            sender.send_to(WorkerId(1), batch(0..100_000)).unwrap();
        }
        sender.finish().unwrap();
        other.finish().unwrap();
        let mut deaf = std::net::TcpStream::connect(cluster.address(NodeId(0))).unwrap();
        let mut request = [0; 64];
        request[..8].copy_from_slice(b"THALFTCH");
        request[8] = 42;
        request[24] = 1;
        request[36] = 1;
        request[48..56].copy_from_slice(&(1_u64 << 30).to_le_bytes());
        deaf.write_all(&request).unwrap();
        // It is served as far as the socket takes.
        let deadline = Instant::now() + Duration::from_secs(60);
        while nodes[0].served().full_socket == 0 && Instant::now() < deadline {
            thread::sleep(Duration::from_millis(5));
        }
        assert!(nodes[0].served().full_socket > 0);
        assert_eq!(sum(receiver.map(Result::unwrap)).0, 2_000_000);
        drop(own);
        assert!(nodes.remove(1).leave());
        assert!(!nodes.remove(0).leave(), "somebody has not read");
        drop(deaf);
    });
}

#[test]
fn rows_that_nobody_wants_are_dropped() {
    within(|| {
        let nodes = nodes(&[1, 2], small());
        let mut halves = halves(&nodes, 1).into_iter();
        let (mut sender, own) = halves.next().unwrap();
        let (one, deaf) = halves.next().unwrap();
        let (two, listener) = halves.next().unwrap();
        drop(deaf);
        drop(own);
        for _ in 0..100 {
            sender.send_to(WorkerId(1), batch(0..100)).unwrap();
            sender.send_to(WorkerId(2), batch(0..10)).unwrap();
        }
        sender.finish().unwrap();
        one.finish().unwrap();
        two.finish().unwrap();
        assert_eq!(sum(listener.map(Result::unwrap)).0, 1_000);
        leave(nodes);
    });
}

/// Nobody fetches anything. Each process has to hear that from the other before it can leave.
#[test]
fn processes_whose_receivers_have_stopped_early_leave_at_once() {
    within(|| {
        for share in [true, false] {
            let nodes = nodes(&[2, 2], Config { share, idle: Duration::from_millis(20), ..small() });
            for id in 1..3 {
                let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, id).into_iter().unzip();
                for mut sender in senders {
                    (0..4).for_each(|target| sender.send_to(WorkerId(target), batch(0..10)).unwrap());
                    sender.finish().unwrap();
                }
                // One at a time: the connections that the first have made are closed when the last stop.
                receivers.into_iter().for_each(|receiver| {
                    drop(receiver);
                    thread::sleep(Duration::from_millis(50));
                });
            }
            let began = Instant::now();
            leave(nodes);
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
        }
    });
}

/// Also where each has a connection of its own.
#[test]
fn every_worker_says_at_once_that_it_wants_no_rows() {
    within(|| {
        let nodes = nodes(&[3, 1], Config { share: false, ..small() });
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        drop(receivers);
        let began = Instant::now();
        while nodes[1].served().requests < 3 {
            assert!(began.elapsed() < Duration::from_secs(10), "{:?}", nodes[1].served());
            thread::sleep(Duration::from_millis(10));
        }
        leave(nodes);
    });
}

#[test]
fn a_worker_that_gives_up_ends_it_for_all() {
    within(|| {
        let nodes = nodes(&[1, 2], small());
        let (mut senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        // Readers who have asked before are told as well.
        let reading: Vec<_> =
            receivers.into_iter().map(|receiver| thread::spawn(|| errors(vec![receiver]))).collect();
        senders.remove(2).give_up("the disk is full");
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        for reading in reading {
            let told = reading.join().unwrap();
            assert!(told[0].contains("worker 2 gave up: the disk is full"), "{told:?}");
        }
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 2).into_iter().unzip();
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)).0, 0);
        leave(nodes);
    });
}

#[test]
fn a_process_that_is_gone_ends_it_for_all() {
    within(|| {
        let mut nodes = nodes(&[1, 1, 1], Config { patience: Duration::from_secs(5), ..small() });
        let mut halves = halves(&nodes, 1);
        let (lost_sender, lost_receiver) = halves.remove(1);
        let (senders, receivers): (Vec<_>, Vec<_>) = halves.into_iter().unzip();
        let reading: Vec<_> =
            receivers.into_iter().map(|receiver| thread::spawn(|| errors(vec![receiver]))).collect();
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        drop(nodes.remove(1));
        drop((lost_sender, lost_receiver));
        for reading in reading {
            let told = reading.join().unwrap();
            assert!(told[0].contains("process 1"), "{told:?}");
        }
        leave(nodes);
    });
}

#[test]
fn a_number_is_used_once_and_strangers_are_sent_away() {
    within(|| {
        let nodes = nodes(&[1], small());
        let (sender, receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        assert!(matches!(nodes[0].shuffle(1, &schema()), Err(Error::Taken(_))));
        sender.finish().unwrap();
        drop(receiver);
        assert!(matches!(nodes[0].shuffle(1, &schema()), Err(Error::Taken(_))));
        leave(nodes);

        let (seats, cluster) = seats(&[1]);
        let nodes: Vec<Node> = join(seats, &cluster, small());
        let mut stranger = std::net::TcpStream::connect(cluster.address(NodeId(0))).unwrap();
        stranger.read_exact(&mut [0; 64]).unwrap(); // who is there
        stranger.write_all(&[b'x'; 64]).unwrap();
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)), "it is sent away");
        leave(nodes);
    });
}

#[test]
fn a_number_is_not_used_again_after_a_failure() {
    within(|| {
        let nodes = nodes(&[1], small());
        let (sender, receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        sender.give_up("the disk is full");
        assert!(errors([receiver])[0].contains("the disk is full"));
        assert!(matches!(nodes[0].shuffle(1, &schema()), Err(Error::Taken(_))));
        leave(nodes);
    });
}

#[test]
fn a_reader_that_has_failed_keeps_nobody_from_leaving() {
    within(|| {
        let nodes = nodes(&[1, 1], small());
        let other = Arc::new(Schema::new(vec![Field::new("m", DataType::Int64, false)]));
        let (mut sender, receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        let (none, mut failed) = nodes[1].shuffle(1, &other).unwrap().remove(0);
        (0..100).for_each(|_| sender.send_to(WorkerId(1), batch(0..100)).unwrap());
        sender.finish().unwrap();
        none.finish().unwrap();
        assert_eq!(sum(receiver.map(Result::unwrap)), (0, 0));
        assert!(failed.any(|batch| matches!(batch, Err(Error::Schema))));
        drop(failed);
        leave(nodes);
    });
}

#[test]
fn a_process_that_never_comes_is_waited_for_once() {
    within(|| {
        let (mut seats, cluster) = seats(&[1, 20]);
        let config = Config { patience: Duration::from_millis(500), ..small() };
        drop(seats.pop());
        let node = Node::join(seats.remove(0), cluster, NodeId(0), config).unwrap();
        let halves = node.shuffle(1, &schema()).unwrap();
        let began = Instant::now();
        drop(halves);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}

#[test]
fn all_wait_for_an_absent_process_together() {
    within(|| {
        let (mut seats, cluster) = seats(&[1, 1]);
        let config = Config { patience: Duration::from_secs(1), ..small() };
        drop(seats.pop());
        let node = Node::join(seats.remove(0), cluster, NodeId(0), config).unwrap();
        let shuffles = (0..8).map(|id| node.shuffle(id, &schema()).unwrap().remove(0));
        let (_senders, receivers): (Vec<_>, Vec<_>) = shuffles.unzip();
        let began = Instant::now();
        let reading: Vec<_> =
            receivers.into_iter().map(|receiver| thread::spawn(|| errors([receiver]))).collect();
        for reading in reading {
            let told = reading.join().unwrap();
            assert!(told[0].contains("process 1"), "{told:?}");
        }
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    });
}

#[test]
fn a_receiver_that_is_dropped_waits_for_nobody() {
    within(|| {
        let (mut seats, cluster) = seats(&[2, 20]);
        drop(seats.pop());
        let node = Node::join(seats.remove(0), cluster, NodeId(0), small()).unwrap();
        let halves = node.shuffle(1, &schema()).unwrap();
        let began = Instant::now();
        drop(halves);
        assert!(began.elapsed() < Duration::from_secs(5), "{:?}", began.elapsed());
    });
}

/// Once there is a connection to it, also if that is made to leave.
#[test]
fn who_comes_later_is_told_that_nobody_wants_its_rows() {
    within(|| {
        for asks in [true, false] {
            let (mut seats, cluster) = seats(&[1, 1]);
            drop(seats.pop());
            let first = Node::join(seats.remove(0), cluster.clone(), NodeId(0), small()).unwrap();
            let (sender, unread) = first.shuffle(1, &schema()).unwrap().remove(0);
            sender.finish().unwrap();
            drop(unread);
            let seat = Seat::bind(cluster.address(NodeId(1))).unwrap();
            let second = Node::join(seat, cluster, NodeId(1), small()).unwrap();
            let (mut sender, receiver) = second.shuffle(1, &schema()).unwrap().remove(0);
            sender.send_to(WorkerId(0), batch(0..10)).unwrap();
            sender.finish().unwrap();
            assert_eq!(sum(receiver.map(Result::unwrap)).0, 0);
            let nodes = vec![first, second];
            if asks {
                let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 2).into_iter().unzip();
                senders.into_iter().for_each(|sender| sender.finish().unwrap());
                assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)).0, 0);
            }
            leave(nodes);
        }
    });
}

#[test]
fn blocks_for_a_process_that_is_gone_are_dropped() {
    within(|| {
        let mut nodes = nodes(&[1, 1], small());
        let mut halves = halves(&nodes, 1);
        let (lost_sender, lost_receiver) = halves.remove(1);
        let (mut sender, receiver) = halves.remove(0);
        let (mut later, unread) = nodes[0].shuffle(2, &schema()).unwrap().remove(0);
        lost_sender.finish().unwrap();
        for n in 0..2 {
            sender.send_to(WorkerId(n), batch(0..10)).unwrap();
            later.send_to(WorkerId(1), batch(0..10)).unwrap();
        }
        sender.finish().unwrap();
        assert_eq!(sum(receiver.map(Result::unwrap)).0, 10);
        // It has given what it had, and not fetched what it needs.
        drop(nodes.remove(1));
        drop(lost_receiver);
        thread::sleep(Duration::from_millis(300));
        // Those that are finished later are not kept, either.
        later.finish().unwrap();
        drop(unread);
        let began = Instant::now();
        leave(nodes);
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    });
}

/// Takes connections to `address`, and ends the first when it is told to.
fn middle(address: SocketAddr) -> (SocketAddr, Sender<()>) {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let middle = listener.local_addr().unwrap();
    let (end, ends) = channel();
    let mut ends = Some(ends);
    thread::spawn(move || {
        for client in listener.incoming().map(Result::unwrap) {
            let server = TcpStream::connect(address).unwrap();
            for (from, to) in [(&client, &server), (&server, &client)] {
                let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                thread::spawn(move || {
                    let _ = std::io::copy(&mut from, &mut to); // it may be reset
                    let _ = to.shutdown(Shutdown::Write);
                });
            }
            if let Some(ends) = ends.take() {
                thread::spawn(move || {
                    ends.recv().unwrap();
                    [client, server].iter().for_each(|stream| stream.shutdown(Shutdown::Both).unwrap());
                });
            }
        }
    });
    (middle, end)
}

#[test]
fn a_process_of_which_only_a_connection_is_gone_keeps_no_blocks() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let (middle, end) = middle(cluster.address(NodeId(1)));
        let seen = Cluster::new(cluster.token(), &[(cluster.address(NodeId(0)), 1), (middle, 1)]).unwrap();
        let mut nodes: Vec<_> = (0..)
            .map(NodeId)
            .zip(seats)
            .zip([seen, cluster])
            .map(|((me, seat), cluster)| Node::join(seat, cluster, me, small()).unwrap())
            .collect();
        let mut halves = halves(&nodes, 1);
        let (mut sender, receiver) = halves.remove(1);
        let (none, asking) = halves.remove(0);
        none.finish().unwrap();
        let asking = thread::spawn(|| errors([asking]));
        while nodes[1].served().requests == 0 {
            thread::yield_now();
        }
        // The other has what it needs.
        sender.send_to(WorkerId(0), batch(0..10)).unwrap();
        let reading = thread::spawn(|| receiver.map(|rows| rows.map(drop)).collect::<Vec<_>>());
        while nodes[0].served().chunks == 0 {
            thread::yield_now();
        }
        end.send(()).unwrap();
        let told = asking.join().unwrap();
        assert!(told[0].contains("process 1 is gone"), "{told:?}");
        sender.finish().unwrap();
        assert!(reading.join().unwrap().is_empty());
        // While the one that could ask for them is still there.
        assert!(nodes.pop().unwrap().leave());
    });
}

/// It would wait for what the one before had begun, and never does.
#[test]
fn a_process_that_is_started_anew_is_not_the_one_before() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let mut nodes: Vec<Node> = join(seats, &cluster, small());
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)).0, 0);
        drop(nodes.remove(1));
        let seat = Seat::bind(cluster.address(NodeId(1))).unwrap();
        let _anew = Node::join(seat, cluster, NodeId(1), small()).unwrap();
        for id in 2..4 {
            let (sender, receiver) = nodes[0].shuffle(id, &schema()).unwrap().remove(0);
            sender.finish().unwrap();
            let told = errors([receiver]);
            assert!(told[0].contains("process 1 is gone"), "{told:?}");
            // The first may still have gone to the one before.
            assert!(id == 2 || told[0].contains("started anew"), "{told:?}");
        }
        leave(nodes);
    });
}

#[test]
fn more_in_one_piece_than_anybody_takes_is_refused() {
    within(|| {
        let column: ArrayRef = Arc::new(Int64Array::from(vec![0; 8 << 20]));
        let columns: Vec<_> = (0..40).map(|n| (n.to_string(), column.clone())).collect();
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let nodes = nodes(&[1, 1], small());
        let (mut sender, _receiver) = nodes[0].shuffle(1, &batch.schema()).unwrap().remove(0);
        let error = sender.send_to(WorkerId(1), batch).unwrap_err();
        assert!(error.to_string().starts_with("rows in one piece: "), "{error}");
    });
}
