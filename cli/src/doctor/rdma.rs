//! What RDMA needs: the libraries, the devices with their ports and GIDs, and memory that may be locked.
//!
//! Devices are read from sysfs (Documentation/ABI/stable/sysfs-class-infiniband in Linux). Whether one can be used is
//! tried: a queue pair is made on it and let go.

use std::collections::BTreeMap;
use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::{Path, PathBuf};

use rustix::fs::Access;
use serde::Serialize;
use thallus_transport::reason::Reason;
use thallus_transport::settings::Settings;
use thallus_transport::verbs::trial::{self, Trial};

use super::machine::Limits;
use super::sheet::Sheet;
use super::{Problem, bytes};

const CLASS: &str = "/sys/class/infiniband";
const NODES: &str = "/sys/class/infiniband_verbs";

/// What there is for RDMA.
#[derive(Debug, Serialize)]
pub(super) struct Rdma {
    libraries: Vec<Library>,
    devices: Vec<Device>,
    /// What one connection would like to lock; less gives it smaller rings.
    locked_bytes_wanted: u64,
    /// With the smallest rings.
    locked_bytes_needed: u64,
}

#[derive(Debug, Serialize)]
struct Library {
    name: &'static str,
    path: Option<PathBuf>,
    error: Option<String>,
    /// Whether this version of Thallus uses it.
    used: bool,
}

#[derive(Debug, Serialize)]
struct Device {
    name: String,
    /// roce, infiniband or iwarp, by node type and link layer.
    transport: &'static str,
    /// Kernel driver of the device behind it; null for one made of software.
    driver: Option<String>,
    /// The device file, /dev/infiniband/uverbsN.
    node: Option<PathBuf>,
    /// Whether this process may open the device file.
    node_accessible: bool,
    ports: Vec<Port>,
}

#[derive(Debug, Serialize)]
struct Port {
    number: u8,
    /// As the kernel names it, such as ACTIVE or DOWN.
    state: String,
    link_layer: String,
    /// Active MTU; null if the port is not usable.
    mtu_bytes: Option<u32>,
    gids: Vec<Gid>,
}

#[derive(Debug, Serialize)]
struct Gid {
    index: u8,
    gid: Ipv6Addr,
    /// roce_v1, roce_v2, infiniband or iwarp.
    kind: &'static str,
    /// The address that the GID is made of: with RoCE, one of the network interface.
    address: Option<IpAddr>,
    interface: Option<String>,
    /// Whether a connection from this address would use this entry.
    used: bool,
    /// Ring that a connection would get, in bytes.
    ring_bytes: Option<u32>,
    /// Why it would get none: a name as `thallus status` shows it.
    reason: Option<&'static str>,
}

/// Looks for libraries and devices.
pub(super) fn look(settings: &Settings, limits: &Limits, problems: &mut Vec<Problem>) -> Rdma {
    let mut complain = |text: String, remedy: &str| problems.push(Problem::new("rdma", text, remedy));
    let libraries = trial::load_libraries().map(|(name, found)| {
        let used = name == trial::LIBRARY;
        let (path, error) = match found {
            Ok(path) => (Some(path), None),
            Err(error) => (None, Some(error)),
        };
        Library { name, path, error, used }
    });
    if let Some(missing) = libraries.iter().find(|library| library.used && library.path.is_none()) {
        complain(
            format!(
                "{} (connections show {})",
                missing.error.as_deref().unwrap_or_default(),
                Reason::NoVerbs
            ),
            "only needed between hosts: apt install libibverbs1 ibverbs-providers",
        );
    }
    let has_library = libraries.iter().any(|library| library.used && library.path.is_some());
    let names = entries(Path::new(CLASS));
    if names.is_empty() && has_library {
        complain(
            format!("no RDMA device (connections show {})", Reason::NoDevice),
            "only needed between hosts: a network card with RoCE and its driver, or for tests soft-RoCE \
             (rdma link add rxe0 type rxe netdev eth0)",
        );
    }
    let mut trials = BTreeMap::new();
    let devices: Vec<_> = names.into_iter().map(|name| device(name, &mut trials, &mut complain)).collect();

    let wanted = settings.verbs.rings().next().unwrap_or(0);
    let smallest = settings.verbs.rings().last().unwrap_or(0);
    let is_short = |trial: &Result<Trial, Reason>| match trial {
        Ok(trial) => u64::from(trial.ring) < wanted,
        Err(reason) => *reason == Reason::MemLock,
    };
    // What one address tells of memory holds for all.
    let short = trials.iter().find(|(_, trial)| is_short(trial));
    let others = trials.iter().filter(|(_, trial)| !is_short(trial));
    for (address, trial) in short.into_iter().chain(others) {
        match trial {
            Err(Reason::MemLock) => complain(
                format!(
                    "RLIMIT_MEMLOCK is {}; a connection from {address} locks {}, and at least {} (connections show {})",
                    limits.locked_memory.soft.map_or("none".into(), bytes),
                    bytes(trial::locked_bytes(wanted)),
                    bytes(trial::locked_bytes(smallest)),
                    Reason::MemLock,
                ),
                MEMLOCK,
            ),
            Ok(Trial { ring, .. }) if u64::from(*ring) < wanted => complain(
                format!(
                    "not enough memory may be locked: rings of {} instead of {}",
                    bytes((*ring).into()),
                    bytes(wanted)
                ),
                MEMLOCK,
            ),
            // Told with the port, or the library.
            Ok(_) | Err(Reason::PortDown | Reason::NoVerbs) => {}
            Err(_) if devices.iter().any(|device: &Device| !device.node_accessible) => {}
            Err(reason) => complain(
                format!(
                    "no queue pair can be made on the device that has {address} (connections show {reason})"
                ),
                "the device's driver for libibverbs (apt install ibverbs-providers), access to its device file",
            ),
        }
    }
    Rdma {
        libraries: libraries.into(),
        devices,
        locked_bytes_wanted: trial::locked_bytes(wanted),
        locked_bytes_needed: trial::locked_bytes(smallest),
    }
}

