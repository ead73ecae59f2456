//! Before a sleep: the peer is told who sleeps, and asked what it has posted. See "Sleeping" in [`super`].

use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::io::Errno;

use super::super::board::{Board, Figures, Said};
use super::super::queue::{LONGEST_WAIT, Request};
use super::Link;
use crate::control::Control;
use crate::lock::Guard;
use crate::process;
use crate::uninterrupted::Uninterrupted;

impl Link {
    /// Before a sleep: see the module's documentation. Afterwards `incoming` holds what had been posted when the peer
    /// learned of this side's sleepers; or the peer has closed its end, or its socket, as `is_closed` tells.
    pub(crate) fn sync(
        &self,
        incoming: &Control,
        outgoing: &Control,
        is_closed: impl Fn() -> bool,
    ) -> Result<(), Errno> {
        let _uninterrupted = Uninterrupted::begin();
        let one = self.syncing.lock(process::thread())?;
        self.ask(one, incoming, outgoing)?.take(incoming, is_closed)
    }

    /// The first half of [`Self::sync`], for who has several to ask: the answers are on their way at the same time. `None` if somebody
    /// else is about to. Not to be interrupted until the answer has been taken.
    pub(crate) fn try_ask(
        &self,
        incoming: &Control,
        outgoing: &Control,
    ) -> Option<Result<Question<'_>, Errno>> {
        let one = self.syncing.try_lock(process::thread())?;
        Some(self.ask(one, incoming, outgoing))
    }

    fn ask<'a>(
        &'a self,
        one: Guard<'a>,
        incoming: &Control,
        outgoing: &Control,
    ) -> Result<Question<'a>, Errno> {
        let poster = self.pair.begin(2)?;
        self.doubtful.store(false, Ordering::SeqCst);
        let words = [incoming.data_armed.0.word(), outgoing.space_armed.0.word()];
        let announced = self.board().bells.read();
        self.vouched.arm(words[0], announced.map(|words| words[0]));
        let figures = self.figures();
        let credit = [&figures.consumed, &figures.consumed_stream].map(|word| word.load(Ordering::Acquire));
        let mut said = [[0; 3]; 3];
        (said[0], said[1]) = (Said::of(credit), Said::of(words));
        let mut count = 2;
        // This side's word can't be true before the answer has come, but nobody takes it for true before all has arrived.
        let posted = figures.posted.load(Ordering::Acquire);
        if let Some([_, rings]) = announced
            && self.promise.give(posted, rings)
        {
            said[2] = Said::of([posted, rings]);
            count = 3;
        }
        const { assert!(std::mem::offset_of!(Board, word) == 48 && std::mem::offset_of!(Board, armed) == 24) };
        let id = poster.post([
            self.words(&poster, 0, std::mem::offset_of!(Board, credit), said[..count].as_flattened()),
            self.read_figures(),
        ])?;
        self.credited.store(credit[0], Ordering::Relaxed);
        for (told, word) in self.told_sleepers.iter().zip(words) {
            told.store(word as u32, Ordering::Relaxed);
        }
        Ok(Question { link: self, id, _one: one })
    }

    /// Whether the peer rings for what it posts next, though the sleepers who have been announced since it was asked last are news to it: it
    /// knows of as many, has not rung for them, and nothing that was to be told with them has changed.
    pub(crate) fn rings_anyway(&self, incoming: &Control, outgoing: &Control) -> bool {
        let Some(_one) = self.syncing.try_lock(process::thread()) else { return false };
        self.inbox.scan(incoming);
        let sleepers = [&incoming.data_armed.0, &outgoing.space_armed.0].map(|armed| armed.word() as u32);
        let [data, space] = [0, 1].map(|index: usize| self.told_sleepers[index].load(Ordering::Relaxed));
        let figures = self.figures();
        let bells = self.bells_announced();
        sleepers == [data, space]
            && (data != 0 && space == 0)
            && !self.doubtful.load(Ordering::SeqCst)
            && bells.is_some_and(|bells| self.vouched.is_for(self.inbox.arrived(), bells))
            && self.promise.stands(figures.posted.load(Ordering::Acquire))
            && self.credited.load(Ordering::Relaxed) == figures.consumed.load(Ordering::Acquire)
            && !self.is_frozen()
            && !self.inbox.peer_lied()
            && self.is_usable()
    }

    /// The kernel has reported something on the connection: it may be a bell whose reason has not arrived, and there is no other.
    pub(crate) fn doubt(&self) {
        self.doubtful.store(true, Ordering::SeqCst);
    }

    /// A request that has the peer's figures come to the board.
    pub(super) fn read_figures(&self) -> Request {
        let target = self.our_board(std::mem::offset_of!(Board, figures));
        Request::read(target, self.their_figures(), size_of::<Figures>())
    }

    /// Waits until all has arrived that the peer had posted, as its figures say, which have just come; fails with `EPIPE` once it `is_over`.
    /// What it had posted, and how often it had rung.
    pub(super) fn await_posted(
        &self,
        incoming: &Control,
        is_over: impl Fn() -> bool,
    ) -> Result<(u64, u64), Errno> {
        let [posted, consumed, stream, rings] =
            self.board().figures.each_ref().map(|word| word.load(Ordering::Acquire));
        self.learn_credit([consumed, stream]);
        let mut looks = 0u32;
        let mut limit = None;
        loop {
            self.inbox.scan(incoming);
            if self.inbox.peer_lied() || self.is_frozen() {
                return Err(Errno::CONNRESET);
            }
            let consumed = self.figures().consumed.load(Ordering::Acquire);
            if consumed + self.inbox.scanned_ahead(consumed) >= posted {
                return Ok((posted, rings));
            }
            if posted - consumed > self.inbox.room.size || !self.is_usable() {
                return Err(Errno::CONNRESET);
            }
            looks += 1;
            if looks.is_multiple_of(64) {
                // The device delivers it, or fails, unless the peer was killed in between, or says what isn't so.
                let now = Instant::now();
                if now > *limit.get_or_insert(now + LONGEST_WAIT) {
                    return Err(Errno::CONNRESET);
                }
                if is_over() {
                    return Err(Errno::PIPE);
                }
                rustix::thread::sched_yield();
            }
        }
    }
}

/// The peer has been asked what it has posted ([`Link::try_ask`]). Nobody else asks meanwhile.
#[derive(Debug)]
pub(crate) struct Question<'a> {
    link: &'a Link,
    id: u64,
    _one: Guard<'a>,
}

impl Question<'_> {
    /// Whether the answer has come, or none will.
    pub(crate) fn is_answered(&self) -> bool {
        self.link.pair.has_done(self.id)
    }

    /// Waits for the answer, and for what it tells of: the second half of [`Link::sync`].
    pub(crate) fn take(self, incoming: &Control, is_closed: impl Fn() -> bool) -> Result<(), Errno> {
        let link = self.link;
        match link.pair.wait_for(self.id, || link.peer_has_gone(incoming) || is_closed()) {
            // That is news, for whoever wants to sleep.
            Err(Errno::PIPE) => return Ok(()),
            done => done?,
        }
        let (posted, rings) = link.await_posted(incoming, || false)?;
        link.vouched.confirm(posted, link.bells_announced());
        // Unless it has been given with the question.
        link.give_word(rings)
    }
}
