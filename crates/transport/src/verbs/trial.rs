//! What a connection would get from this fabric, really tried, for whoever asks why it stays on TCP (`thallus doctor`).

use std::error::Error;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use libloading::Library;

use super::board::{BOARD_BYTES, FIGURES_BYTES, STAGE_BYTES};
use super::device::{Device, Place};
use super::link::Link;
use crate::arena::Role;
use crate::reason::Reason;
use crate::segment::{Greeting, Segment};

/// The library that the fabric needs.
pub const LIBRARY: &str = "libibverbs.so.1";

/// What one connection would get.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Trial {
    /// Where its queue pair would be.
    pub place: Place,
    /// Whether the device is iWARP: then the place names no GID.
    pub is_iwarp: bool,
    /// Bytes of its incoming ring, as much as may be locked.
    pub ring: u32,
}

/// Makes what a connection from `local` makes before it says HELLO, and lets go of it. Nothing is sent.
pub fn attempt(local: IpAddr) -> Result<Trial, Reason> {
    Segment::create_alone(Role::Client, Greeting::OwesHello).map_err(|_| Reason::NoMemory)?;
    let link = Link::create(SocketAddr::new(local, 0))?;
    Ok(Trial { place: link.port().clone(), is_iwarp: link.needs_manager(), ring: link.introduction().1.ring })
}

/// Active MTU in bytes of a port that is up.
pub fn mtu(device: &str, port: u8) -> Result<u32, Reason> {
    // enum ibv_mtu: 1 is 256 bytes, and each next one twice as many.
    Ok(128 << Device::open(device)?.mtu(port)?.min(16))
}

/// Bytes that a connection with rings of this size locks.
pub fn locked_bytes(ring: u64) -> u64 {
    FIGURES_BYTES + BOARD_BYTES + ring + STAGE_BYTES + ring
}

/// Loads rdma-core's libraries as the fabric does: each name, and its file or what the loader says. They stay loaded.
pub fn load_libraries() -> [(&'static str, Result<PathBuf, String>); 2] {
    [LIBRARY, "librdmacm.so.1"].map(|name| (name, load(name)))
}

fn load(name: &str) -> Result<PathBuf, String> {
    // SAFETY: the initializers of rdma-core's libraries, which are all that this is called for, have no preconditions.
    let library = unsafe { Library::new(name) }.map_err(|error| match error.source() {
        Some(loader) => loader.to_string(),
        None => error.to_string(),
    })?;
    std::mem::forget(library);
    let stem = name.strip_suffix("1").unwrap_or(name);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let mut files = maps.lines().filter_map(|line| line.get(line.find('/')?..));
    let file = files.find(|path| path.rsplit('/').next().is_some_and(|file| file.starts_with(stem)));
    Ok(PathBuf::from(file.unwrap_or(name)))
}
