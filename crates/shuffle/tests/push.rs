//! Shuffles by push: rows arrive once, whatever the sizes; who fails ends it for everybody, with a reason.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use arrow_array::{Array, ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_schema::{DataType, Field, Schema};
use thallus_shuffle::push::{Config, Node};
use thallus_shuffle::{Error, NodeId, Partition, WorkerId};

use common::{batch, errors, halves, join, leave, schema, seats, sum, values, within};

const SMALL: Config = Config {
    window: 4 << 10,
    outgoing: 4 << 10,
    pool: 64 << 10,
    batch_rows: 100,
    patience: Duration::from_secs(30),
};

fn nodes(workers: &[usize], config: Config) -> Vec<Node> {
    common::nodes(workers, config)
}

/// Sends `rows` integers from each worker through two shuffles, the second by another rule, and checks that all arrive.
fn twice(workers: &[usize], config: Config, rows: i64, first: &Partition, second: &Partition) {
    let nodes = nodes(workers, config);
    let all: usize = workers.iter().sum();
    for round in 0..2 {
        let (counted, summed) = (AtomicUsize::new(0), std::sync::atomic::AtomicI64::new(0));
        thread::scope(|scope| {
            for node in &nodes {
                let one = node.shuffle(round * 2, &schema()).unwrap();
                let two = node.shuffle(round * 2 + 1, &schema()).unwrap();
                for ((mut sender, middle), (mut next, receiver)) in one.into_iter().zip(two) {
                    let (counted, summed) = (&counted, &summed);
                    scope.spawn(move || {
                        let me = i64::from(sender.worker().0);
                        sender.partition(first).unwrap();
                        for from in (0..rows).step_by(1_000) {
                            let to = rows.min(from + 1_000);
                            sender.send(batch((from..to).map(|n| me * rows + n))).unwrap();
                        }
                        sender.finish().unwrap();
                    });
                    scope.spawn(move || {
                        next.partition(second).unwrap();
                        middle.for_each(|batch| next.send(batch.unwrap()).unwrap());
                        next.finish().unwrap();
                    });
                    scope.spawn(move || {
                        let (count, part) = sum(receiver.map(Result::unwrap));
                        counted.fetch_add(count, Ordering::Relaxed);
                        summed.fetch_add(part, Ordering::Relaxed);
                    });
                }
            }
        });
        let total = rows * all as i64;
        assert_eq!(counted.into_inner(), total as usize);
        assert_eq!(summed.into_inner(), total * (total - 1) / 2);
    }
    leave(nodes);
}

#[test]
fn all_rows_of_all_workers_arrive() {
    within(|| twice(&[2, 1, 3], Config::default(), 50_000, &Partition::Hash(vec![0]), &Partition::Random(3)));
}

#[test]
fn buffers_that_are_full_most_of_the_time_lose_nothing() {
    within(|| twice(&[2, 2], SMALL, 20_000, &Partition::Random(1), &Partition::Hash(vec![0])));
}

#[test]
fn more_workers_than_cores_and_buffers_that_are_full() {
    within(|| twice(&[4; 4], SMALL, 3_000, &Partition::Hash(vec![0]), &Partition::Hash(vec![0])));
}

#[test]
fn a_single_worker_shuffles_with_itself() {
    within(|| twice(&[1], SMALL, 10_000, &Partition::Hash(vec![0]), &Partition::Hash(vec![0])));
}

#[test]
fn all_rows_for_one_worker() {
    let bounds: ArrayRef = Arc::new(Int64Array::from(vec![i64::MAX; 3]));
    let skewed = Partition::Range { column: 0, bounds };
    within(move || twice(&[1, 1, 1, 1], SMALL, 5_000, &skewed, &Partition::Hash(vec![0])));
}

