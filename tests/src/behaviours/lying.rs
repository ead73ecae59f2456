//! A peer that has a segment, and lies in it: the victim gets an error or nonsense on that connection, but is never kept
//! from what it wants to do next.
//!
//! The liar writes to its own mapping of the segment, through `/proc/self/mem`, at the offsets of docs/wire.md; without
//! the library it has none.

use std::fs::{File, OpenOptions};
use std::os::fd::BorrowedFd;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::SendFlags;

use super::peers::{echo, left_tcp, request_echoes};
use super::{Behaviour, Tally};
use crate::calls::{self, Fd, quietly};
use crate::say;
use crate::side::{Side, receive_exactly};

pub(super) const ALL: &[Behaviour] = &[
    lie("about_the_way_back", WAY_BACK, |side| victim(side, WAY_BACK), |side| liar(side, WAY_BACK)),
    lie("about_positions", POSITIONS, |side| victim(side, POSITIONS), |side| liar(side, POSITIONS)),
    lie("about_the_end_and_bells", ENDINGS, |side| victim(side, ENDINGS), |side| liar(side, ENDINGS)),
    lie("at_random", RANDOM, |side| victim(side, RANDOM), |side| liar(side, RANDOM)),
    lie("while_handed_on", WAY_BACK, |side| hands_on(side, WAY_BACK), |side| liar(side, WAY_BACK)),
    lie("beside_endless_bells", ENDLESS, |side| victim(side, ENDLESS), |side| tells(side, ENDLESS, true)),
    lie("closed_beside_endless_bells", ENDLESS, closes, |side| tells(side, ENDLESS, true)),
];

/// Each lie is told on a connection of its own, which has left TCP; one more shows that the processes are well. What the
/// victim counts of a connection is right, what it counts of bytes is the liar's invention.
const fn lie(name: &'static str, lies: &[Lie], left: fn(&Side), right: fn(&Side)) -> Behaviour {
    Behaviour::whole(name, left, right, Tally::Unknown)
        .tally(Tally::Upgraded(lies.len() as u64 + 1), Tally::Unknown)
        .alone(&["passed-to-process"])
}

/// One word of a direction's control words: whose direction, offset in bytes, and values that are written in turn.
#[derive(Clone, Copy, Debug)]
struct Word {
    liars: bool,
    offset: u64,
    values: &'static [u64],
    wide: bool,
}

const fn word(liars: bool, offset: u64, values: &'static [u64]) -> Word {
    Word { liars, offset, values, wide: true }
}

const fn half(liars: bool, offset: u64, values: &'static [u64]) -> Word {
    Word { liars, offset, values, wide: false }
}

const HEAD: u64 = 0;
const TAIL: u64 = 128;
const DATA_ARMED: u64 = 256;
const SPACE_ARMED: u64 = 384;
const SWITCHED_AT: u64 = 512;
const WINDOWS: u64 = 520;
const END: u64 = 568;
const BELLS: u64 = 640;
const HANDING: u64 = 656;
const ASIDE: u64 = 664;

const RETURN: u64 = 16;
const MOST: u64 = u64::MAX;

type Lie = &'static [Word];

const WAY_BACK: &[Lie] = &[
    &[half(true, HANDING, &[1]), half(true, END, &[RETURN])],
    &[half(true, HANDING, &[1, 0]), half(true, END, &[RETURN, 0])],
    &[half(true, HANDING, &[2]), half(true, END, &[RETURN])],
    &[half(true, HANDING, &[3]), half(true, END, &[RETURN])],
    &[half(true, HANDING, &[0]), half(true, END, &[RETURN])],
    &[half(true, HANDING, &[3]), half(true, END, &[RETURN]), word(false, TAIL, &[0])],
    &[half(true, HANDING, &[1]), half(true, END, &[RETURN]), word(true, BELLS, &[1 << 40])],
    &[half(true, HANDING, &[1]), half(true, END, &[RETURN]), word(true, SWITCHED_AT, &[1 << 40])],
    &[half(false, HANDING, &[1]), half(false, END, &[RETURN])],
    &[half(false, HANDING, &[2]), half(false, END, &[RETURN])],
    &[half(false, HANDING, &[3]), half(false, END, &[RETURN]), word(true, BELLS, &[1 << 40])],
    &[half(false, HANDING, &[0]), half(false, END, &[RETURN])],
    &[half(false, HANDING, &[0, 1, 2, 3]), half(true, HANDING, &[3, 2, 1, 0]), half(true, END, &[RETURN])],
    &[word(true, ASIDE, &[64 << 20]), half(true, HANDING, &[3]), half(true, END, &[RETURN])],
    &[word(true, ASIDE, &[64 << 20]), half(true, HANDING, &[2]), half(true, END, &[RETURN])],
    &[word(true, ASIDE, &[1, 64 << 20]), half(true, HANDING, &[1]), half(true, END, &[RETURN])],
    &[word(true, ASIDE, &[MOST, 1 << 62]), half(true, HANDING, &[1, 3]), half(true, END, &[RETURN])],
];

