use std::sync::Arc;

use loom::thread;

use super::*;
use crate::ring::class_size;

/// What several receivers got, in any order.
fn sorted<const N: usize>(receivers: [thread::JoinHandle<Vec<u8>>; N]) -> [Vec<u8>; N] {
    let mut bytes = receivers.map(|receiver| receiver.join().unwrap());
    bytes.sort_unstable();
    bytes
}

fn spawn_recv(end: &Arc<End>) -> thread::JoinHandle<Vec<u8>> {
    let end = end.clone();
    thread::spawn(move || end.recv())
}

fn who_receives_gets_every_byte(receive: fn(&End) -> Vec<u8>) {
    explore(3, move || {
        let (near, far) = switched_connection();
        let reader = thread::spawn(move || {
            let mut bytes = receive(&far);
            while bytes.len() < 3 {
                bytes.extend(receive(&far));
            }
            bytes
        });
        near.send(1);
        near.send(2);
        near.send(3);
        assert_eq!(reader.join().unwrap(), [1, 2, 3]);
    });
}

#[test]
fn a_sleeper_for_data_gets_every_byte() {
    who_receives_gets_every_byte(End::recv);
}

#[test]
fn a_listener_gets_every_byte() {
    who_receives_gets_every_byte(End::recv_listening);
}

fn of_two_on_one_stream_none_sleeps_on(other: fn(&End) -> Vec<u8>) {
    explore(3, move || {
        let (near, far) = switched_connection();
        let end = far.clone();
        let readers = [spawn_recv(&far), thread::spawn(move || other(&end))];
        assert_eq!(near.try_send(&[1; 2 * ROOM]), 2 * ROOM);
        assert_eq!(sorted(readers), [[1; ROOM], [1; ROOM]]);
    });
}

#[test]
fn of_two_sleepers_on_one_stream_none_sleeps_on_while_there_is_data() {
    of_two_on_one_stream_none_sleeps_on(End::recv);
}

#[test]
fn of_a_listener_and_a_sleeper_on_one_stream_none_sleeps_on_while_there_is_data() {
    of_two_on_one_stream_none_sleeps_on(End::recv_listening);
}

#[test]
fn of_two_sleepers_on_one_stream_none_sleeps_on_after_its_end() {
    explore(3, || {
        let (near, far) = switched_connection();
        let readers = [spawn_recv(&far), spawn_recv(&far)];
        near.shut_sending();
        assert_eq!(sorted(readers), [[], []]);
    });
}

