//! Arming several connections at once, over RDMA: before a sleep each has to ask its peer's host what that has posted
//! ([`crate::verbs::link`]), and waits for the answer. All answers together take about as long as one.
//!
//! Who has asked holds a lock of each link until the answer has been taken, and so is never made to wait for another's: links that
//! somebody else is asking come last, one by one.

use crate::connection::Connection;
use crate::control::Wakes;
use crate::ready::bit;
use crate::segment::Segment;
use crate::tcp;
use crate::uninterrupted::Uninterrupted;
use crate::verbs::link::Question;
use crate::waiting::{self, Side, Sleeper};

/// One connection to be armed.
#[derive(Clone, Copy, Debug)]
pub struct Arming<'a> {
    /// It, by
    pub connection: &'a Connection,
    /// its descriptor, which stays open meanwhile.
    pub fd: i32,
    /// What is waited for, by poll(2)'s bits: for data in any case, and for space if that is among them.
    pub asked: u32,
    /// Which bells wake.
    pub wakes: Wakes,
}

impl Connection {
    /// Whether arming means to ask the peer's host, so that to arm several at once saves time.
    #[inline]
    pub fn arms_by_asking(&self) -> bool {
        self.segment().is_some_and(|segment| segment.link_to_ask().is_some())
    }
}

/// [`Connection::arm_cold`] of each of these. Always followed by one [`Connection::disarm_cold`] for each.
pub fn arm_registrations(all: &[Arming<'_>]) {
    let announce = |one: &Arming<'_>, segment: &Segment| {
        if one.asked & bit::WRITE != 0 {
            one.connection.make_way(one.fd);
        }
        waiting::arm_both(&one.connection.socket(one.fd, segment), one.asked & bit::WRITE != 0, one.wakes);
        one.rings_anyway(segment)
    };
    let to_ask = all.iter().filter(|one| one.begin(announce) == Some(false)).copied().collect();
    ask(to_ask);
    for one in all {
        if let Some(segment) = one.connection.segment() {
            one.connection.armed(one.fd, segment);
        }
    }
}

/// [`Connection::arm`] of each of these, and what it returns. Always followed by one [`Connection::disarm`] for each.
pub fn arm_calls<'a>(all: &[Arming<'a>]) -> Vec<bool> {
    let mut to_ask = Vec::with_capacity(all.len());
    let mut announce = |one: &Arming<'a>, segment: &Segment| {
        let side = one.connection.socket(one.fd, segment);
        let (reads, writes) = (one.asked & bit::READ != 0, one.asked & bit::WRITE != 0);
        let sleeper = Sleeper::announce(&side, reads, writes, one.wakes);
        if sleeper.found_bells() || !one.rings_anyway(segment) {
            to_ask.push(*one);
        }
        sleeper
    };
    let sleepers: Vec<_> = all.iter().map(|one| one.begin(&mut announce)).collect();
    ask(to_ask);
    let finish = |(one, sleeper): (&Arming<'_>, Option<Sleeper>)| {
        let (Some(segment), Some(sleeper)) = (one.connection.segment(), sleeper) else { return true };
        let clear = sleeper.finish(&one.connection.socket(one.fd, segment));
        one.connection.sleeps(one.fd, segment);
        clear
    };
    all.iter().zip(sleepers).map(finish).collect()
}

impl Arming<'_> {
    /// Announces the sleeper in this side's words, which `announce` does.
    fn begin<T>(&self, announce: impl FnOnce(&Self, &Segment) -> T) -> Option<T> {
        let segment = self.connection.segment()?;
        if self.asked & bit::WRITE != 0 {
            self.connection.grow_for_sleeper(self.fd, segment);
        }
        Some(announce(self, segment))
    }

    /// Whether the peer need not be asked, now that the sleeper has been announced.
    fn rings_anyway(&self, segment: &Segment) -> bool {
        let Some(link) = segment.link_to_ask() else { return true };
        self.connection.recv_settled() && link.rings_anyway(segment.incoming(), segment.outgoing())
    }

    fn sync(self) {
        if let Some(segment) = self.connection.segment() {
            self.connection.socket(self.fd, segment).sync();
        }
    }
}

/// Asks the peers of all of these, and takes their answers.
fn ask(all: Vec<Arming<'_>>) {
    if all.is_empty() {
        return;
    }
    let mut left = Vec::new();
    {
        // A signal handler must not find a link that its own thread is asking.
        let _uninterrupted = Uninterrupted::begin();
        let mut asked = Vec::with_capacity(all.len());
        for one in all {
            let question = one.connection.segment().and_then(|segment| {
                let link = segment.link_to_ask()?;
                Some((segment, link.try_ask(segment.incoming(), segment.outgoing())?))
            });
            match question {
                Some((segment, Ok(question))) => asked.push(Asked { one, segment, question }),
                Some((segment, Err(_))) => drop(one.connection.fabric_failed(segment)),
                None => left.push(one),
            }
        }
        take_answers(asked);
    }
    left.into_iter().for_each(Arming::sync);
}

/// A question under way.
struct Asked<'a> {
    one: Arming<'a>,
    segment: &'a Segment,
    question: Question<'a>,
}

/// So many looks in which no answer has come, with the processor given away after each, before one is waited for.
const LOOKS: u32 = 100;

/// Takes the answers as they come. Nobody else can ask meanwhile: a peer that does not answer must not keep the threads waiting that
/// use other connections, whose peers do.
fn take_answers(mut asked: Vec<Asked<'_>>) {
    let mut looks = 0;
    while looks < LOOKS && !asked.is_empty() {
        let (answered, open): (Vec<_>, Vec<_>) =
            asked.into_iter().partition(|one| one.question.is_answered());
        looks = if answered.is_empty() { looks + 1 } else { 0 };
        answered.into_iter().for_each(Asked::take);
        asked = open;
        if looks > 0 {
            rustix::thread::sched_yield();
        }
    }
    asked.into_iter().for_each(Asked::take);
}

impl Asked<'_> {
    fn take(self) {
        let Self { one, segment, question } = self;
        if question.take(segment.incoming(), || tcp::peer_has_closed(one.fd)).is_err() {
            one.connection.fabric_failed(segment);
        }
    }
}
