//! What those who sleep on a connection decide: when it is safe to sleep, and which bells nobody needs any more.
//!
//! Only the decisions: the system calls behind them are the business of [`crate::wait`], [`crate::ready`] and
//! [`crate::stream`], which hand them in as a [`Side`]. So loom runs exactly this code, and finds the interleaving
//! in which somebody sleeps on although there is something to wake for (`loom_tests`).
//!
//! Two rules keep every wake-up:
//! - *Arm, then look, then sleep.* Whoever publishes does so before it looks for sleepers ([`crate::control`]).
//! - *Renew, then look, then take bells,* and only bells that were counted before. While what they announced is still there one of
//!   them stays, because a sleeper whom it is to wake may not have run yet. One does for all: who waits until something is unread finds
//!   it, and who waits for an arrival has had that. More would fill the socket, if the sleeper never runs again.

use rustix::io::Errno;

use crate::control::{Armed, Control, NOT_SWITCHED, Wakes, end};
use crate::process;
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence};

/// One side of an active connection, as its sleepers need it.
pub(crate) trait Side {
    /// Proof that the receive lock is held.
    type Guard<'a>
    where
        Self: 'a;

    /// The words of the direction in which this side receives.
    fn incoming(&self) -> &Control;
    /// The words of the direction in which this side sends.
    fn outgoing(&self) -> &Control;
    /// Bells taken out of the TCP stream so far; changed under the receive lock.
    fn drained(&self) -> &AtomicU64;
    /// 1 once every byte that the peer sent over TCP has been taken.
    fn recv_switched(&self) -> &AtomicU32;
    /// Bytes of the application taken from TCP so far; changed under the receive lock.
    fn tcp_received(&self) -> &AtomicU64;
    /// Those of them that have been put aside, and that the application has not been given, once the peer goes by that.
    fn aside(&self) -> u64 {
        0
    }
    /// Whether both directions have left TCP and gone back: then the words of the segment are of no interest.
    fn is_back(&self) -> bool {
        false
    }
    /// Whether more than bells may follow the application's bytes on TCP: then nothing is taken there before it has been looked at.
    fn has_frames(&self) -> bool {
        false
    }
    /// Takes the receive lock.
    fn lock(&self) -> Result<Self::Guard<'_>, Errno>;
    /// Whether a read would return at once.
    fn is_readable(&self) -> bool;
    /// Whether the outgoing ring has room enough to wake a sleeper for.
    fn has_space(&self) -> bool;
    /// Moves unread bytes of the application from TCP to the side buffer, all or all but the last that is
    /// there. True if none is left. Under the receive lock.
    fn absorb(&self, keep_one: bool) -> bool;
    /// Reads up to `most` bells from the TCP stream, without waiting, and counts them as drained. Under the
    /// receive lock.
    fn take_bells(&self, most: u64);
    /// As [`Self::take_bells`], but leaves one of those that are there, and may leave a few.
    fn thin_out_bells(&self, most: u64);
    /// Puts one bell into the TCP stream, without waiting. False if it could not.
    fn put_bell(&self) -> bool;
    /// Wakes those of the peer's sleepers who listen, beside TCP. False if it could not.
    fn chime(&self) -> bool {
        false
    }
    /// Lets other threads run.
    fn pause(&self);
    /// After sleepers have been announced, and before anybody looks whether there is a reason not to sleep: makes the
    /// peer see them, and this side what the peer did before it could. Memory that both share does so by itself.
    fn sync(&self) {}
    /// Makes the peer see how many bells have been counted, by then, in `count`; as [`Self::sync`].
    fn announce_bells(&self, _count: &AtomicU64) {}
}

/// Wakes the peer's sleepers by a bell. It is counted first, so that whoever drains never takes one that is not. If all of them listen, by a
/// chime instead: those who have come since the reason to ring was published see that, and those who slept then and still do are in the words.
/// False if the peer takes no bells, because it is about to ask for the way back, or has.
pub(crate) fn ring(side: &impl Side) -> bool {
    if side.is_back() || side.outgoing().end() & end::RETURN != 0 {
        // Its last bell has been counted.
        return true;
    }
    if all_listen(side) && side.chime() {
        return true;
    }
    let count = &side.outgoing().rung.0.count;
    count.fetch_add(1, Ordering::SeqCst);
    side.announce_bells(count);
    // Whoever goes back to TCP takes the bells that were counted before it said so, and no others.
    fence(Ordering::SeqCst);
    let is_wanted = !side.incoming().wants_no_bells();
    if !is_wanted || !side.put_bell() {
        count.fetch_sub(1, Ordering::SeqCst);
    }
    is_wanted
}

