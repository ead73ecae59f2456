//! Arming several registrations of an event loop at once, over RDMA: before a sleep each connection has to ask its peer's host what
//! it has posted ([`crate::verbs::link`]), and waits for the answer. All answers together take about as long as one.
//!
//! Who has asked holds a lock of each link until the answer has been taken, and so is never made to wait for another's: links that
//! somebody else is asking come last, one by one.

use crate::connection::Connection;
use crate::control::Wakes;
use crate::segment::Segment;
use crate::uninterrupted::Uninterrupted;
use crate::waiting::{self, Side};

/// One registration to be armed, as by [`Connection::arm_cold`].
#[derive(Clone, Copy, Debug)]
pub struct Arming {
    /// Its connection,
    pub connection: &'static Connection,
    /// and the descriptor of that, which stays open meanwhile.
    pub fd: i32,
    /// For space as well as for data.
    pub writes: bool,
    /// Which bells wake it.
    pub wakes: Wakes,
}

impl Connection {
    /// Whether arming means to ask the peer's host, so that [`arm_together`] saves time.
    #[inline]
    pub fn arms_by_asking(&self) -> bool {
        self.segment().is_some_and(|segment| segment.link_to_ask().is_some())
    }
}

impl Arming {
    fn segment(&self) -> Option<&'static Segment> {
        self.connection.segment()
    }

    /// Announces the sleeper in this side's words. Whether the peer has to be asked.
    fn announce(&self) -> bool {
        let Some(segment) = self.segment() else { return false };
        if self.writes {
            self.connection.grow_for_sleeper(self.fd, segment);
        }
        waiting::arm_both(&self.connection.socket(self.fd, segment), self.writes, self.wakes);
        let rings_anyway = self.connection.recv_settled()
            && segment
                .link_to_ask()
                .is_some_and(|link| link.rings_anyway(segment.incoming(), segment.outgoing()));
        !rings_anyway
    }

    fn sync(&self) {
        if let Some(segment) = self.segment() {
            self.connection.socket(self.fd, segment).sync();
        }
    }

    fn finish(&self) {
        if let Some(segment) = self.segment() {
            self.connection.armed(self.fd, segment);
        }
    }
}

/// [`Connection::arm_cold`] of each of these. Always followed by one [`Connection::disarm_cold`] for each.
pub fn arm_together(all: &[Arming]) {
    let to_ask: Vec<&Arming> = all.iter().filter(|one| one.announce()).collect();
    let left = ask(&to_ask);
    left.into_iter().for_each(Arming::sync);
    all.iter().for_each(Arming::finish);
}

/// Asks as many as can be asked at once, and takes their answers. Those that could not.
fn ask<'a>(all: &[&'a Arming]) -> Vec<&'a Arming> {
    // A signal handler must not find a link that its own thread is asking.
    let _uninterrupted = Uninterrupted::begin();
    let mut asked = Vec::with_capacity(all.len());
    let mut left = Vec::new();
    for &one in all {
        let question = one.segment().and_then(|segment| {
            let link = segment.link_to_ask()?;
            Some((segment, link.try_ask(segment.incoming(), segment.outgoing())?))
        });
        match question {
            Some((segment, Ok(question))) => asked.push((one, segment, question)),
            Some((segment, Err(_))) => drop(one.connection.fabric_failed(segment)),
            None => left.push(one),
        }
    }
    for (one, segment, question) in asked {
        if question.take(segment.incoming(), || crate::tcp::peer_has_closed(one.fd)).is_err() {
            one.connection.fabric_failed(segment);
        }
    }
    left
}
