//! Which device and port reach a connection's peer: the one that has the connection's local address.

use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use rustix::io::Errno;

use super::ffi::{self, Context, PortAttributes, Verbs};
use super::manager::{self, Meeting};
use super::queue;
use crate::process;
use crate::reason::Reason;
use crate::settings::settings;
use crate::settle::{PATIENCE, lock_until};

/// An RDMA port's entry for one address, in `/sys/class/infiniband`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The device's name.
    pub device: String,
    /// The port's number.
    pub port: u8,
    /// Index into the port's GID table.
    pub index: u8,
    /// The GID itself.
    pub gid: [u8; 16],
    /// Whether it is an entry for RoCE v2.
    pub routable: bool,
}

const CLASS: &str = "/sys/class/infiniband";

/// Where the last connections from some addresses were.
static KNOWN: Mutex<Vec<(IpAddr, Place)>> = Mutex::new(Vec::new());
/// That many addresses are remembered.
const MOST_KNOWN: usize = 64;

/// Where the port's GID table says `local`; an entry for RoCE v2 if there is one.
pub fn find(local: IpAddr) -> Option<Place> {
    find_in(Path::new(CLASS), &KNOWN, local)
}

/// As [`find`], in the tables below `class`. Such a table may have a thousand entries, and each is a file of its own: so an
/// entry that was found is looked at first.
fn find_in(class: &Path, known: &Mutex<Vec<(IpAddr, Place)>>, local: IpAddr) -> Option<Place> {
    let wanted = match local {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    // Only a fork leaves it locked for long.
    let mut known = known.try_lock().ok();
    if let Some(known) = &mut known
        && let Some(at) = known.iter().position(|(address, _)| *address == local)
    {
        let place = &known[at].1;
        let port = class.join(&place.device).join("ports").join(place.port.to_string());
        if entry(&port, &place.index.to_string(), wanted) == Some(place.routable) {
            return Some(place.clone());
        }
        known.swap_remove(at);
    }
    let place = search(class, wanted)?;
    if let Some(known) = &mut known {
        if known.len() == MOST_KNOWN {
            known.clear();
        }
        known.push((local, place.clone()));
    }
    Some(place)
}

fn search(class: &Path, wanted: Ipv6Addr) -> Option<Place> {
    let mut found: Option<Place> = None;
    for device in names(class) {
        for port in names(&class.join(&device).join("ports")) {
            let folder = class.join(&device).join("ports").join(&port);
            for index in names(&folder.join("gids")) {
                let Some(routable) = entry(&folder, &index, wanted) else { continue };
                let (Ok(number), Ok(index)) = (port.parse(), index.parse()) else { continue };
                if found.as_ref().is_none_or(|found| routable && !found.routable) {
                    let gid = wanted.octets();
                    found = Some(Place { device: device.clone(), port: number, index, gid, routable });
                }
            }
        }
    }
    found
}

/// Whether the entry at `index` in the GID table of `port` is one for RoCE v2, if it is `wanted`.
fn entry(port: &Path, index: &str, wanted: Ipv6Addr) -> Option<bool> {
    let read = |folder: &str| fs::read_to_string(port.join(folder).join(index)).unwrap_or_default();
    (read("gids").trim().parse() == Ok(wanted)).then(|| read("gid_attrs/types").trim() == "RoCE v2")
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// An open device. Never closed: connections come again, and those that were made on one that has been removed since still
/// refer to it.
#[derive(Debug)]
pub(super) struct Device {
    name: String,
    /// Inode of its folder in sysfs: another device of the same name has another.
    folder: u64,
    /// The process that opened it: a fork must not use it.
    process: u32,
    pub(super) context: *mut Context,
    fds: [AtomicI32; 2],
}

// SAFETY: verbs may be called from any thread (ibv_open_device(3) and the library's documentation of thread safety).
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

/// Locked while libibverbs is loaded, and while a device is opened: by the shim with signals blocked, and before all of its own locks, which
/// hooks need that run inside.
static OPEN: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

/// In a forked child: [`OPEN`], or a lock of libibverbs or the loader, may be that of a thread that it does not have.
static OVERTAKEN: AtomicBool = AtomicBool::new(false);

/// While there is one, nobody opens a device.
#[derive(Debug)]
pub struct Quiet(#[expect(dead_code, reason = "held")] MutexGuard<'static, Vec<&'static Device>>);

/// Before a fork, which must not overtake a thread that opens a device: waits for it, but not for long. It may itself wait for something
/// that the forking thread has, such as the loader's lock in an initializer that forks. Only one thread at a time.
pub fn quiesce() -> Option<Quiet> {
    lock_until(&OPEN, Instant::now() + PATIENCE).map(Quiet)
}

/// In a forked child, if [`quiesce`] had no time: no device can be opened any more.
pub fn overtaken() {
    OVERTAKEN.store(true, Ordering::Relaxed);
}

/// The descriptors of devices that this process has opened.
pub fn internal_fds() -> Vec<i32> {
    let Ok(open) = OPEN.try_lock() else { return Vec::new() };
    let devices = open.iter().flat_map(|device| device.fds.iter().map(|fd| fd.load(Ordering::Relaxed)));
    devices.chain(queue::kept_fds()).collect()
}

impl Device {
    /// Opens the device of this name, or finds it open. One that was removed does not come back: another of its name is
    /// opened anew.
    pub(super) fn open(name: &str) -> Result<&'static Self, Reason> {
        if OVERTAKEN.load(Ordering::Relaxed) {
            return Err(Reason::NoDevice);
        }
        let mut open = OPEN.lock().map_err(|_| Reason::NoDevice)?;
        // Before it is opened: if another comes in between, that is found out the next time.
        let folder = fs::metadata(Path::new(CLASS).join(name)).map_err(|_| Reason::NoDevice)?.ino();
        let known = |device: &&&Self| {
            device.name == name && device.folder == folder && device.process == process::id()
        };
        if let Some(device) = open.iter().find(known) {
            return Ok(device);
        }
        let verbs = Verbs::get().ok_or(Reason::NoVerbs)?;
        if library_would_warn() {
            return Err(Reason::MemLock);
        }
        let context = open_by_name(verbs, name).ok_or(Reason::NoDevice)?;
        // SAFETY: a context that was just opened, and nobody else knows of it.
        let Ok(fds) = (unsafe { move_away(&mut *context) }) else {
            // SAFETY: as above, and nobody will.
            unsafe { (verbs.close_device)(context) };
            return Err(Reason::NoFds);
        };
        let device: &'static Self = Box::leak(Box::new(Self {
            name: name.to_owned(),
            folder,
            process: process::id(),
            context,
            fds: fds.map(AtomicI32::new),
        }));
        open.push(device);
        Ok(device)
    }

    /// The active MTU of a port that is up (`enum ibv_mtu`).
    pub(super) fn mtu(&self, port: u8) -> Result<u32, Reason> {
        let verbs = Verbs::get().ok_or(Reason::NoVerbs)?;
        let mut attributes = PortAttributes::default();
        // SAFETY: an open device; the room is larger than any version's structure.
        let failed = unsafe { (verbs.query_port)(self.context, port, &raw mut attributes) };
        if failed != 0 || attributes.state != ffi::PORT_ACTIVE {
            return Err(Reason::PortDown);
        }
        Ok(attributes.active_mtu)
    }
}