#[test]
fn no_rows_end_as_well() {
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
fn a_broadcast_reaches_everybody() {
    within(|| {
        let nodes = nodes(&[2, 1], SMALL);
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        let reading: Vec<_> = receivers
            .into_iter()
            .map(|receiver| thread::spawn(move || sum(receiver.map(Result::unwrap))))
            .collect();
        for mut sender in senders {
            sender.partition(&Partition::Broadcast).unwrap();
            sender.send(batch(0..1_000)).unwrap();
            sender.finish().unwrap();
        }
        for reading in reading {
            assert_eq!(reading.join().unwrap(), (3_000, 3 * 499_500));
        }
        leave(nodes);
    });
}

#[test]
fn rows_larger_than_every_buffer_pass() {
    within(|| {
        let schema = Arc::new(Schema::new(vec![Field::new("t", DataType::Utf8, true)]));
        let nodes = nodes(&[1, 1], SMALL);
        let mut halves: Vec<_> = nodes.iter().flat_map(|node| node.shuffle(1, &schema).unwrap()).collect();
        let (mut sender, mine) = halves.remove(0);
        let (other, receiver) = halves.remove(0);
        let sent = schema.clone();
        let sending = thread::spawn(move || {
            for bytes in [3 << 20, 0, 1, 8 << 20, 4 << 10, 5_000] {
                let text: ArrayRef = Arc::new(StringArray::from(vec![Some("x".repeat(bytes)), None]));
                sender.send_to(WorkerId(1), RecordBatch::try_new(sent.clone(), vec![text]).unwrap()).unwrap();
            }
            sender.finish().unwrap();
        });
        other.finish().unwrap();
        let mut lengths = Vec::new();
        for batch in receiver {
            let batch = batch.unwrap();
            let text = batch.column(0).as_any().downcast_ref::<StringArray>().unwrap();
            lengths.extend(text.iter().map(|text| text.map(str::len)));
            assert!(text.iter().flatten().all(|text| text.bytes().all(|byte| byte == b'x')));
        }
        let all = [3 << 20, 0, 1, 8 << 20, 4 << 10, 5_000].into_iter().flat_map(|bytes| [Some(bytes), None]);
        assert_eq!(lengths, all.collect::<Vec<_>>());
        sending.join().unwrap();
        drop(mine);
        leave(nodes);
    });
}

/// A frame for each row would be a way there and back for each.
#[test]
fn windows_smaller_than_a_row_are_no_frame_for_each_row() {
    within(|| {
        let config = Config { window: 1, outgoing: 1, ..SMALL };
        twice(&[2, 1, 2], config, 5_000, &Partition::Hash(vec![0]), &Partition::Random(1));
        let nodes = nodes(&[1, 1], config);
        assert!(frames(&nodes, 10_000) < 50);
        leave(nodes);
    });
}

/// Who has little room gets small pieces, also of those who have more.
#[test]
fn pieces_suit_the_window_of_who_gets_them() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let joining: Vec<_> = (0..)
            .map(NodeId)
            .zip(seats)
            .zip([1 << 20, 64 << 10])
            .map(|((me, seat), window)| {
                let (cluster, config) = (cluster.clone(), Config { window, ..Config::default() });
                thread::spawn(move || Node::join(seat, cluster, me, config).unwrap())
            })
            .collect();
        let nodes: Vec<_> = joining.into_iter().map(|joining| joining.join().unwrap()).collect();
        assert!(frames(&nodes, 100_000) > 800_000 / (16 << 10));
        leave(nodes);
    });
}

/// In which so many integers, sent at once, reach the other process.
fn frames(nodes: &[Node], rows: i64) -> u64 {
    let mut halves = halves(nodes, 1);
    let ((mut sender, _own), (other, receiver)) = (halves.remove(0), halves.remove(0));
    let reading = thread::spawn(move || sum(receiver.map(Result::unwrap)));
    sender.send_to(WorkerId(1), batch(0..rows)).unwrap();
    sender.finish().unwrap();
    other.finish().unwrap();
    assert_eq!(reading.join().unwrap(), (usize::try_from(rows).unwrap(), rows * (rows - 1) / 2));
    nodes[0].links()[0].1.frames
}

