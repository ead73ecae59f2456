//! Messages of every size and alignment around the limits of a fabric: nothing of them is lost, doubled or moved.

use super::Behaviour;
use super::peers::fill;
use super::waiting::segment_memory;
use crate::calls::{self, Family, Fd, quietly};
use crate::say;
use crate::side::{Pattern, Side, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    Behaviour::connected("around_the_inline_limit", receives_small, sends_small),
    Behaviour::connected("around_the_ring", receives_around_the_ring, sends_around_the_ring)
        .environment(&[("THALLUS_RING", "16K")]),
    Behaviour::connected("around_the_ring_one_at_a_time", answers_around_the_ring, asks_around_the_ring)
        .environment(&[("THALLUS_RING", "16K")]),
    Behaviour::connected("of_a_long_stream", answers_for_long, asks_for_long),
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

/// Bytes each way, after which a direction has gone through its widest window several times.
const LONG: usize = 24 << 20;
const LARGEST: usize = 60_000;
/// No multiple of a window: no place of one has the same bytes again.
const NOISE: usize = (1 << 20) - 4093;

/// Bytes of one direction, of which any [`LARGEST`] are in one piece, and how many have been there.
struct Noise(Vec<u8>, usize);

impl Noise {
    fn new(seed: u64) -> Self {
        let mut bytes = Pattern::new(seed).take(NOISE);
        bytes.extend_from_within(..LARGEST);
        Self(bytes, 0)
    }

    fn next(&mut self, size: usize) -> &[u8] {
        let start = self.1 % NOISE;
        self.1 += size;
        &self.0[start..start + size]
    }
}

/// Messages of all sizes there and back, `total` bytes at least.
fn echo(fd: Fd, total: usize, [ours, theirs]: &mut [Noise; 2], asks: bool) {
    let send = |noise: &mut Noise, size| {
        let message = noise.next(size);
        let mut sent = 0;
        while sent < size {
            sent += quietly(|| calls::send(fd, &message[sent..], 0)).expect("send");
        }
    };
    let end = ours.1 + total;
    let mut size = 1;
    while ours.1 < end {
        size = size * 16807 % LARGEST + 1;
        if asks {
            send(ours, size);
        }
        let at = theirs.1;
        assert!(
            receive_exactly(fd, size) == theirs.next(size),
            "of the {size} bytes from {at} some are wrong"
        );
        if !asks {
            send(ours, size);
        }
    }
}

fn asks_for_long(side: &Side, fd: Fd) {
    let mut noises = [Noise::new(64), Noise::new(65)];
    echo(fd, LONG, &mut noises, true);
    say!("{} bytes each way", noises[0].1);
    // On one processor both share its caches; a Unix socket must not take much more than the kernel's.
    let processors = std::thread::available_parallelism().expect("sched_getaffinity").get();
    let memory = segment_memory();
    let is_wide = memory >= 4 << 20;
    assert!(
        memory < 256 << 10 || is_wide == (side.family != Family::Unix && processors > 1),
        "{memory} bytes"
    );
    for _ in 0..2 {
        let filled = fill(fd);
        side.sync("full");
        side.tell(filled as u64);
        side.sync("empty");
        echo(fd, 2 << 20, &mut noises, true);
    }
    side.sync("done");
}

fn answers_for_long(side: &Side, fd: Fd) {
    let mut noises = [Noise::new(65), Noise::new(64)];
    echo(fd, LONG, &mut noises, false);
    for _ in 0..2 {
        side.sync("full");
        let mut left = side.told() as usize;
        while left > 0 {
            let data = quietly(|| calls::recv(fd, left.min(1 << 20), 0)).expect("recv");
            assert!(!data.is_empty() && data.iter().all(|&byte| byte == b'f'));
            left -= data.len();
        }
        side.sync("empty");
        echo(fd, 2 << 20, &mut noises, false);
    }
    side.sync("done");
}