#[test]
fn the_end_reaches_a_sleeper_beside_the_reader_of_the_last_byte() {
    explore(3, || {
        let (near, far) = switched_connection();
        let readers = [spawn_recv(&far), spawn_recv(&far)];
        near.send(1);
        near.shut_sending();
        assert_eq!(sorted(readers), [vec![], vec![1]]);
    });
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_chime_that_another_thread_hears_is_lost() {
    explore(3, || {
        let (near, far) = switched_connection();
        let listener = far.clone();
        let reader = thread::spawn(move || listener.recv_listening());
        let without_claim = thread::spawn(move || far.from.pipe.lock().chimes = 0);
        near.send(1);
        without_claim.join().unwrap();
        assert_eq!(reader.join().unwrap(), [1]);
    });
}

fn both_directions_reach_their_sleepers(send: fn(&End, u8)) {
    explore(3, move || {
        let (near, far) = switched_connection();
        let full = vec![0; class_size(0) as usize];
        assert_eq!(near.try_send(&full), full.len());
        let writer = near.clone();
        let writer = thread::spawn(move || send(&writer, 1));
        let reader = spawn_recv(&near);
        far.recv();
        far.send(2);
        writer.join().unwrap();
        assert_eq!(reader.join().unwrap(), [2]);
    });
}

#[test]
fn bells_of_both_directions_reach_their_sleepers_through_one_stream() {
    both_directions_reach_their_sleepers(End::send);
}

#[test]
fn a_listener_for_space_is_woken_beside_a_sleeper_for_data() {
    both_directions_reach_their_sleepers(End::send_listening);
}

#[test]
fn a_poll_for_writing_is_woken_beside_a_reader_that_drains() {
    explore(2, || {
        let (near, far) = switched_connection();
        let full = vec![0; class_size(0) as usize];
        assert_eq!(near.try_send(&full), full.len());
        let writer = near.clone();
        let writer = thread::spawn(move || {
            writer.poll_writable(Wakes::ByTcp);
            writer.try_send(&[1])
        });
        let reader = spawn_recv(&near);
        far.recv();
        far.send(2);
        assert_eq!(writer.join().unwrap(), 1);
        assert_eq!(reader.join().unwrap(), [2]);
    });
}

#[test]
fn a_poll_for_the_end_is_woken_behind_bytes_that_nobody_reads() {
    explore(3, || {
        let (near, far) = switched_connection();
        // The bell for the first byte stays unread, like the byte.
        far.from.control.data_armed.0.arm(Wakes::ByTcp);
        near.send(1);
        far.from.control.data_armed.0.disarm(Wakes::ByTcp);
        let poller = thread::spawn(move || far.poll_end());
        near.send(2);
        near.shut_sending();
        poller.join().unwrap();
    });
}

#[test]
fn a_cold_registration_is_reported_beside_a_reader_that_drains() {
    explore(3, || {
        let (near, far) = switched_connection();
        waiting::arm_words(&*far, false, Wakes::ByTcp);
        waiting::take_leftovers(&*far);
        let reader = spawn_recv(&far);
        let event_loop = thread::spawn(move || far.recv_when_reported());
        assert_eq!(near.try_send(&[1; 2 * ROOM]), 2 * ROOM);
        assert_eq!(sorted([reader, event_loop]), [[1; ROOM], [1; ROOM]]);
    });
}

/// As where an epoll set is registered for room on which nobody waits: the bell for it is never taken.
fn sleep_beside_a_bell_for_who_does_not_run<const READERS: usize>() {
    explore(2, || {
        let (near, far) = switched_connection();
        let full = vec![0; class_size(0) as usize];
        assert_eq!(near.try_send(&full), full.len());
        waiting::arm_words(&*near, true, Wakes::ByTcp);
        while far.from.control.used() > 0 {
            far.recv();
        }
        assert!(near.has_space() && near.from.pipe.lock().is_readable());
        let readers = [(); READERS].map(|()| spawn_recv(&near));
        for _ in 0..READERS {
            assert_eq!(far.try_send(&[1; ROOM]), ROOM);
        }
        assert_eq!(sorted(readers), [[1; ROOM]; READERS].map(Vec::from));
    });
}

#[test]
fn a_reader_sleeps_beside_a_bell_for_who_does_not_run() {
    sleep_beside_a_bell_for_who_does_not_run::<1>();
}

#[test]
fn of_two_readers_beside_a_bell_for_who_does_not_run_none_sleeps_on() {
    sleep_beside_a_bell_for_who_does_not_run::<2>();
}

#[test]
fn of_two_sleepers_none_sleeps_on_where_the_stream_leaves_tcp() {
    explore(2, || {
        let (near, far) = connection();
        let readers = [spawn_recv(&far), spawn_recv(&far)];
        near.send_text(&[1]);
        near.leave_tcp(1);
        near.send(2);
        assert_eq!(sorted(readers), [[1], [2]]);
    });
}

#[test]
fn a_writer_takes_no_byte_from_an_event_loop_where_the_stream_leaves_tcp() {
    explore(2, || {
        let (near, far) = connection();
        near.leave_tcp(0);
        far.recv_switched.store(1, Ordering::Relaxed);
        let full = vec![0; class_size(0) as usize];
        assert_eq!(near.try_send(&full), full.len());
        waiting::arm_words(&*near, false, Wakes::ByTcp);
        waiting::take_leftovers(&*near);
        let writer = near.clone();
        let writer = thread::spawn(move || writer.send(1));
        let event_loop = thread::spawn(move || near.recv_when_reported());
        far.send_text(&[2]);
        far.leave_tcp(1);
        while far.from.control.used() > 1 {
            far.recv();
        }
        writer.join().unwrap();
        assert_eq!(event_loop.join().unwrap(), [2]);
    });
}

#[test]
fn the_reader_follows_through_a_window_that_grows() {
    explore(2, || {
        let (near, far) = switched_connection();
        let count = class_size(0) as usize + 3;
        let bytes: Vec<u8> = (0..count as u8).collect();
        // A sleeper for space makes the reader look at the windows, too.
        near.to.control.space_armed.0.arm(Wakes::ByTcp);
        let reader = thread::spawn(move || {
            let mut bytes = Vec::new();
            while bytes.len() < count {
                bytes.extend(far.recv());
            }
            bytes
        });
        let mut sent = near.try_send(&bytes);
        near.producer().grow(1, 1).unwrap();
        while sent < count {
            sent += near.try_send(&bytes[sent..]);
        }
        assert_eq!(reader.join().unwrap(), bytes);
    });
}

/// A thread that sleeps in a read while another goes back to TCP.
fn a_sleeper_beside_who_goes_back(looks: bool) {
    explore(3, move || {
        let (near, far) = switched_connection();
        let reader = spawn_recv(&far);
        let goer = thread::spawn(move || far.move_aside(looks));
        near.send(1);
        goer.join().unwrap();
        assert_eq!(reader.join().unwrap(), [1]);
    });
}

#[test]
fn who_sleeps_hears_of_what_another_moves_aside() {
    a_sleeper_beside_who_goes_back(true);
}

#[test]
#[should_panic(expected = "deadlock")]
fn who_sleeps_hears_nothing_of_what_is_moved_aside_without_a_look() {
    a_sleeper_beside_who_goes_back(false);
}

/// One that has seen bytes of TCP before a bell, when another thread takes these and goes back.
#[test]
fn who_looks_before_a_sleep_notes_nothing_of_a_stream_that_goes_back() {
    explore(4, || {
        let (near, far) = connection();
        near.send_text(b"t");
        near.leave_tcp(1);
        waiting::ring(&*near);
        let sleeper = far.clone();
        let sleeper = thread::spawn(move || waiting::sleep_for_data(&*sleeper, |_| Ok(())));
        assert_eq!(far.try_recv(1), Ok(b"t".to_vec()));
        far.go_back();
        sleeper.join().unwrap().unwrap();
        assert_eq!(far.recv_switched.load(Ordering::SeqCst), 0);
    });
}