/// The kernel's connection manager.
const MANAGER: &str = "/dev/infiniband/rdma_cm";

const MEMLOCK: &str = "ulimit -l unlimited (as root, or in /etc/security/limits.conf), systemd LimitMEMLOCK=infinity, \
                       docker run --ulimit memlock=-1; or smaller rings: THALLUS_RING=16K";

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default().trim().to_owned()
}

fn entries(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<_> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    // uverbs2 before uverbs10.
    names.sort_by_key(|name| (name.len(), name.clone()));
    names
}

type Trials = BTreeMap<IpAddr, Result<Trial, Reason>>;

fn device(name: String, trials: &mut Trials, complain: &mut impl FnMut(String, &str)) -> Device {
    let folder = Path::new(CLASS).join(&name);
    let node = entries(Path::new(NODES))
        .into_iter()
        .find(|node| read(Path::new(NODES).join(node).join("ibdev")) == name)
        .map(|node| Path::new("/dev/infiniband").join(node));
    let access = |path: &PathBuf| rustix::fs::access(path, Access::READ_OK | Access::WRITE_OK);
    let node_accessible = match node.as_ref().map(access) {
        Some(Ok(())) => true,
        Some(Err(errno)) => {
            let path = node.as_ref().map(|path| path.display().to_string()).unwrap_or_default();
            complain(
                format!(
                    "{name}: {path}: {} (connections show {})",
                    std::io::Error::from(errno),
                    Reason::NoDevice
                ),
                "give the process the file: docker run --device /dev/infiniband, or its group or mode by udev",
            );
            false
        }
        None => {
            complain(
                format!("{name}: no device file (connections show {})", Reason::NoDevice),
                "modprobe ib_uverbs",
            );
            false
        }
    };
    let is_iwarp = read(folder.join("node_type")).ends_with("RNIC");
    let numbers = entries(&folder.join("ports"));
    let ports: Vec<_> = numbers
        .iter()
        .filter_map(|number| number.parse().ok())
        .map(|number| port(&name, number, is_iwarp, trials, complain))
        .collect();
    let transport = match ports.first() {
        _ if is_iwarp => "iwarp",
        Some(port) if port.link_layer == "InfiniBand" => "infiniband",
        _ => "roce",
    };
    if is_iwarp && let Err(errno) = access(&PathBuf::from(MANAGER)) {
        let error = std::io::Error::from(errno);
        complain(
            format!("{name}: iWARP needs {MANAGER}: {error} (connections show {})", Reason::NoDevice),
            "modprobe rdma_ucm, and give the process the file",
        );
    }
    let driver = fs::read_link(folder.join("device/driver")).ok();
    let driver = driver.and_then(|path| path.file_name()?.to_str().map(str::to_owned));
    Device { name, transport, driver, node, node_accessible, ports }
}