/// Whether libibverbs would write to standard error, which is the program's, that little memory may be locked: for users
/// but root, up to 32 KiB (`check_memlock_limit` of rdma-core). That is less than the smallest ring needs.
fn library_would_warn() -> bool {
    let limit = rustix::process::getrlimit(rustix::process::Resource::Memlock).current;
    !rustix::process::geteuid().is_root() && limit.is_some_and(|limit| limit <= 32 << 10)
}

fn open_by_name(verbs: &Verbs, name: &str) -> Option<*mut Context> {
    let mut count = 0;
    // SAFETY: the count is writable.
    let list = unsafe { (verbs.get_device_list)(&raw mut count) };
    if list.is_null() {
        return None;
    }
    let mut context = std::ptr::null_mut();
    for index in 0..usize::try_from(count).unwrap_or(0) {
        // SAFETY: the list has `count` entries.
        let entry = unsafe { list.add(index) };
        // SAFETY: as above.
        let device = unsafe { *entry };
        // SAFETY: an entry of the list.
        if unsafe { verbs.name_of(device) }.as_deref() == Some(name) {
            // SAFETY: as above.
            context = unsafe { (verbs.open_device)(device) };
            break;
        }
    }
    // SAFETY: devices that are open stay open.
    unsafe { (verbs.free_device_list)(list) };
    (!context.is_null()).then_some(context)
}