#[test]
fn memory_is_used_again_by_later_shuffles() {
    within(|| {
        let config = Config { window: 64 << 10, ..Config::default() };
        let nodes = nodes(&[1, 1], config);
        let mut after_first = 0;
        for id in 0..10 {
            let mut halves = halves(&nodes, id);
            let (mut sender, mine) = halves.remove(0);
            let (other, receiver) = halves.remove(0);
            let reading = thread::spawn(move || sum(receiver.map(Result::unwrap)));
            (0..100).for_each(|_| sender.send_to(WorkerId(1), batch(0..1_000)).unwrap());
            sender.finish().unwrap();
            other.finish().unwrap();
            assert_eq!(reading.join().unwrap().0, 100_000);
            drop(mine);
            let status = nodes[1].pool();
            assert_eq!(status.used_bytes, 0);
            if id == 0 {
                after_first = status.allocated;
            }
            // A window of 64 KiB holds 7 frames of 8 KiB and some; twice as many while a reader takes them.
            assert!(status.allocated <= after_first + 16, "{status:?}");
        }
        leave(nodes);
    });
}

/// One worker reads nothing. What is sent to the others arrives.
#[test]
fn a_slow_reader_holds_up_nobody_else() {
    within(|| {
        let nodes = nodes(&[1, 1, 1], SMALL);
        let mut halves = halves(&nodes, 1).into_iter();
        let (mut sender, own) = halves.next().unwrap();
        let (one, slow) = halves.next().unwrap();
        let (two, fast) = halves.next().unwrap();
        let mut sent_to_slow = 0;
        // As many as fit into outgoing and incoming buffers.
        for _ in 0..6 {
            sender.send_to(WorkerId(1), batch(0..100)).unwrap();
            sent_to_slow += 100;
        }
        let reading = thread::spawn(move || sum(fast.map(Result::unwrap)));
        (0..1_000).for_each(|_| sender.send_to(WorkerId(2), batch(0..100)).unwrap());
        sender.finish().unwrap();
        one.finish().unwrap();
        two.finish().unwrap();
        assert_eq!(reading.join().unwrap().0, 100_000);
        assert_eq!(sum(slow.map(Result::unwrap)).0, sent_to_slow);
        assert_eq!(sum(own.map(Result::unwrap)).0, 0);
        leave(nodes);
    });
}

#[test]
fn whoever_stops_reading_lets_the_others_go_on() {
    within(|| {
        let nodes = nodes(&[1, 2], SMALL);
        let mut halves = halves(&nodes, 1).into_iter();
        let (mut sender, own) = halves.next().unwrap();
        let (mut one, deaf) = halves.next().unwrap();
        let (two, listener) = halves.next().unwrap();
        drop(deaf);
        drop(own);
        let reading = thread::spawn(move || sum(listener.map(Result::unwrap)));
        for _ in 0..1_000 {
            sender.send_to(WorkerId(1), batch(0..100)).unwrap();
            sender.send_to(WorkerId(2), batch(0..10)).unwrap();
            one.send_to(WorkerId(0), batch(0..100)).unwrap();
            one.send_to(WorkerId(1), batch(0..100)).unwrap();
        }
        sender.finish().unwrap();
        one.finish().unwrap();
        two.finish().unwrap();
        assert_eq!(reading.join().unwrap().0, 10_000);
        leave(nodes);
    });
}

#[test]
fn a_worker_that_gives_up_ends_it_for_all() {
    within(|| {
        let nodes = nodes(&[1, 2], SMALL);
        let (mut senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        let mut full = senders.remove(0);
        let blocked = thread::spawn(move || {
            loop {
                // Nobody reads this.
                if let Err(error) = full.send_to(WorkerId(2), batch(0..100)) {
                    return error.to_string();
                }
            }
        });
        senders.remove(1).give_up("the disk is full");
        let told = errors(receivers);
        assert!(told.iter().all(|told| told == "worker 2 gave up: the disk is full"), "{told:?}");
        assert_eq!(blocked.join().unwrap(), "worker 2 gave up: the disk is full");
        drop(senders);
        // The next one works.
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 2).into_iter().unzip();
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)).0, 0);
        leave(nodes);
    });
}

#[test]
fn a_sender_that_is_dropped_is_no_end() {
    within(|| {
        let nodes = nodes(&[1, 1], SMALL);
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        drop(senders);
        for told in errors(receivers) {
            assert!(told.ends_with("gave up: it stopped before its end"), "{told}");
        }
        leave(nodes);
    });
}