fn port(
    device: &str,
    number: u8,
    is_iwarp: bool,
    trials: &mut Trials,
    complain: &mut impl FnMut(String, &str),
) -> Port {
    let folder = Path::new(CLASS).join(device).join("ports").join(number.to_string());
    let state = read(folder.join("state"));
    // "4: ACTIVE"
    let state = state.rsplit(": ").next().unwrap_or_default().to_owned();
    let link_layer = read(folder.join("link_layer"));
    if state != "ACTIVE" {
        complain(
            format!("{device} port {number} is {state} (connections show {})", Reason::PortDown),
            "bring its network interface up (ip link set DEVICE up), check cable and switch",
        );
    }
    let gids = entries(&folder.join("gids")).into_iter().filter_map(|index| {
        let gid: Ipv6Addr = read(folder.join("gids").join(&index)).parse().ok()?;
        if gid.is_unspecified() {
            return None;
        }
        let kind = match read(folder.join("gid_attrs/types").join(&index)).as_str() {
            _ if is_iwarp => "iwarp",
            _ if link_layer == "InfiniBand" => "infiniband",
            "RoCE v2" => "roce_v2",
            _ => "roce_v1",
        };
        let address = kind.starts_with("roce").then(|| IpAddr::V6(gid).to_canonical());
        let interface = Some(read(folder.join("gid_attrs/ndevs").join(&index)));
        let index = index.parse().ok()?;
        let mut entry = Gid {
            index,
            gid,
            kind,
            address,
            interface: interface.filter(|name| !name.is_empty()),
            used: false,
            ring_bytes: None,
            reason: None,
        };
        let Some(address) = address else {
            // Connections look for the GID that is their local address.
            entry.reason = Some(Reason::NoDevice.name());
            return Some(entry);
        };
        let place = thallus_transport::verbs::device::find(address);
        entry.used = place
            .is_some_and(|place| (place.device.as_str(), place.port, place.index) == (device, number, index));
        if entry.used {
            match trials.entry(address).or_insert_with(|| trial::attempt(address)) {
                Ok(trial) => entry.ring_bytes = Some(trial.ring),
                Err(reason) => entry.reason = Some(reason.name()),
            }
        }
        Some(entry)
    });
    let gids = gids.collect();
    Port { number, state, link_layer, mtu_bytes: trial::mtu(device, number).ok(), gids }
}

impl Rdma {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        for library in &self.libraries {
            let path = library.path.as_ref().map_or("not found".into(), |path| path.display().to_string());
            let note = if library.used { "" } else { " (not used by this version)" };
            sheet.fact(library.name, format!("{path}{note}"));
        }
        if self.devices.is_empty() {
            sheet.fact("devices", "none");
        }
        for device in &self.devices {
            let transport = match device.transport {
                "roce" => "RoCE",
                "infiniband" => "InfiniBand",
                _ => "iWARP",
            };
            let driver = device.driver.as_ref().map_or(String::new(), |driver| format!(", driver {driver}"));
            let node = device.node.as_ref().map_or("no device file".into(), |node| {
                let access = if device.node_accessible { "accessible" } else { "not accessible" };
                format!("{} {access}", node.display())
            });
            sheet.fact(&device.name, format!("{transport}{driver}, {node}"));
            for port in &device.ports {
                let mtu = port.mtu_bytes.map_or("unknown".into(), |mtu| mtu.to_string());
                let text = format!("{}, {}, MTU {mtu}", port.state, port.link_layer);
                sheet.fact(&format!("  port {}", port.number), text);
                for gid in &port.gids {
                    sheet.fact(&format!("    GID {}", gid.index), gid.text());
                }
            }
        }
        sheet.fact(
            "memory to lock",
            format!(
                "{} for each connection, at least {}",
                bytes(self.locked_bytes_wanted),
                bytes(self.locked_bytes_needed)
            ),
        );
    }
}

/// How people write what a GID is for.
pub(super) fn kind_name(kind: &str) -> &'static str {
    match kind {
        "roce_v1" => "RoCE v1",
        "roce_v2" => "RoCE v2",
        "infiniband" => "InfiniBand",
        _ => "iWARP",
    }
}

impl Gid {
    fn text(&self) -> String {
        let mut text = format!("{}, {}", self.gid, kind_name(self.kind));
        if let Some(address) = self.address {
            text += &format!(", {address}");
        }
        if let Some(interface) = &self.interface {
            text += &format!(" on {interface}");
        }
        text + &match (self.ring_bytes, self.reason) {
            (Some(ring), _) => format!(": usable, rings of {}", bytes(ring.into())),
            (None, Some(reason)) => format!(": {reason}"),
            (None, None) => ": another entry has the same address".into(),
        }
    }
}