/// Moves the device's descriptors out of the application's way: it may count on the lowest free numbers. If there is no other number, the
/// context has still what it had, and can be closed.
fn move_away(context: &mut Context) -> Result<[i32; 2], Errno> {
    for fd in [&mut context.cmd_fd, &mut context.async_fd] {
        if *fd >= 0 {
            // SAFETY: open, and only this context uses it.
            let copy = rustix::io::fcntl_dupfd_cloexec(unsafe { BorrowedFd::borrow_raw(*fd) }, 0)?;
            let moved: Result<OwnedFd, Errno> = (settings().place)(copy);
            let before = std::mem::replace(fd, moved?.into_raw_fd());
            // SAFETY: the library's own descriptor, which nobody refers to any more.
            drop(unsafe { OwnedFd::from_raw_fd(before) });
        }
    }
    Ok([context.cmd_fd, context.async_fd])
}

/// The port that has a connection's local address, and for an iWARP device what connects its queue pairs.
pub(super) fn of_connection(local: SocketAddr) -> Result<(Place, &'static Device, Option<Meeting>), Reason> {
    let (place, meeting) = match find(local.ip().to_canonical()) {
        Some(place) => (place, None),
        // Their GIDs hold no addresses.
        None if manager::has_device() => {
            let (meeting, device, port) = Meeting::bind(local)?;
            (Place { device, port, index: 0, gid: [0; 16], routable: false }, Some(meeting))
        }
        None => return Err(Reason::NoDevice),
    };
    let device = Device::open(&place.device)?;
    Ok((place, device, meeting))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    const ADDRESS: &str = "::ffff:10.0.0.1";

    /// Makes entry `index` of the table of `device`'s only port.
    fn write(class: &Path, device: &str, index: u8, gid: &str, kind: &str) {
        let port = class.join(device).join("ports/1");
        for (folder, text) in [("gids", gid), ("gid_attrs/types", kind)] {
            fs::create_dir_all(port.join(folder)).unwrap();
            fs::write(port.join(folder).join(index.to_string()), format!("{text}\n")).unwrap();
        }
    }

    #[test]
    fn a_device_whose_descriptors_cannot_be_moved_keeps_them() {
        let [first, second] = [(); 2].map(|()| File::open("/dev/null").unwrap().into_raw_fd());
        let mut context = ffi::fake::descriptors(first, 1 << 30);
        assert_eq!(move_away(&mut context), Err(Errno::BADF));
        assert_eq!(context.async_fd, 1 << 30, "for the library to close");
        assert!(context.cmd_fd >= 0 && context.cmd_fd != second);
        context.async_fd = second;
        let fds = move_away(&mut context).unwrap();
        assert_eq!(fds, [context.cmd_fd, context.async_fd]);
        for fd in fds {
            // SAFETY: open, and nobody else's.
            drop(unsafe { OwnedFd::from_raw_fd(fd) });
        }
    }

    #[test]
    fn an_address_is_looked_for_where_it_was_and_then_everywhere() {
        let class = std::env::temp_dir().join(format!("thallus-gids-{}", std::process::id()));
        let known = Mutex::new(Vec::new());
        let find = || {
            let place = find_in(&class, &known, "10.0.0.1".parse().unwrap())?;
            Some((place.device, place.index, place.routable))
        };
        assert_eq!(find(), None);
        write(&class, "b", 0, "fe80::1", "RoCE v2");
        write(&class, "b", 1, ADDRESS, "IB/RoCE v1");
        write(&class, "b", 2, ADDRESS, "RoCE v2");
        assert_eq!(find(), Some(("b".to_owned(), 2, true)));
        // A search would find this first.
        write(&class, "a", 7, ADDRESS, "RoCE v2");
        assert_eq!(find(), Some(("b".to_owned(), 2, true)));
        write(&class, "b", 2, "::", "");
        assert_eq!(find(), Some(("a".to_owned(), 7, true)));
        fs::remove_dir_all(class.join("a")).unwrap();
        assert_eq!(find(), Some(("b".to_owned(), 1, false)));
        fs::remove_dir_all(&class).unwrap();
        assert_eq!(find(), None);
    }
}