#[test]
fn a_process_that_is_gone_ends_it_for_all() {
    within(|| {
        let mut nodes = nodes(&[1, 1, 1], SMALL);
        let mut halves = halves(&nodes, 1);
        let (lost_sender, lost_receiver) = halves.remove(1);
        let (mut senders, receivers): (Vec<_>, Vec<_>) = halves.into_iter().unzip();
        let mut blocked = senders.remove(0);
        let blocked = thread::spawn(move || {
            loop {
                if let Err(error) = blocked.send_to(WorkerId(2), batch(0..100)) {
                    return error.to_string();
                }
            }
        });
        drop(nodes.remove(1));
        let told = errors(receivers);
        assert!(
            told.iter().all(|told| told.contains("process 1 is gone before its workers have ended")),
            "{told:?}"
        );
        let told = blocked.join().unwrap();
        assert!(told.contains("process 1 is gone before its workers have ended"), "{told}");
        drop((lost_sender, lost_receiver, senders));
        // Later ones say so, too.
        let (senders, receivers): (Vec<_>, Vec<_>) =
            nodes[0].shuffle(2, &schema()).unwrap().into_iter().unzip();
        assert!(errors(receivers)[0].contains("process 1 is gone"));
        drop(senders);
        assert!(nodes.into_iter().all(Node::leave), "those who are left can leave");
    });
}

#[test]
fn a_process_may_leave_when_its_part_is_done() {
    within(|| {
        let mut nodes = nodes(&[1, 1], SMALL);
        let mut halves = halves(&nodes, 1);
        let (mut sender, receiver) = halves.remove(0);
        let (other, other_receiver) = halves.remove(0);
        sender.send_to(WorkerId(1), batch(0..100)).unwrap();
        sender.send_to(WorkerId(0), batch(0..100)).unwrap();
        sender.finish().unwrap();
        other.finish().unwrap();
        assert_eq!(sum(receiver.map(Result::unwrap)).0, 100);
        assert!(nodes.remove(0).leave());
        // What was sent before is there.
        assert_eq!(sum(other_receiver.map(Result::unwrap)).0, 100);
        let (senders, receivers): (Vec<_>, Vec<_>) =
            nodes[0].shuffle(2, &schema()).unwrap().into_iter().unzip();
        assert_eq!(errors(receivers), ["process 0 has left"]);
        drop(senders);
        leave(nodes);
    });
}

#[test]
fn a_number_is_used_once_and_other_columns_are_refused() {
    within(|| {
        let nodes = nodes(&[1, 1], SMALL);
        let mut halves = halves(&nodes, 1);
        assert!(matches!(nodes[0].shuffle(1, &schema()), Err(Error::Taken(_))));
        let other = Arc::new(Schema::new(vec![Field::new("n", DataType::Utf8, false)]));
        let text: ArrayRef = Arc::new(StringArray::from(vec!["x"]));
        let text = RecordBatch::try_new(other, vec![text]).unwrap();
        assert!(matches!(halves[0].0.send(text), Err(Error::Schema)));
        drop(halves);
        leave(nodes);
    });
}

#[test]
fn processes_that_disagree_on_columns_are_told() {
    within(|| {
        let nodes = nodes(&[1, 1], SMALL);
        let other = Arc::new(Schema::new(vec![Field::new("m", DataType::Int64, false)]));
        let (mut sender, receiver) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        let (other, other_receiver) = nodes[1].shuffle(1, &other).unwrap().remove(0);
        sender.send_to(WorkerId(1), batch(0..10)).unwrap();
        assert_eq!(errors(vec![other_receiver]), ["rows of other columns than the shuffle's"]);
        drop((sender, receiver, other));
        leave(nodes);
    });
}

#[test]
fn strangers_do_not_disturb_the_meeting() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let address = cluster.address(NodeId(1));
        let mut stranger = std::net::TcpStream::connect(address).unwrap();
        stranger.write_all(&[b'x'; 64]).unwrap();
        let nodes: Vec<Node> = join(seats, &cluster, SMALL);
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)), "it is sent away");
        leave(nodes);
    });
}