const POSITIONS: &[Lie] = &[
    &[word(true, HEAD, &[MOST])],
    &[word(true, HEAD, &[0, 1 << 20, 1 << 23])],
    &[word(true, TAIL, &[MOST, 0])],
    &[word(false, TAIL, &[MOST])],
    &[word(false, TAIL, &[0])],
    &[word(false, HEAD, &[0, MOST])],
    &[word(true, WINDOWS, &[MOST, 1, 1 << 30])],
    &[word(true, WINDOWS + 8, &[0, 1 << 62])],
    &[word(false, WINDOWS, &[MOST, 12345])],
    &[word(false, WINDOWS + 40, &[0, 1])],
    &[word(true, SWITCHED_AT, &[0, MOST, 1 << 40])],
    &[word(false, SWITCHED_AT, &[0, 1 << 40])],
];

const ENDINGS: &[Lie] = &[
    &[half(true, END, &[1])],
    &[half(true, END, &[2])],
    &[half(true, END, &[4, 0])],
    &[half(true, END, &[8 | 4 | 1])],
    &[half(true, END, &[0xffff_ffff])],
    &[half(false, END, &[0xffff_ffff])],
    &[word(true, BELLS, &[MOST, 0])],
    &[word(false, BELLS, &[MOST, 0])],
    &[word(true, DATA_ARMED, &[MOST, 0, 1 << 32 | 1])],
    &[word(false, DATA_ARMED, &[MOST, 1 << 32 | 1, 2 << 32 | 1])],
    &[word(true, SPACE_ARMED, &[MOST, 1 << 32 | 1, 2 << 32 | 1])],
    &[word(false, SPACE_ARMED, &[MOST, 0])],
];

/// With bells that are sent as fast as the kernel takes them; of the second connection the victim is told that all precede its bytes.
const ENDLESS: &[Lie] = &[
    FLOOD,
    &[half(true, HANDING, &[3]), half(true, END, &[RETURN]), word(true, BELLS, &[1 << 40])],
    &[half(true, HANDING, &[1]), half(true, END, &[RETURN]), word(true, BELLS, &[1 << 40])],
];
const FLOOD: Lie = &[word(true, BELLS, &[1 << 40])];

/// Everything at once; [`Liar::tell`] makes values up where there are none.
const RANDOM: &[Lie] = &[EVERYTHING; 12];
const EVERYTHING: Lie = &[
    word(true, HEAD, &[]),
    word(false, HEAD, &[]),
    word(true, TAIL, &[]),
    word(false, TAIL, &[]),
    word(true, DATA_ARMED, &[]),
    word(false, SPACE_ARMED, &[]),
    word(true, SWITCHED_AT, &[]),
    word(false, SWITCHED_AT, &[]),
    word(true, WINDOWS, &[]),
    word(false, WINDOWS + 16, &[]),
    half(true, END, &[]),
    half(false, END, &[]),
    word(true, BELLS, &[]),
    word(true, ASIDE, &[]),
    half(true, HANDING, &[]),
    half(false, HANDING, &[]),
];

/// Rounds of calls while the peer lies.
const ROUNDS: usize = 100;