/// Whether the peer has sleepers, all of whom a chime wakes.
fn all_listen(side: &impl Side) -> bool {
    let for_data = side.outgoing().data_armed.0.sleepers();
    let for_space = side.incoming().space_armed.0.sleepers();
    for_data.0 | for_space.0 != 0 && for_data.0 == for_data.1 && for_space.0 == for_space.1
}

/// Takes bells out of the TCP stream that nobody needs any more. The caller holds the receive lock. True
/// if none is left that a sleeper would trip over.
#[inline]
pub(crate) fn drain(side: &impl Side) -> bool {
    let drained = side.drained().load(Ordering::Relaxed);
    let rung = side.incoming().rung.0.count.load(Ordering::Acquire);
    // Before the last TCP byte of the peer's is taken, what comes next may be the application's, not a bell.
    rung == drained || (is_settled(side) && drain_counted(side, rung.wrapping_sub(drained)))
}

/// As [`drain`]: `counted` bells have been announced, and may not all have arrived.
fn drain_counted(side: &impl Side, counted: u64) -> bool {
    let (incoming, outgoing) = (side.incoming(), side.outgoing());
    let someone_waits_for_data = incoming.data_armed.0.has_sleepers();
    if someone_waits_for_data {
        incoming.data_armed.0.renew();
    }
    let someone_waits_for_space = outgoing.space_armed.0.has_sleepers();
    if someone_waits_for_space {
        outgoing.space_armed.0.renew();
    }
    fence(Ordering::SeqCst);
    if someone_waits_for_data || someone_waits_for_space {
        side.sync();
    }
    if (someone_waits_for_data && incoming.has_news()) || (someone_waits_for_space && side.has_space()) {
        side.thin_out_bells(counted);
        return false;
    }
    side.take_bells(counted);
    true
}

/// Sleeps in `sleep` until there is something to read, or a bell that somebody else needs. `sleep` is told whether no such bell is there
/// already, by which a sleep until something is unread in the TCP stream would end at once.
pub(crate) fn sleep_for_data(
    side: &impl Side,
    sleep: impl FnOnce(bool) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let armed = &side.incoming().data_armed.0;
    let home = process::id();
    let announced = announce(side, || armed.arm(Wakes::ByTcp));
    let result = match announced {
        Err(errno) => Err(errno),
        Ok(_) if side.is_readable() => Ok(()),
        // Not if what is unread is the application's, nor if there is something to be done before anything can be read.
        Ok(clear) => sleep(clear || !looks_settled(side) || side.incoming().has_news()),
    };
    withdraw(armed, home);
    announced?;
    let stays = {
        let _guard = side.lock()?;
        !drain(side)
    };
    if stays && !side.is_readable() {
        // A bell that another thread still needs: it should run first.
        side.pause();
    }
    result
}

/// Announces a sleeper for data, which `arm` does, lets the peer and this side see each other, and drains bells that were counted
/// before; the receive lock is not held meanwhile, for that may take as long as the network, and others must be able to read. True
/// if no bell is left that the sleeper would trip over. Fails as the lock does; the sleeper stays announced.
fn announce(side: &impl Side, arm: impl FnOnce()) -> Result<bool, Errno> {
    let announced = Announced::begin(side, arm);
    side.sync();
    announced.finish(side)
}

/// A sleeper for data that has been announced to who looks into this side's memory.
#[derive(Clone, Copy, Debug)]
struct Announced {
    /// Bells that had been counted before.
    counted: u64,
    /// Not all of them have been taken.
    spent: bool,
}

impl Announced {
    /// Announces it; `arm` does. [`Side::sync`] has to follow.
    fn begin(side: &impl Side, arm: impl FnOnce()) -> Self {
        let announced = Self::count(side);
        arm();
        announced.renew_space(side);
        announced
    }

    fn count(side: &impl Side) -> Self {
        let counted = side.incoming().rung.0.count.load(Ordering::Acquire);
        Self { counted, spent: counted != side.drained().load(Ordering::Relaxed) }
    }

