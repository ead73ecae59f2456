//! Wakes the threads of this process that sleep until they may write, when another one shuts down sending.
//!
//! Nothing arrives on their connection then: the peer has nothing to say, and `shutdown` of the socket itself would end the bells to
//! it. So they sleep on an *alarm* besides, a timer of the process (timerfd_create(2)). It rings once, and is never silenced: who looks for
//! one later gets the next, and the last who sleeps on it closes it. An eventfd would do; but who looks into `/proc/PID/fd` can tell a timer
//! from what else the library has there.
//!
//! No other process that has the connection is woken.

use std::os::fd::{AsFd, AsRawFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use rustix::io::Errno;
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::connection::Connection;
use crate::process;
use crate::settings::settings;
use crate::uninterrupted::{Descriptor, Uninterrupted};

/// The alarms of this process that somebody may sleep on.
#[derive(Debug)]
struct Alarms {
    /// That which has not been rung.
    next: Option<Arc<Descriptor>>,
    /// Others, on which somebody still sleeps, or is about to wake.
    rung: Vec<Weak<Descriptor>>,
}

static ALARMS: Mutex<Alarms> = Mutex::new(Alarms { next: None, rung: Vec::new() });

/// An alarm, for one sleep. To be taken before the sleeper looks whether it need not sleep.
#[derive(Debug)]
pub struct Watch(Arc<Descriptor>);

impl Watch {
    /// `None` where nobody could ring, as there is no other thread; and without a descriptor for it.
    pub fn begin() -> Option<Self> {
        if process::is_alone() {
            return None;
        }
        let _uninterrupted = Uninterrupted::begin();
        let next = ALARMS.lock().ok()?.next.clone();
        if let Some(next) = next {
            return Some(Self(next));
        }
        // Not under the lock: to close the old number may ask whether it is one of ours.
        let made = Arc::new(made().ok()?);
        Some(Self(ALARMS.lock().ok()?.next.get_or_insert(made).clone()))
    }

    /// What becomes readable.
    pub fn fd(&self) -> i32 {
        self.0.as_fd().as_raw_fd()
    }
}

fn made() -> Result<Descriptor, Errno> {
    let fd = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
    Ok((settings().place)(fd)?.into())
}

fn ring() {
    let _uninterrupted = Uninterrupted::begin();
    let Ok(mut alarms) = ALARMS.lock() else { return };
    let Some(alarm) = alarms.next.take() else { return };
    alarms.rung.retain(|rung| rung.strong_count() > 0);
    alarms.rung.push(Arc::downgrade(&alarm));
    drop(alarms);
    let (never, past) = (Timespec { tv_sec: 0, tv_nsec: 0 }, Timespec { tv_sec: 0, tv_nsec: 1 });
    let once = Itimerspec { it_interval: never, it_value: past };
    // A timer, and a time.
    let _ = timerfd_settime(alarm.as_fd(), TimerfdTimerFlags::ABSTIME, &once);
}

impl Connection {
    /// Sending has been shut down: has the threads of this process go on that sleep until they may write.
    pub fn end_waits_for_room(&self) {
        if self.has_writers_asleep() {
            ring();
        }
    }
}

/// This process's descriptors of this kind.
pub fn internal_fds() -> Vec<i32> {
    let Ok(alarms) = ALARMS.lock() else { return Vec::new() };
    let rung = alarms.rung.iter().filter_map(Weak::upgrade);
    alarms.next.iter().cloned().chain(rung).map(|alarm| alarm.as_fd().as_raw_fd()).collect()
}

/// What a fork must not find locked by a thread that the child does not have.
#[derive(Debug)]
pub struct Quiet(#[expect(dead_code, reason = "held")] MutexGuard<'static, Alarms>);

/// See [`Quiet`].
pub fn quiesce() -> Option<Quiet> {
    ALARMS.lock().ok().map(Quiet)
}

/// To be called in a forked child: its parent's alarms are not for it. What the parent's threads sleep on stays open.
pub fn forked() {
    let _uninterrupted = Uninterrupted::begin();
    if let Ok(mut alarms) = ALARMS.lock() {
        alarms.next = None;
        alarms.rung.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, poll};

    fn is_readable(watch: &Watch) -> bool {
        let mut list = [PollFd::new(&*watch.0, PollFlags::IN)];
        poll(&mut list, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    /// All about the alarms that the process has. Tests run in threads, so it is not alone.
    #[test]
    fn a_ring_wakes_all_who_have_begun_and_nobody_who_begins_later() {
        let (first, second) = (Watch::begin().unwrap(), Watch::begin().unwrap());
        assert_eq!(first.fd(), second.fd());
        assert_eq!(internal_fds(), [first.fd()]);
        assert!(!is_readable(&first));
        ring();
        assert!(is_readable(&first) && is_readable(&second));
        // Closed by nobody as long as somebody sleeps on it.
        assert_eq!(internal_fds(), [first.fd()]);
        let later = Watch::begin().unwrap();
        assert_ne!(later.fd(), first.fd());
        assert!(!is_readable(&later));
        drop(first);
        assert_eq!(internal_fds(), [later.fd(), second.fd()]);
        drop(second);
        assert_eq!(internal_fds(), [later.fd()]);
        ring();
        drop(later);
        ring();
        assert!(internal_fds().is_empty());
        // A child has its own.
        let parents = Watch::begin().unwrap();
        forked();
        ring();
        assert!(!is_readable(&parents));
        assert_ne!(Watch::begin().unwrap().fd(), parents.fd());
    }
}
