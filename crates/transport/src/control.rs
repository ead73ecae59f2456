//! One direction's control words in the segment that both peers map.
//!
//! ```text
//!    0  head          producer   bytes ever put in, and when (crate::arrival)
//!  128  tail          consumer   bytes ever taken out
//!  256  data_armed    consumer   how often it asked to be woken for data, how many sleep, whether it asks for times
//!  384  space_armed   producer   the same for space
//!  512  rare words    producer   switch, end of stream, windows
//!  640  rung words    both       doorbells sent
//! ```
//!
//! Each word sits 128 bytes from the next (processors fetch cache lines in pairs). Either peer can write all
//! of it, so nothing here is believed: positions are range-checked where they are used ([`crate::ring`]), and
//! a wrong wake-up word can only put the liar's own connection to sleep.
//!
//! # Waking
//!
//! A sleeper *arms* (adds a sequence step and itself to the word), fences, looks once more, and only
//! then sleeps in the kernel. A publisher publishes, fences, loads the word, and rings if somebody sleeps whom
//! no earlier bell has covered: it remembers the sequence that it last rang for. Whoever takes bells out of the TCP
//! stream advances the sequence first, so that the next publish rings again for those who sleep on.
//! The pairs: the fence in [`Armed::arm`] with the one in [`Control::publish`] (one of the two sees the other).

use crate::arrival::Marks;
use crate::ring::CLASSES;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// A value alone on its pair of cache lines.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct Line<T>(pub T);

/// What a side that sleeps has asked the other for.
#[derive(Debug)]
#[repr(C)]
pub struct Armed {
    /// `u32 sequence | u16 listeners | u16 sleepers`. Listeners are those of the sleepers whom a chime wakes, too
    /// ([`crate::waiting::ring`]).
    word: AtomicU64,
    /// Not 0 if it wants to know when bytes came ([`crate::arrival`]). No model asks for that.
    times: std::sync::atomic::AtomicU32,
}

const STEP: u64 = 1 << 32;
const LISTENER: u64 = 1 << 16;

/// Which bells wake a sleeper.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wakes {
    /// Those on TCP.
    ByTcp = 1,
    /// These, and chimes.
    ByChime = 1 | LISTENER as isize,
}

impl Armed {
    #[cfg(test)]
    fn new() -> Self {
        Self { word: AtomicU64::new(0), times: std::sync::atomic::AtomicU32::new(0) }
    }

    /// Consumer: wants to know when bytes come from now on.
    pub fn ask_for_times(&self) {
        self.times.store(1, Ordering::Relaxed);
    }

    fn wants_times(&self) -> bool {
        self.times.load(Ordering::Relaxed) != 0
    }