    fn renew_space(self, side: &impl Side) {
        let outgoing = side.outgoing();
        if self.spent && outgoing.space_armed.0.has_sleepers() {
            outgoing.space_armed.0.renew();
        }
        fence(Ordering::SeqCst);
    }

    /// The second half of [`announce`].
    fn finish(self, side: &impl Side) -> Result<bool, Errno> {
        let Some(later) = self.take(side)? else { return Ok(false) };
        if !later.spent {
            return Ok(true);
        }
        // Once more for bells that have come meanwhile.
        side.incoming().data_armed.0.renew();
        later.renew_space(side);
        side.sync();
        Ok(later.take(side)?.is_some())
    }

    /// Takes the bells, and counts those that have come since. `None` if some have to stay.
    fn take(self, side: &impl Side) -> Result<Option<Self>, Errno> {
        let (incoming, outgoing) = (side.incoming(), side.outgoing());
        let drained = || side.drained().load(Ordering::Relaxed);
        // Also for those who have not seen this sleeper, and take bells, or the TCP bytes before them: they are done with that now.
        let _guard = side.lock()?;
        if Self::count(side).spent {
            if !is_settled(side) {
                return Ok(None);
            }
            let count = self.counted.wrapping_sub(drained());
            let takes = self.spent && count.cast_signed() > 0;
            if incoming.has_news() || outgoing.space_armed.0.has_sleepers() && side.has_space() {
                if takes {
                    side.thin_out_bells(count);
                }
                return Ok(None);
            }
            if takes {
                side.take_bells(count);
            }
        }
        Ok(Some(Self::count(side)))
    }
}

/// Sleeps in `sleep` until `done`, or until something arrives that could have made it so. `sleep` is told whether
/// nothing unread lies in the TCP stream, so that the next byte is news.
pub(crate) fn sleep_for_space(
    side: &impl Side,
    done: impl Fn() -> bool,
    sleep: impl FnOnce(bool) -> Result<(), Errno>,
) -> Result<(), Errno> {
    let armed = &side.outgoing().space_armed.0;
    let home = process::id();
    armed.arm(Wakes::ByTcp);
    side.sync();
    let clear = side.lock().map(|_guard| make_way_locked(side) && drain(side) && is_settled(side));
    let result = clear.and_then(|clear| if done() { Ok(()) } else { sleep(clear) });
    withdraw(armed, home);
    result
}

/// Undoes [`Armed::arm`], which the process `home` has done. A child that a signal handler has made meanwhile returns from the same call, and
/// what is announced is its parent's.
fn withdraw(armed: &Armed, home: u32) {
    if process::id() == home {
        armed.disarm(Wakes::ByTcp);
    }
}

/// Announces a sleeper in a waiting call: for data, and for space if it `writes`. Takes spent bells away, so
/// that the sleep is one. False if bells or bytes had to stay that would keep waking a call which does not
/// ask for data.
pub(crate) fn arm(side: &impl Side, reads: bool, writes: bool, wakes: Wakes) -> bool {
    let sleeper = Sleeper::announce(side, reads, writes, wakes);
    side.sync();
    sleeper.finish(side)
}

/// One in a waiting call, who has been announced to who looks into this side's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sleeper {
    announced: Announced,
    clear: bool,
}

impl Sleeper {
    /// The first half of [`arm`]: [`Side::sync`] has to follow, and [`Self::finish`].
    pub(crate) fn announce(side: &impl Side, reads: bool, writes: bool, wakes: Wakes) -> Self {
        let clear = reads || make_way(side);
        Self { announced: Announced::begin(side, || arm_both(side, writes, wakes)), clear }
    }

    /// Whether it had bells to take.
    pub(crate) fn found_bells(&self) -> bool {
        self.announced.spent
    }

    /// What [`arm`] returns.
    pub(crate) fn finish(self, side: &impl Side) -> bool {
        let announced = self.announced.finish(side);
        announced == Ok(true) && self.clear
    }
}

/// Takes bells away that are left over, if nobody needs them.
pub(crate) fn take_leftovers(side: &impl Side) {
    if let Ok(_guard) = side.lock() {
        drain(side);
    }
}

