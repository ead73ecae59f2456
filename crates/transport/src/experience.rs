//! How long earlier connections to the same port have lasted, and so how soon the next one should leave TCP.
//!
//! Leaving costs about as much as 6 round trips over TCP between two cores, as 16 on one. So a connection that has hardly more is
//! slower for it. After many of those in a row the next ones wait for more calls: for all that they need, as a rule. Whoever
//! lives longer leaves TCP all the same, and shows that times have changed. Where both ends share a processor the gain is
//! smaller, too: then more are short. That is known of connections that have left TCP, and taken for true of the next ones.

use std::sync::atomic::{AtomicU8, Ordering};

use crate::arena::Role;
use crate::settings::settings;

/// Calls beyond the usual ones before the first attempt that make a connection a long one: between two processors, and on one
/// that is the only one for both ends.
const WORTH: [u64; 2] = [16, 32];
/// So many times as long, and short ones before it are forgotten.
const BY_FAR: u64 = 16;
/// Short connections in a row before the first doubling of those calls, and between two doublings.
const STREAK: [u8; 2] = [32, 8];
/// Most doublings.
const MOST: u8 = 3;

/// In an entry of [`SHORT`]: the last connection that has left TCP had one processor for both ends.
const SHARED: u8 = 1 << 7;

/// Short connections, less some for each long one: by the server's port, for clients and for servers.
static SHORT: [[AtomicU8; 1 << 16]; 2] = [const { [const { AtomicU8::new(0) }; 1 << 16] }; 2];

fn short(role: Role, port: u16) -> &'static AtomicU8 {
    &SHORT[role as usize][usize::from(port)]
}

/// Calls on a new connection before it looks for its peer.
pub(crate) fn patience(role: Role, port: u16) -> u32 {
    let count = short(role, port).load(Ordering::Relaxed) & !SHARED;
    let more = count.checked_sub(STREAK[0]);
    let doublings = more.map_or(0, |more| (1 + more / STREAK[1]).min(MOST));
    settings().upgrade_after.saturating_mul(1 << doublings)
}

/// A connection has ended after so many calls, over whatever. `shared` says for one that has left TCP whether both ends have one
/// processor only.
pub(crate) fn ended(role: Role, port: u16, calls: u64, shared: Option<bool>) {
    let usual = u64::from(settings().upgrade_after);
    if calls < usual || !settings().learns {
        return;
    }
    let entry = short(role, port);
    let now = entry.load(Ordering::Relaxed);
    let flag = shared.map_or(now & SHARED, |shared| if shared { SHARED } else { 0 });
    let (count, worth) = (now & !SHARED, WORTH[usize::from(flag != 0)]);
    let count = match calls - usual {
        over if over < worth => (count + 1).min(STREAK[0] + STREAK[1] * MOST),
        over if over < worth * BY_FAR => count.saturating_sub(STREAK[1]),
        _ => 0,
    };
    if now != count | flag {
        entry.store(count | flag, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_short_connections_make_the_next_ones_wait_and_long_ones_less() {
        let (role, port) = (Role::Client, 1);
        let after = |count: u32, calls| {
            (0..count).for_each(|_| ended(role, port, calls, None));
            patience(role, port)
        };
        assert_eq!(after(100, 7), 8);
        assert_eq!([after(31, 23), after(1, 8), after(7, 8), after(1, 8)], [8, 16, 16, 32]);
        assert_eq!([after(8, 8), after(200, 8)], [64, 64]);
        assert_eq!([after(1, 24), after(1, 24), after(1, 24), after(1, 24)], [64, 32, 16, 8]);
        assert_eq!([after(200, 8), after(1, 8 + 256)], [64, 8]);
        assert_eq!(after(31, 8), 8);
        assert_eq!((patience(Role::Server, port), patience(role, 2)), (8, 8));

        // On one processor, 16 calls more are few.
        assert_eq!([after(1, 2000), after(64, 24)], [8, 8]);
        ended(role, port, 24, Some(true));
        assert_eq!([after(31, 24), after(24, 39)], [16, 64]);
        assert_eq!([after(1, 40), after(1, 40), after(1, 40), after(1, 40)], [64, 32, 16, 8]);
        (0..64).for_each(|_| ended(role, port, 24, Some(true)));
        assert_eq!(patience(role, port), 64);
        ended(role, port, 24, Some(false));
        assert_eq!([after(3, 24)], [8]);
    }
}