#[test]
fn strangers_that_say_nothing_hold_up_nobody() {
    within(|| {
        let (seats, cluster) = seats(&[1, 1]);
        let silent = || std::net::TcpStream::connect(cluster.address(NodeId(1))).unwrap();
        let mut silent: Vec<_> = (0..80).map(|_| silent()).collect();
        let nodes: Vec<Node> = join(seats, &cluster, SMALL);
        assert!(matches!(silent[0].read(&mut [0]), Ok(0) | Err(_)), "it is sent away");
        leave(nodes);
    });
}

#[test]
fn who_does_not_come_is_named() {
    within(|| {
        let (mut seats, cluster) = seats(&[1, 1]);
        let config = Config { patience: Duration::from_millis(200), ..SMALL };
        // The last has nobody to connect to, and nobody connects to it.
        let error = Node::join(seats.remove(1), cluster.clone(), NodeId(1), config).unwrap_err();
        assert_eq!(error.to_string(), "not everybody came within the time: not all processes have connected");
        // Its seat is gone, so the first finds nobody.
        let error = Node::join(seats.remove(0), cluster, NodeId(0), config).unwrap_err();
        assert!(error.to_string().contains("process 1"), "{error}");
    });
}

#[test]
fn received_rows_may_be_kept_as_long_as_one_likes() {
    within(|| {
        let nodes = nodes(&[1, 1], SMALL);
        let mut halves = halves(&nodes, 1);
        let (mut sender, own) = halves.remove(0);
        let (other, receiver) = halves.remove(0);
        let keeping = thread::spawn(move || receiver.map(Result::unwrap).collect::<Vec<_>>());
        (0..500).for_each(|n| sender.send_to(WorkerId(1), batch(n * 100..n * 100 + 100)).unwrap());
        sender.finish().unwrap();
        other.finish().unwrap();
        let kept = keeping.join().unwrap();
        let all: Vec<i64> = kept.iter().flat_map(values).copied().collect();
        assert_eq!(all, (0..50_000).collect::<Vec<_>>());
        assert!(
            kept.iter().all(|batch| batch.column(0).to_data().buffers()[0].as_ptr().align_offset(64) == 0)
        );
        drop(own);
        leave(nodes);
        drop(kept);
    });
}

#[test]
fn a_number_is_not_used_again_and_trying_to_does_no_harm() {
    within(|| {
        let nodes = nodes(&[1, 1], SMALL);
        let (senders, receivers): (Vec<_>, Vec<_>) = halves(&nodes, 1).into_iter().unzip();
        senders.into_iter().for_each(|sender| sender.finish().unwrap());
        assert!(matches!(nodes[0].shuffle(1, &schema()), Err(Error::Taken(_))), "one that is going on");
        assert_eq!(sum(receivers.into_iter().flatten().map(Result::unwrap)), (0, 0));
        assert!(matches!(nodes[0].shuffle(1, &schema()), Err(Error::Taken(_))), "one that is over");
        leave(nodes);
    });
}

#[test]
fn a_reader_that_has_failed_lets_the_others_go_on_while_it_is_kept() {
    within(|| {
        let nodes = nodes(&[1, 2], SMALL);
        let other = Arc::new(Schema::new(vec![Field::new("m", DataType::Int64, false)]));
        let (mut sender, own) = nodes[0].shuffle(1, &schema()).unwrap().remove(0);
        let mut others = nodes[1].shuffle(1, &other).unwrap().into_iter();
        let ((_one, mut failed), (_two, _)) = (others.next().unwrap(), others.next().unwrap());
        sender.send_to(WorkerId(1), batch(0..100)).unwrap();
        assert!(matches!(failed.next(), Some(Err(Error::Schema))));
        (0..100).for_each(|_| sender.send_to(WorkerId(1), batch(0..100)).unwrap());
        drop((sender, own, failed));
    });
}

#[test]
fn any_patience_will_do() {
    within(|| leave(nodes(&[1, 1], Config { patience: Duration::MAX, ..SMALL })));
}