/// Arms for a registration in an event loop: for data, and for space if it `writes`. Bells may be left, for [`take_leftovers`].
pub(crate) fn arm_words(side: &impl Side, writes: bool, wakes: Wakes) {
    arm_both(side, writes, wakes);
    side.sync();
}

/// The same in this side's own words alone: [`Side::sync`] has to follow.
pub(crate) fn arm_both(side: &impl Side, writes: bool, wakes: Wakes) {
    side.incoming().data_armed.0.arm(wakes);
    if writes {
        side.outgoing().space_armed.0.arm(wakes);
    }
}

/// Undoes [`arm`] and [`arm_words`].
pub(crate) fn disarm(incoming: &Control, outgoing: &Control, writes: bool, wakes: Wakes) {
    incoming.data_armed.0.disarm(wakes);
    if writes {
        outgoing.space_armed.0.disarm(wakes);
    }
}

/// For sleepers who have been announced: the next publish rings again. They look once more before they sleep.
pub(crate) fn renew(side: &impl Side, reads: bool, writes: bool) {
    if reads {
        side.incoming().data_armed.0.renew();
    }
    if writes {
        side.outgoing().space_armed.0.renew();
    }
    side.sync();
}

/// Takes unread bytes away from before the bell that a sleeper for space waits for. Whoever sleeps for data has to
/// find one of them when it runs, or it would sleep on. True if none is left.
pub(crate) fn make_way(side: &impl Side) -> bool {
    side.lock().is_ok_and(|_guard| make_way_locked(side))
}

fn make_way_locked(side: &impl Side) -> bool {
    side.absorb(side.incoming().data_armed.0.has_sleepers())
}

/// Whether every byte that the peer sent over TCP has been taken, so that only bells come now. That is noted: the caller holds the receive
/// lock, or the note might come after another thread has gone back, whose bytes on TCP nobody would read any more.
pub(crate) fn is_settled(side: &impl Side) -> bool {
    if side.recv_switched().load(Ordering::Acquire) != 0 {
        return true;
    }
    let settled = tcp_left(side) == 0;
    if settled {
        side.recv_switched().store(1, Ordering::Release);
    }
    settled
}

/// As [`is_settled`], without the lock.
pub(crate) fn looks_settled(side: &impl Side) -> bool {
    side.recv_switched().load(Ordering::Acquire) != 0 || tcp_left(side) == 0
}

/// Bytes of the application that are still to come over TCP; `u64::MAX` while their number is not known.
pub(crate) fn tcp_left(side: &impl Side) -> u64 {
    if side.is_back() {
        return u64::MAX;
    }
    match side.incoming().rare.0.switched_at.load(Ordering::Acquire) {
        NOT_SWITCHED => u64::MAX,
        at => at.saturating_sub(side.tcp_received().load(Ordering::Relaxed)),
    }
}

/// Takes what still comes over TCP. `receive(most, peek)` reads up to `most` bytes from the TCP stream. `None` if the
/// peer's stream goes on in the ring. A read that runs into the bells behind the last byte counts only what
/// is the application's. The caller holds the receive lock.
pub(crate) fn take_tcp(
    side: &impl Side,
    peek: bool,
    mut receive: impl FnMut(u64, bool) -> Result<usize, Errno>,
) -> Option<Result<usize, Errno>> {
    let (incoming, outgoing) = (side.incoming(), side.outgoing());
    let someone_sleeps = incoming.data_armed.0.has_sleepers() || outgoing.space_armed.0.has_sleepers();
    let most = tcp_left(side);
    // Where it is not known how many are the application's, what is behind them may come at any moment.
    let may_overrun = most == u64::MAX && !side.is_back() && side.has_frames();
    let careful = (someone_sleeps || may_overrun) && !peek;
    // As in `Armed::arm`, for the sleeper: the peer sees it, or what the peer did is seen below.
    fence(Ordering::SeqCst);
    let result = receive(most, peek || careful);
    // Only now: a bell that came with the bytes was sent after the count was published.
    let left = tcp_left(side);
    match result {
        Ok(0) if left != 0 => return Some(Ok(0)),
        Ok(got) => {
            let ours = (got as u64).min(left);
            if careful {
                let wakes = someone_sleeps && !side.has_frames();
                if let Err(errno) = take_seen(side, ours, wakes && ours == left, receive) {
                    return Some(Err(errno));
                }
            } else if !peek {
                add(side.drained(), got as u64 - ours);
            }
            if !peek {
                add(side.tcp_received(), ours);
                note_taken(side);
            }
            if ours > 0 {
                return Some(Ok(ours as usize));
            }
        }
        Err(Errno::AGAIN) if left == 0 => {}
        Err(errno) => return Some(Err(errno)),
    }
    side.recv_switched().store(1, Ordering::Release);
    None
}

