//! Messages of every size and alignment around the limits of a fabric: nothing of them is lost, doubled or moved.

use super::Behaviour;
use crate::calls::{self, Fd, quietly};
use crate::say;
use crate::side::{Pattern, Side};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("around_the_inline_limit", receives_small, sends_small),
    Behaviour::connected("around_the_ring", receives_around_the_ring, sends_around_the_ring)
        .environment(&[("THALLUS_RING", "16K")]),
    Behaviour::connected("around_the_ring_one_at_a_time", answers_around_the_ring, asks_around_the_ring)
        .environment(&[("THALLUS_RING", "16K")]),
];

/// Bytes that a request to the device may carry itself, as far as it is asked for more. Devices grant this or less.
const INLINE: usize = 256;
/// The smallest ring over RDMA. In shared memory the windows of this setting have half as much.
const RING: usize = 16 << 10;

/// Every size, at each of the eight alignments.
fn small() -> impl Iterator<Item = (usize, usize)> {
    (1..=3 * INLINE).flat_map(|size| (0..8).map(move |alignment| (size, alignment)))
}

/// Sizes around each size at which something else happens than below it, with one alignment after the other.
fn around_the_ring() -> impl Iterator<Item = (usize, usize)> {
    // What a message brings with it, and what a ring keeps free, is less than this.
    const AROUND: usize = 80;
    let edges = [RING / 8, RING / 4, RING / 2, RING, 2 * RING, 3 * RING];
    edges.into_iter().flat_map(|edge| edge - AROUND..=edge + 16).enumerate().map(|(n, size)| (size, n % 8))
}

/// Where in a buffer the address is `alignment` above a multiple of 8.
fn aligned(buffer: &[u8], alignment: usize) -> usize {
    (alignment + 8 - buffer.as_ptr().addr() % 8) % 8
}

fn send_sized(fd: Fd, pattern: &mut Pattern, (size, alignment): (usize, usize)) {
    let mut buffer = vec![0; size + 16];
    let start = aligned(&buffer, alignment);
    let message = &mut buffer[start..start + size];
    message.copy_from_slice(&pattern.take(size));
    let mut sent = 0;
    while sent < size {
        sent += quietly(|| calls::send(fd, &message[sent..], 0)).expect("send");
    }
}

fn receive_sized(fd: Fd, pattern: &mut Pattern, (size, alignment): (usize, usize)) {
    let mut buffer = vec![0; size + 16];
    // Not as the sender's.
    let start = aligned(&buffer, (alignment * 3 + 1) % 8);
    let mut end = start;
    while end < start + size {
        let count = quietly(|| calls::recv_into(fd, &mut buffer[end..start + size], 0)).expect("recv");
        assert_ne!(count, 0, "the stream ended early");
        end += count;
    }
    pattern.expect(&buffer[start..end]);
    assert!(buffer[..start].iter().chain(&buffer[end..]).all(|&byte| byte == 0), "written beside the buffer");
}

fn send_all(fd: Fd, messages: impl Iterator<Item = (usize, usize)>) {
    let mut pattern = Pattern::new(60);
    messages.for_each(|message| send_sized(fd, &mut pattern, message));
    say!("sent {}", pattern.position());
    calls::shutdown(fd, libc::SHUT_WR).expect("shutdown");
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

fn receive_all(fd: Fd, messages: impl Iterator<Item = (usize, usize)>) {
    let mut pattern = Pattern::new(60);
    messages.for_each(|message| receive_sized(fd, &mut pattern, message));
    say!("received {}", pattern.position());
    assert_eq!(calls::recv(fd, 1, 0), Ok(vec![]));
}

fn sends_small(_side: &Side, fd: Fd) {
    send_all(fd, small());
}

fn receives_small(_side: &Side, fd: Fd) {
    receive_all(fd, small());
}

fn sends_around_the_ring(_side: &Side, fd: Fd) {
    send_all(fd, around_the_ring());
}

fn receives_around_the_ring(_side: &Side, fd: Fd) {
    receive_all(fd, around_the_ring());
}

/// Each into an empty ring, both ways.
fn asks_around_the_ring(_side: &Side, fd: Fd) {
    let (mut ours, mut theirs) = (Pattern::new(61), Pattern::new(62));
    for (size, alignment) in around_the_ring() {
        send_sized(fd, &mut ours, (size, alignment));
        receive_sized(fd, &mut theirs, (size, alignment));
    }
    say!("{} each way", ours.position());
}

fn answers_around_the_ring(_side: &Side, fd: Fd) {
    let (mut ours, mut theirs) = (Pattern::new(62), Pattern::new(61));
    for (size, alignment) in around_the_ring() {
        receive_sized(fd, &mut theirs, (size, alignment));
        send_sized(fd, &mut ours, (size, alignment));
    }
    say!("{} each way", ours.position());
}
