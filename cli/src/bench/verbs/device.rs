//! A device and its link, as sysfs tells of them (Documentation/ABI/stable/sysfs-class-infiniband in Linux).

use std::fs;
use std::net::{IpAddr, Ipv6Addr};
use std::path::Path;

use anyhow::ensure;
use serde::{Deserialize, Serialize};
use thallus_transport::reason::Reason;
use thallus_transport::verbs::probe::Wire;
use thallus_transport::verbs::trial;

const CLASS: &str = "/sys/class/infiniband";

/// Whatever can't be read is called unknown.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Device {
    pub(super) name: String,
    pub(super) port: u8,
    /// Of the connection; for iWARP it says nothing.
    pub(super) gid: Ipv6Addr,
    /// InfiniBand or Ethernet.
    pub(super) link_layer: String,
    /// As the kernel names it, such as `100 Gb/sec (4X EDR)`.
    pub(super) rate: String,
    pub(super) mtu_bytes: Option<u32>,
    pub(super) firmware: String,
    /// Driver of the card; none for one made of software.
    pub(super) driver: Option<String>,
    /// Bytes that a work request may carry, as was granted here.
    pub(super) inline_bytes: usize,
}

impl Device {
    pub(super) fn of(wire: &Wire) -> Self {
        let place = wire.port();
        let device = Path::new(CLASS).join(&place.device);
        let port = device.join("ports").join(place.port.to_string());
        let driver = fs::read_link(device.join("device/driver")).ok();
        Self {
            name: place.device.clone(),
            port: place.port,
            gid: place.gid.into(),
            link_layer: read(&port.join("link_layer")),
            rate: read(&port.join("rate")),
            mtu_bytes: trial::mtu(&place.device, place.port).ok(),
            firmware: read(&device.join("fw_ver")),
            driver: driver.and_then(|path| Some(path.file_name()?.to_str()?.to_owned())),
            inline_bytes: wire.inline_limit(),
        }
    }
}

impl std::fmt::Display for Device {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { name, port, link_layer, rate, firmware, inline_bytes, .. } = self;
        let driver = self.driver.as_deref().unwrap_or("made of software");
        let mtu = self.mtu_bytes.map_or("unknown".to_owned(), |bytes| bytes.to_string());
        write!(
            out,
            "{name} ({driver}, firmware {firmware}), port {port}: {link_layer}, {rate}, MTU {mtu}, \
             inline up to {inline_bytes} bytes"
        )
    }
}

fn read(path: &Path) -> String {
    match fs::read_to_string(path) {
        Ok(text) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "unknown".to_owned(),
    }
}

/// # Errors
/// This machine has no RDMA: what is missing.
pub(super) fn require() -> anyhow::Result<()> {
    let [(name, library), _] = trial::load_libraries();
    if let Err(error) = library {
        anyhow::bail!("no {name} here ({error}): apt install libibverbs1 ibverbs-providers");
    }
    let has_one = fs::read_dir(CLASS).is_ok_and(|mut entries| entries.next().is_some());
    ensure!(has_one, "there is no RDMA device on this host; thallus doctor tells what it looked for");
    Ok(())
}

/// What to say if no queue pair can be made for a connection from `local`.
pub(super) fn refusal(reason: Reason, local: IpAddr) -> String {
    let what = match reason {
        Reason::NoDevice => "no RDMA port has the address",
        Reason::PortDown => "the RDMA port is down that has the address",
        Reason::MemLock => "too little memory may be locked (RLIMIT_MEMLOCK) for RDMA from",
        _ => "no queue pair can be made for the address",
    };
    format!("{what} {local} ({reason}); thallus doctor tells more")
}