/// Uses each connection while its peer lies. Every call returns, though the peer answers nothing.
fn victim(side: &Side, lies: &[Lie]) {
    let set = calls::epoll_create().expect("epoll_create1");
    each_connection(side, lies, |fd| {
        let _ = calls::epoll_add(set, fd, libc::EPOLLIN | libc::EPOLLET, 1);
        for round in 0..ROUNDS {
            let _ = calls::send(fd, &[7; 5000], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
            let _ =
                calls::recv(fd, 4000, libc::MSG_DONTWAIT | if round % 4 == 0 { libc::MSG_PEEK } else { 0 });
            let _ = calls::poll(&[(fd, libc::POLLIN | libc::POLLOUT)], 0);
            let _ = calls::unread(fd);
            let _ = calls::epoll_wait(set, 4, 0);
        }
        let _ = calls::epoll_wait(set, 4, 20);
        let _ = calls::poll(&[(fd, libc::POLLIN)], 20);
        // Blocking calls end at their limits.
        calls::set_send_timeout(fd, Duration::from_millis(20)).expect("SO_SNDTIMEO");
        calls::set_receive_timeout(fd, Duration::from_millis(20)).expect("SO_RCVTIMEO");
        for _ in 0..3 {
            let _ = calls::send(fd, &[7; 1 << 20], libc::MSG_NOSIGNAL);
            let _ = calls::recv(fd, 4000, 0);
        }
    });
}

/// Gives each connection away while its peer lies.
fn hands_on(side: &Side, lies: &[Lie]) {
    each_connection(side, lies, |fd| {
        let (here, there) = calls::unix_pair().expect("socketpair");
        let _ = calls::send(fd, &[7; 5000], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        let _ = calls::send_fd(here, b"x", fd);
        let _ = calls::recv(fd, 4000, libc::MSG_DONTWAIT);
        calls::close(here).expect("close");
        calls::close(there).expect("close");
    });
}

/// Reads a little from each connection, and closes it, while bells come without end.
fn closes(side: &Side) {
    each_connection(side, ENDLESS, |fd| {
        let _ = calls::send(fd, &[7; 5000], libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        let _ = calls::recv(fd, 4000, libc::MSG_DONTWAIT);
    });
}

/// A number of connections that left TCP, if they can, and an honest one.
fn each_connection(side: &Side, lies: &[Lie], suffer: impl Fn(Fd)) {
    let listener = side.listen();
    for _ in lies {
        let fd = side.accept(listener);
        warm_up(fd);
        side.sync("lying");
        quietly(|| suffer(fd));
        calls::close(fd).expect("close");
        side.sync("survived");
    }
    let fd = side.accept(listener);
    say!("survived {} lies, echoed {}", lies.len(), echo(fd));
}

/// Answers what [`liar`] asks, before it lies.
fn warm_up(fd: Fd) {
    for _ in 0..WARM_UP {
        assert_eq!(receive_exactly(fd, 64), [5; 64]);
        assert_eq!(calls::send(fd, &[5; 64], 0), Ok(64));
    }
}

const WARM_UP: usize = 12;

/// Lies on one connection after another, in every moment, while the victim uses it.
fn liar(side: &Side, lies: &[Lie]) {
    tells(side, lies, false);
}

fn tells(side: &Side, lies: &[Lie], floods: bool) {
    let destination = side.destination();
    for lie in lies {
        let fd = side.connect_to(destination);
        for _ in 0..WARM_UP {
            assert_eq!(calls::send(fd, &[5; 64], 0), Ok(64));
            assert_eq!(receive_exactly(fd, 64), [5; 64]);
        }
        let liar = Liar::find();
        let done = AtomicBool::new(false);
        // What this side's own library makes of it is not the matter.
        std::thread::scope(|scope| {
            if liar.is_some() && floods {
                scope.spawn(|| {
                    while !done.load(Ordering::Relaxed) {
                        ring_often(fd);
                    }
                });
            }
            if let Some(liar) = &liar {
                scope.spawn(|| {
                    let mut step = 0;
                    while !done.load(Ordering::Relaxed) {
                        liar.tell(lie, step);
                        step += 1;
                        std::thread::yield_now();
                    }
                });
            }
            side.sync("lying");
            side.sync("survived");
            done.store(true, Ordering::Relaxed);
        });
        calls::close(fd).expect("close");
    }
    let fd = side.connect_to(destination);
    request_echoes(fd, 100, 1000);
    say!("told {} lies", lies.len());
}

/// As many bells as the kernel takes, by a system call that no hook sees.
fn ring_often(fd: Fd) {
    // SAFETY: it is open until the threads have ended.
    let socket = unsafe { BorrowedFd::borrow_raw(fd) };
    if rustix::net::send(socket, &[1; 64 << 10], SendFlags::NOSIGNAL | SendFlags::DONTWAIT).is_err() {
        std::thread::yield_now();
    }
}

/// This process's memory, and where in it the segment of its only connection begins.
struct Liar {
    memory: File,
    segment: u64,
}

impl Liar {
    fn find() -> Option<Self> {
        let left_tcp = left_tcp();
        if left_tcp == 0 {
            return None;
        }
        let maps = std::fs::read_to_string("/proc/self/maps").expect("/proc is mounted");
        let mut segments = maps.lines().filter(|line| line.contains("/memfd:thallus-segment"));
        let line = segments.next().expect("a connection that has left TCP has a segment");
        assert_eq!((left_tcp, segments.next()), (1, None), "which one is it?");
        let start = line.split('-').next().expect("a range of addresses");
        let segment = u64::from_str_radix(start, 16).expect("a number");
        let memory = OpenOptions::new().write(true).open("/proc/self/mem").expect("our own memory");
        Some(Self { memory, segment })
    }

    /// Writes the words of `lie` once.
    fn tell(&self, lie: Lie, step: usize) {
        for (index, word) in lie.iter().enumerate() {
            let value = match word.values {
                [] => nonsense(step as u64 * 31 + index as u64),
                values => values[step % values.len()],
            };
            // The liar has connected: its direction's words come first.
            let control = if word.liars { 1024 } else { 2048 };
            let (bytes, length) = (value.to_le_bytes(), if word.wide { 8 } else { 4 });
            self.memory
                .write_all_at(&bytes[..length], self.segment + control + word.offset)
                .expect("the segment is mapped and writable");
        }
    }
}

/// A number that may be small, large, or just beyond a limit.
fn nonsense(seed: u64) -> u64 {
    let mixed = (seed + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    match mixed >> 61 {
        0 => mixed % 5,
        1 => mixed % 70_000,
        2 => 1 << ((mixed >> 20) % 64),
        3 => MOST - mixed % 9000,
        _ => mixed,
    }
}
