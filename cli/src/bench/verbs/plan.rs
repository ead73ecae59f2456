//! What is measured: one message under way, echoed, by each way of sending it.

use serde::{Deserialize, Serialize};
use thallus_transport::verbs::probe::{Run, Way};

use crate::bench::SECONDS;

/// How a message travels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Path {
    /// A TCP connection: `send` and `recv`, which sleep.
    Tcp,
    /// A WRITE, and another that tells the count of messages.
    Plain,
    /// Header, payload and validity word in one WRITE.
    Framed,
    /// The same, carried by the work request.
    FramedInline,
    /// The same, with the validity word by a WRITE of its own, behind the other in one call: what the library does unless it has been
    /// told that the device places bytes in order.
    TwoWritesInline,
}

/// One line of the result, or a part of one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Case {
    pub(super) path: Path,
    /// Bytes of a message, without header and validity word.
    pub(super) size: u32,
}

/// Bytes of the messages by which the ways are compared.
pub(super) const SIZE: u32 = 64;
/// Bytes for which requests that carry their message are compared with those that do not: around 192 and 432, where that is said to end
/// to pay.
pub(super) const INLINE_SIZES: [u32; 9] = [64, 128, 184, 192, 200, 256, 424, 432, 504];
/// Bytes that header and validity word add.
const FRAME: u32 = 8;

impl Path {
    /// Those of the first table.
    pub(super) const ALL: [Self; 5] =
        [Self::Tcp, Self::Plain, Self::Framed, Self::FramedInline, Self::TwoWritesInline];

    pub(super) fn title(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Plain => "RDMA, plain: the count of messages by another WRITE",
            Self::Framed => "+ header and validity word: one WRITE",
            Self::FramedInline => "+ inline",
            Self::TwoWritesInline => "validity word by a WRITE of its own, both inline",
        }
    }
}

impl Case {
    /// What the probe has to do for it; `None` over TCP.
    pub(super) fn run(self) -> Option<Run> {
        let (way, inline) = match self.path {
            Path::Tcp => return None,
            Path::Plain => (Way::Counted, false),
            Path::Framed => (Way::Whole, false),
            Path::FramedInline => (Way::Whole, true),
            Path::TwoWritesInline => (Way::InTwo, true),
        };
        Some(Run { way, inline, size: self.size })
    }

    fn fits(self, inline: usize) -> bool {
        let carried = match self.path {
            Path::Tcp | Path::Plain | Path::Framed => 0,
            Path::FramedInline => self.size + FRAME,
            Path::TwoWritesInline => self.size + FRAME / 2,
        };
        carried as usize <= inline
    }
}

/// All cases that a device can do which grants so many `inline` bytes, each once.
pub(super) fn plan(inline: usize) -> Vec<Case> {
    let ways = Path::ALL.map(|path| Case { path, size: SIZE });
    let sizes = INLINE_SIZES.into_iter().filter(|&size| size != SIZE);
    let pairs = sizes.flat_map(|size| [Path::Framed, Path::FramedInline].map(|path| Case { path, size }));
    let fits = |case: &Case| case.fits(inline);
    // Not those of a size of which only one half can be measured.
    let pairs = pairs.filter(|case| Case { path: Path::FramedInline, ..*case }.fits(inline));
    ways.into_iter().filter(fits).chain(pairs).collect()
}

/// # Errors
/// It is none that a client of this version asks for.
pub(super) fn check(case: Case, seconds: f64) -> anyhow::Result<()> {
    anyhow::ensure!(INLINE_SIZES.contains(&case.size), "nobody measures {} bytes", case.size);
    anyhow::ensure!(SECONDS.contains(&seconds), "nobody measures for {seconds} s");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_asks_for_what_can_be_measured() {
        let case = |size| Case { path: Path::Tcp, size };
        for seconds in [0.01, 1.0, 600.0] {
            assert!(check(case(SIZE), seconds).is_ok());
        }
        for seconds in [-1.0, 0.0, 601.0, 1e300, f64::NAN] {
            assert!(check(case(SIZE), seconds).is_err(), "{seconds}");
        }
        assert!(check(case(0), 1.0).is_err());
    }

    #[test]
    fn what_a_device_does_not_grant_is_left_out() {
        let sizes = |inline| {
            let plan = plan(inline);
            let of = |path| plan.iter().filter(|case| case.path == path).map(|case| case.size).max();
            (plan.len(), of(Path::Framed), of(Path::FramedInline), of(Path::TwoWritesInline))
        };
        assert_eq!(sizes(512), (21, Some(504), Some(504), Some(64)));
        assert_eq!(sizes(200), (11, Some(192), Some(192), Some(64)));
        assert_eq!(sizes(0), (3, Some(64), None, None));
    }
}