/// Tells the peer what has been taken from TCP: should this side die, the program had read that.
pub(crate) fn note_taken(side: &impl Side) {
    let taken = side.tcp_received().load(Ordering::Relaxed).saturating_sub(side.aside());
    side.outgoing().rare.0.taken.store(taken, Ordering::Release);
}

/// Takes `ours` bytes that have been looked at. What is behind them stays: bells may be needed. With
/// the last byte of all the ring becomes readable, which no bell tells those who sleep: so if it `wakes` them that byte itself
/// stays, counted as one more bell, and is drained like one. Not where it would be taken for a frame.
fn take_seen(
    side: &impl Side,
    ours: u64,
    wakes: bool,
    mut receive: impl FnMut(u64, bool) -> Result<usize, Errno>,
) -> Result<(), Errno> {
    let stays = u64::from(ours > 0 && wakes);
    if ours > stays {
        receive(ours - stays, false)?;
    }
    add(side.drained(), 0u64.wrapping_sub(stays));
    Ok(())
}

/// Counts; the caller holds the lock under which the counter is changed.
pub(crate) fn add(counter: &AtomicU64, count: u64) {
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(count), Ordering::Relaxed);
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// One that has not seen yet where the peer's bytes leave TCP.
    struct One {
        incoming: Control,
        outgoing: Control,
        drained: AtomicU64,
        switched: AtomicU32,
        received: AtomicU64,
    }

    impl Side for One {
        type Guard<'a> = ();

        fn incoming(&self) -> &Control {
            &self.incoming
        }
        fn outgoing(&self) -> &Control {
            &self.outgoing
        }
        fn drained(&self) -> &AtomicU64 {
            &self.drained
        }
        fn recv_switched(&self) -> &AtomicU32 {
            &self.switched
        }
        fn tcp_received(&self) -> &AtomicU64 {
            &self.received
        }
        fn has_frames(&self) -> bool {
            true
        }
        fn lock(&self) -> Result<(), Errno> {
            Ok(())
        }
        fn is_readable(&self) -> bool {
            false
        }
        fn has_space(&self) -> bool {
            false
        }
        fn absorb(&self, _: bool) -> bool {
            false
        }
        fn take_bells(&self, _: u64) {}
        fn thin_out_bells(&self, _: u64) {}
        fn put_bell(&self) -> bool {
            false
        }
        fn pause(&self) {}
    }

    fn one() -> One {
        let side = One {
            incoming: Control::new(),
            outgoing: Control::new(),
            drained: AtomicU64::new(0),
            switched: AtomicU32::new(0),
            received: AtomicU64::new(0),
        };
        side.incoming.begin();
        side.outgoing.begin();
        side
    }

    /// What a read takes of a stream of `stream` bytes, five of which the peer turns out to have sent before it left TCP.
    fn taken(side: &One, stream: usize) -> usize {
        let mut taken = 0;
        let result = take_tcp(side, false, |most, peek| {
            side.incoming.rare.0.switched_at.store(5, Ordering::SeqCst);
            let count = usize::try_from(most).unwrap_or(stream).min(stream - taken);
            if !peek {
                taken += count;
            }
            Ok(count)
        });
        assert_eq!(result, Some(Ok(5)));
        assert_eq!(side.received.load(Ordering::Relaxed), 5);
        assert_eq!(side.drained.load(Ordering::Relaxed), 0);
        taken
    }

    #[test]
    fn what_follows_the_last_byte_is_left_where_it_may_be_a_frame() {
        assert_eq!(taken(&one(), 30), 5);
        assert_eq!(taken(&one(), 5), 5);
    }

    #[test]
    fn no_byte_is_left_to_wake_sleepers_where_it_would_be_taken_for_a_frame() {
        let side = one();
        side.incoming.data_armed.0.arm(Wakes::ByTcp);
        assert_eq!(taken(&side, 30), 5);
    }
}
