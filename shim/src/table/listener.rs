//! Listening sockets: what clients on this host are told of them.

use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU8, AtomicU32, Ordering};

use thallus_transport::experience::{self, Advice};
use thallus_transport::rendezvous::{self, Service};
use thallus_transport::settings::settings;
use thallus_transport::uninterrupted::{Descriptor, Uninterrupted};

use super::place;
use crate::{errno, log};

/// A listening socket, or one that turned out to be of no interest.
#[derive(Debug)]
pub(super) struct Listener {
    /// Where it listens, if its connections are of interest.
    service: Option<Service>,
    /// The socket that announces the port; −1 if there is none. No lock: a fork could find it taken.
    hint: AtomicI32,
    /// Those by which [`Advice`] is given, as far as nobody else gives it.
    advice: [AtomicI32; Advice::ALL.len()],
    /// What it is: none, or one more than its place in [`Advice::ALL`].
    told: AtomicU8,
    accepted: AtomicU32,
    /// Descriptors of it.
    pub(super) fds: AtomicU32,
    /// The one that was made before it.
    before: AtomicPtr<Listener>,
}

/// The one that was made last. From here on a search for memory that has been lost (LeakSanitizer, valgrind) finds them all; the
/// table of descriptors, which is no memory of malloc's, and has marks in its words, it does not know.
static LAST: AtomicPtr<Listener> = AtomicPtr::new(std::ptr::null_mut());

/// So many connections a listener takes until it tries again to announce its port, after the first: who had announced it may
/// be gone (another process with `SO_REUSEPORT`, or the program whose listener this one has inherited).
const UNTIL_ANNOUNCED_AGAIN: u32 = 8;
/// And until it looks after its advice again: others may have given that, and be gone, or two threads been at it.
const UNTIL_TOLD_AGAIN: u32 = 256;

/// Puts `fd`, or none, where a listener keeps one, and closes what was there.
fn replace(slot: &AtomicI32, fd: Option<OwnedFd>) {
    let before = slot.swap(fd.map_or(-1, OwnedFd::into_raw_fd), Ordering::SeqCst);
    if before >= 0 {
        // SAFETY: a listener's own, which one swap has taken out of it.
        drop(Descriptor::from(unsafe { OwnedFd::from_raw_fd(before) }));
    }
}

impl Listener {
    /// One that stays for good.
    pub(super) fn create(service: Option<Service>) -> &'static Self {
        let listener: &'static Self = Box::leak(Box::new(Self {
            service,
            hint: AtomicI32::new(-1),
            advice: [const { AtomicI32::new(-1) }; _],
            told: AtomicU8::new(0),
            accepted: AtomicU32::new(0),
            fds: AtomicU32::new(1),
            before: AtomicPtr::new(std::ptr::null_mut()),
        }));
        let before = LAST.swap(std::ptr::from_ref(listener).cast_mut(), Ordering::AcqRel);
        listener.before.store(before, Ordering::Release);
        listener
    }

    /// Where it listens, if its connections are of interest.
    pub(super) fn service(&self) -> Option<Service> {
        self.service
    }

    /// The same, if they may leave TCP.
    fn selected(&self) -> Option<Service> {
        let settings = settings();
        let is_selected = |service: &Service| match service {
            Service::Port(port) => settings.selects(*port),
            // Else it would be none.
            Service::Unix(_) => true,
        };
        self.service.filter(|service| settings.shm && is_selected(service))
    }

    /// Announces the port, unless that is done, or somebody else has done it.
    pub(super) fn announce(&self) {
        let Some(service) = self.selected() else { return };
        if self.hint.load(Ordering::SeqCst) >= 0 {
            return;
        }
        let _uninterrupted = Uninterrupted::begin();
        experience::share();
        match rendezvous::announce(service, place) {
            Ok(Some(hint)) => replace(&self.hint, Some(hint)),
            Ok(None) => {}
            Err(errno) => match service {
                Service::Port(port) => log::warn!("port {port} can't be announced: {errno}"),
                Service::Unix(name) => log::warn!("{name} can't be announced: {errno}"),
            },
        }
    }

    /// Takes one more connection.
    pub(super) fn accepts(&self) {
        let before = self.accepted.fetch_add(1, Ordering::Relaxed);
        if self.hint.load(Ordering::Relaxed) < 0 && before.is_multiple_of(UNTIL_ANNOUNCED_AGAIN) {
            errno::keep(|| self.announce());
        }
        if let Some(service) = self.service {
            self.advise(service, before);
        }
    }

    /// Tells clients what has been learned of the port, if that has changed.
    fn advise(&self, service: Service, accepted: u32) {
        let told = self.told.load(Ordering::Relaxed);
        let index =
            |advice| Advice::ALL.iter().position(|&other| other == advice).map_or(0, |place| place as u8 + 1);
        let tells = told.checked_sub(1).and_then(|place| Advice::ALL.get(usize::from(place)).copied());
        let advice = Advice::of(service.number(), tells);
        let wanted = advice.map_or(0, index);
        let again = accepted % UNTIL_TOLD_AGAIN == UNTIL_TOLD_AGAIN - 1;
        if wanted == told && !again
            || self.told.compare_exchange(told, wanted, Ordering::Relaxed, Ordering::Relaxed).is_err()
        {
            return;
        }
        errno::keep(|| {
            let _uninterrupted = Uninterrupted::begin();
            self.hush();
            let (Some(service), Some(advice)) = (self.selected(), advice) else { return };
            let Ok(sockets) = rendezvous::tell(service, advice, place) else { return };
            for (socket, slot) in sockets.into_iter().zip(&self.advice) {
                replace(slot, Some(socket));
            }
        });
    }

    fn hush(&self) {
        self.advice.iter().for_each(|slot| replace(slot, None));
    }

    /// It listens no more.
    pub(super) fn withdraw(&self) {
        replace(&self.hint, None);
        self.hush();
    }

    /// Descriptors of this library's.
    pub(super) fn internal_fds(&self) -> impl Iterator<Item = i32> {
        let all = std::iter::once(&self.hint).chain(&self.advice);
        all.map(|fd| fd.load(Ordering::SeqCst)).filter(|&fd| fd >= 0)
    }
}
