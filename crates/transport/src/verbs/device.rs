//! Which device and port reach a connection's peer: the one that has the connection's local address.

use std::fs;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use rustix::io::Errno;

use super::ffi::{self, Context, PortAttributes, Verbs};
use super::manager::{self, Meeting};
use super::queue;
use crate::process;
use crate::reason::Reason;
use crate::settings::settings;

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

/// Where the port's GID table says `local`; an entry for RoCE v2 if there is one.
pub fn find(local: IpAddr) -> Option<Place> {
    let wanted = match local {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    };
    let mut found: Option<Place> = None;
    for device in names(Path::new(CLASS)) {
        for port in names(&Path::new(CLASS).join(&device).join("ports")) {
            let folder = Path::new(CLASS).join(&device).join("ports").join(&port);
            for index in names(&folder.join("gids")) {
                let read = |path: &Path| fs::read_to_string(path).unwrap_or_default();
                let gid = read(&folder.join("gids").join(&index)).trim().parse::<Ipv6Addr>();
                if gid != Ok(wanted) {
                    continue;
                }
                let (Ok(number), Ok(index_)) = (port.parse(), index.parse()) else { continue };
                let routable = read(&folder.join("gid_attrs/types").join(&index)).trim() == "RoCE v2";
                let place = Place {
                    device: device.clone(),
                    port: number,
                    index: index_,
                    gid: wanted.octets(),
                    routable,
                };
                if found.as_ref().is_none_or(|found| place.routable && !found.routable) {
                    found = Some(place);
                }
            }
        }
    }
    found
}

fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort_unstable();
    names
}

/// An open device. Never closed: connections come again.
#[derive(Debug)]
pub(super) struct Device {
    name: String,
    /// The process that opened it: a fork must not use it.
    process: u32,
    pub(super) context: *mut Context,
    fds: [AtomicI32; 2],
}

// SAFETY: verbs may be called from any thread (ibv_open_device(3) and the library's documentation of thread safety).
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

static OPEN: Mutex<Vec<&'static Device>> = Mutex::new(Vec::new());

/// The descriptors of devices that this process has opened.
pub fn internal_fds() -> Vec<i32> {
    let Ok(open) = OPEN.try_lock() else { return Vec::new() };
    let devices = open.iter().flat_map(|device| device.fds.iter().map(|fd| fd.load(Ordering::Relaxed)));
    devices.chain(queue::kept_fds()).collect()
}

impl Device {
    /// Opens the device of this name, or finds it open.
    pub(super) fn open(name: &str) -> Result<&'static Self, Reason> {
        let mut open = OPEN.lock().map_err(|_| Reason::NoDevice)?;
        let known = |device: &&&Self| device.name == name && device.process == process::id();
        if let Some(device) = open.iter().find(known) {
            return Ok(device);
        }
        let verbs = Verbs::get().ok_or(Reason::NoVerbs)?;
        if library_would_warn() {
            return Err(Reason::MemLock);
        }
        let context = open_by_name(verbs, name).ok_or(Reason::NoDevice)?;
        let device: &'static Self = Box::leak(Box::new(Self {
            name: name.to_owned(),
            process: process::id(),
            context,
            // SAFETY: a context that was just opened, and nobody else knows of it.
            fds: unsafe { move_away(&mut *context) }.map(AtomicI32::new),
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

/// Moves the device's descriptors out of the application's way: it may count on the lowest free numbers.
fn move_away(context: &mut Context) -> [i32; 2] {
    for fd in [&mut context.cmd_fd, &mut context.async_fd] {
        if *fd >= 0 {
            // SAFETY: the library's own descriptor, which only this context uses.
            let owned = unsafe { OwnedFd::from_raw_fd(*fd) };
            let moved: Result<OwnedFd, Errno> = (settings().place)(owned);
            // Without a free number it is closed; then the device can't be used, which every call will say.
            *fd = moved.map_or(-1, IntoRawFd::into_raw_fd);
        }
    }
    [context.cmd_fd, context.async_fd]
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