    /// Announces one more sleeper. It must look at the ring again before it sleeps, and [`Self::disarm`]
    /// afterwards.
    pub fn arm(&self, wakes: Wakes) {
        self.word.fetch_add(STEP + wakes as u64, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// One sleeper less, of those that are armed so.
    pub fn disarm(&self, wakes: Wakes) {
        self.word.fetch_sub(wakes as u64, Ordering::SeqCst);
    }

    /// How many sleep, and how many of these listen for chimes.
    pub(crate) fn sleepers(&self) -> (u16, u16) {
        let word = self.word();
        (word as u16, (word >> 16) as u16)
    }

    /// Makes the next publish ring again, for the sleepers that stay, before bells are taken away. The
    /// caller must look at the ring after this and leave the bells where they are if it is not empty.
    pub fn renew(&self) {
        self.word.fetch_add(STEP, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Whether anyone sleeps.
    pub fn has_sleepers(&self) -> bool {
        self.word.load(Ordering::Relaxed) as u32 != 0
    }

    /// To be called after a publish and a full fence: whether it has to ring. `rung_for` remembers for
    /// which sequence the publisher's side last rang.
    fn claim_bell(&self, rung_for: &AtomicU32) -> bool {
        claim(self.word(), rung_for)
    }

    /// The word itself.
    pub(crate) fn word(&self) -> u64 {
        self.word.load(Ordering::Relaxed)
    }
}

/// Whether somebody sleeps, by the `word` of [`Armed`], for whom nobody has rung.
fn claim(word: u64, rung_for: &AtomicU32) -> bool {
    if word as u32 == 0 {
        return false;
    }
    let sequence = (word >> 32) as u32;
    rung_for.load(Ordering::Relaxed) != sequence && rung_for.swap(sequence, Ordering::AcqRel) != sequence
}

/// Words that change seldom; written by the producer.
#[derive(Debug)]
#[repr(C)]
pub struct Rare {
    /// Count of application bytes sent over TCP when the producer left it; [`NOT_SWITCHED`] before.
    pub switched_at: AtomicU64,
    /// Where the window of each class begins, as a stream position; [`UNUSED`] before its first use.
    pub window_start: [AtomicU64; CLASSES as usize],
    /// Bits of [`end`].
    pub end: AtomicU32,
    /// Count of application bytes that the producer's side has taken from TCP, but for those that it has put aside (of `AF_UNIX`: once
    /// both sides are ready): should it die, the peer knows whether it had read them.
    pub taken: AtomicU64,
    /// Of `AF_UNIX`, until the client says that it is ready: count of application bytes that the producer's side has sent over the
    /// kernel's socket. This and [`Self::taken`] are true while both [`Self::counting`] are even.
    pub sent: AtomicU64,
    /// Calls that have begun and ended in which the producer's side sends over the kernel's socket, and receives.
    pub counting: [AtomicU32; 2],
    /// Of `AF_UNIX`: how often the producer's side has shut down a direction again, which changes nothing, and yet wakes the peer
    /// (`unix_shutdown` of net/unix/af_unix.c).
    pub repeats: AtomicU32,
}

/// How a stream ended; bits of [`Rare::end`].
pub mod end {
    /// The producer will send nothing more (shutdown or close).
    pub const FIN: u32 = 1;
    /// The producer's process closed the socket: it reads nothing more either.
    pub const CLOSED: u32 = 2;
    /// It did so with data unread or lingering off, where TCP would send a reset.
    pub const RESET: u32 = 4;
    /// It had shut down sending before: the reset comes after an orderly end of the stream.
    pub const LATE: u32 = 8;
    /// The producer has shut down both directions of a socket that is open: what is sent to it is answered by a reset.
    pub const DEAF: u32 = 32;
    /// The producer has shut down receiving on an `AF_UNIX` socket: what is sent to it is refused.
    pub const REFUSES: u32 = 64;
    /// All of these.
    pub const OF_STREAM: u32 = FIN | CLOSED | RESET | LATE | DEAF | REFUSES;
    /// Whoever sends to the producer sends in vain.
    pub const UNWANTED: u32 = CLOSED | DEAF | REFUSES;
    /// `SO_LINGER` of zero time: should the producer's process die, it resets the connection. Not on `AF_UNIX`.
    pub const ABORTS: u32 = 128;
    /// The producer's process ends, and has not closed the socket.
    pub const LEAVES: u32 = 256;
    /// The producer's side wants to go back to TCP, or has ([`super::Rung::handing`]).
    pub const RETURN: u32 = 16;
}

/// Value of [`Rare::window_start`] for a window that was never opened.
pub const UNUSED: u64 = u64::MAX;

/// Value of [`Rare::switched_at`] while the direction is on TCP.
pub const NOT_SWITCHED: u64 = u64::MAX;

/// Value of [`Rung::handing`] while nobody goes back to TCP, nor is about to ask.
pub const NO_REQUEST: u32 = 0;

/// Doorbell bookkeeping. Each side of the connection writes the words of its own bells.
#[derive(Debug)]
#[repr(C)]
pub struct Rung {
    /// Bells that this direction's producer has put into the TCP stream, of either kind. Counted before they are
    /// sent, so that whoever drains never takes one that is not counted.
    pub count: AtomicU64,
    /// Sequence of `data_armed` that the producer last rang for.
    data_for: AtomicU32,
    /// Sequence of `space_armed` that the consumer last rang for.
    space_for: AtomicU32,
    /// How far the way back to TCP is that the producer's side has asked for (`handback`).
    pub handing: AtomicU32,
    /// What the producer's side wants to be sent again with what it has not read: where in its side buffer that begins, in the upper
    /// half, and ends. 0 for nothing. Stored before it asks.
    pub aside: AtomicU64,
}

/// How far a direction has been filled.
#[derive(Debug)]
#[repr(C)]
pub struct Head {
    /// Bytes ever put in.
    pub(crate) position: AtomicU64,
    /// When the last of them were.
    pub(crate) marks: Marks,
}

/// The control words of one direction.
#[derive(Debug)]
#[repr(C)]
pub struct Control {
    pub(crate) head: Line<Head>,
    pub(crate) tail: Line<AtomicU64>,
    /// The consumer's sleepers.
    pub data_armed: Line<Armed>,
    /// The producer's sleepers.
    pub space_armed: Line<Armed>,
    /// See [`Rare`].
    pub rare: Line<Rare>,
    /// See [`Rung`].
    pub rung: Line<Rung>,
}

#[cfg(not(loom))]
const _: () = {
    assert!(size_of::<Control>() == 768);
    assert!(std::mem::offset_of!(Control, rung) == 640);
    assert!(size_of::<Head>() <= 64);
};

impl Control {
    /// The words of a direction that has carried nothing.
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        let zero = |_| AtomicU64::new(0);
        let control = Self {
            head: Line(Head { position: AtomicU64::new(0), marks: Marks::default() }),
            tail: Line(AtomicU64::new(0)),
            data_armed: Line(Armed::new()),
            space_armed: Line(Armed::new()),
            rare: Line(Rare {
                switched_at: AtomicU64::new(0),
                window_start: std::array::from_fn(zero),
                end: AtomicU32::new(0),
                taken: AtomicU64::new(0),
                sent: AtomicU64::new(0),
                counting: std::array::from_fn(|_| AtomicU32::new(0)),
                repeats: AtomicU32::new(0),
            }),
            rung: Line(Rung {
                count: AtomicU64::new(0),
                data_for: AtomicU32::new(0),
                space_for: AtomicU32::new(0),
                handing: AtomicU32::new(0),
                aside: AtomicU64::new(0),
            }),
        };
        control.begin();
        control
    }

    /// Makes zeroed words those of a direction that has carried nothing: on TCP, the smallest window open.
    pub(crate) fn begin(&self) {
        let rare = &self.rare.0;
        rare.switched_at.store(NOT_SWITCHED, Ordering::Relaxed);
        for start in &rare.window_start[1..] {
            start.store(UNUSED, Ordering::Relaxed);
        }
    }

    /// Bytes put in and not taken out, as the two words say; may be nonsense if the peer lies.
    pub fn used(&self) -> u64 {
        // The later of two words that both grow is never below the other, for who has neither lock either.
        let tail = self.tail.0.load(Ordering::Acquire);
        self.head.0.position.load(Ordering::Acquire).wrapping_sub(tail)
    }

    /// Whether there is anything to take.
    pub fn is_empty(&self) -> bool {
        self.used() == 0
    }

    /// Whether a reader finds bytes, or how the stream ended.
    pub fn has_more(&self) -> bool {
        !self.is_empty() || self.end() & (end::FIN | end::RESET) != 0
    }

    /// As [`Self::has_more`], or that the stream goes on over TCP.
    pub fn has_news(&self) -> bool {
        self.has_more() || self.end() & end::RETURN != 0
    }

    /// Whether the producer's side is going back to TCP, so that it must know how many bells come before the application's bytes.
    pub fn wants_no_bells(&self) -> bool {
        self.end() & end::RETURN != 0 && self.rung.0.handing.load(Ordering::SeqCst) != NO_REQUEST
    }

    /// Bytes ever taken out.
    pub fn tail(&self) -> u64 {
        self.tail.0.load(Ordering::Acquire)
    }

    /// Bytes ever put in.
    pub fn head(&self) -> u64 {
        self.head.0.position.load(Ordering::Acquire)
    }

    /// Consumer: when what is there to be taken came, or the end, if there is either ([`crate::arrival::now`]). 0 if it was not asked for
    /// in time.
    pub fn came_at(&self) -> u64 {
        self.head.0.marks.of(self.tail())
    }

    /// The bits of [`end`] that the producer has set.
    pub fn end(&self) -> u32 {
        self.rare.0.end.load(Ordering::Acquire)
    }

    /// Producer: something is about to be made visible, behind what has been.
    fn note_time(&self) {
        if self.data_armed.0.wants_times() {
            self.head.0.marks.note(self.head.0.position.load(Ordering::Relaxed));
        }
    }

    /// Producer: sets bits of [`end`]. True if a sleeper has to be rung for.
    pub fn finish(&self, bits: u32) -> bool {
        self.note_time();
        self.rare.0.end.fetch_or(bits, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        self.data_armed.0.claim_bell(&self.rung.0.data_for)
    }

    /// Producer: makes everything up to `head` visible. True if a sleeper has to be rung for.
    pub(crate) fn publish(&self, head: u64) -> bool {
        self.note_time();
        self.head.0.position.store(head, Ordering::Release);
        fence(Ordering::SeqCst);
        self.data_armed.0.claim_bell(&self.rung.0.data_for)
    }

    /// Consumer: gives everything below `tail` back. The caller then asks [`Self::claim_space_bell`].
    pub(crate) fn release(&self, tail: u64) {
        self.tail.0.store(tail, Ordering::Release);
        fence(Ordering::SeqCst);
    }

    /// Consumer, after it released space: whether a producer that sleeps for space has to be rung for.
    pub(crate) fn claim_space_bell(&self) -> bool {
        self.space_armed.0.claim_bell(&self.rung.0.space_for)
    }

    /// As after [`Self::publish`], where the peer's `data_armed` has come as `word`.
    pub(crate) fn claim_data_bell_of(&self, word: u64) -> bool {
        claim(word, &self.rung.0.data_for)
    }

    /// As [`Self::claim_space_bell`], where the peer's `space_armed` has come as `word`.
    #[cfg(not(loom))]
    pub(crate) fn claim_space_bell_of(&self, word: u64) -> bool {
        claim(word, &self.rung.0.space_for)
    }
}
