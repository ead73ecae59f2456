//! What a connection to a server would use, and why. Nothing is sent to the server's host.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use nix::ifaddrs::{InterfaceAddress, getifaddrs};
use serde::Serialize;
use thallus_transport::peers::same_host;
use thallus_transport::process;
use thallus_transport::reason::Reason;
use thallus_transport::rendezvous::{self, Service};
use thallus_transport::settings::Settings;
use thallus_transport::verbs::{device, trial};

use super::one_host::OneHost;
use super::sheet::Sheet;
use super::{Problem, yes_or_no};

/// A server to ask about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    host: String,
    port: u16,
}

impl Target {
    /// `name:port`, `1.2.3.4:port` or `[::1]:port`.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (host, port) = text.rsplit_once(':').ok_or("a host and a port, such as db:5432")?;
        let port = port.parse().ok().filter(|&port| port != 0).ok_or(format!("{port:?} is no port"))?;
        let host = match host.strip_prefix('[') {
            Some(rest) => rest.strip_suffix(']').ok_or("a bracket is missing")?,
            None if host.contains(':') => return Err("an IPv6 address needs brackets: [::1]:80".into()),
            None => host,
        };
        if host.is_empty() {
            return Err("the host is missing".into());
        }
        Ok(Self { host: host.to_owned(), port })
    }
}

/// What else decides.
pub(super) struct Around<'a> {
    pub(super) settings: &'a Settings,
    /// The library is switched off.
    pub(super) off: bool,
    /// There is a library that can be preloaded.
    pub(super) library: bool,
    /// The program, if one is named, can have it.
    pub(super) program: bool,
    pub(super) one_host: &'a OneHost,
    /// Greetings are signed.
    pub(super) key: bool,
    /// Rules count for nothing: there is no key where one is asked for.
    pub(super) no_peers: bool,
}

/// A connection to a server.
#[derive(Debug, Serialize)]
pub(super) struct Route {
    /// As it was asked for.
    pub(super) server: String,
    /// Its addresses, in the order in which a program would try them.
    addresses: Vec<Way>,
    /// Why there are none.
    error: Option<String>,
}

/// A connection to one address.
#[derive(Debug, Serialize)]
struct Way {
    address: SocketAddr,
    /// The local address that the kernel would choose; null if there is no route.
    local: Option<IpAddr>,
    /// Whether the address is one of this network namespace's own.
    on_this_host: bool,
    /// On this host: whether anybody listens at the address, or at all of them.
    listening: Option<bool>,
    /// None of these has an id of its own in this user namespace.
    #[serde(skip)]
    stranger: bool,
    /// On this host: whether a process with the library has announced the port.
    announced: Option<bool>,
    /// Whether `THALLUS_PORTS` has the port.
    port_selected: bool,
    /// The rule of `THALLUS_PEERS` that names the server.
    rule: Option<String>,
    /// RDMA port that has the local address.
    device: Option<Device>,
    conclusion: Conclusion,
}

#[derive(Clone, Debug, Serialize)]
struct Device {
    name: String,
    port: u8,
    /// Null where GIDs hold no addresses: iWARP.
    gid_index: Option<u8>,
    gid: Option<Ipv6Addr>,
    kind: &'static str,
}

impl Device {
    fn text(&self) -> String {
        let Self { name, port, gid_index, gid, kind } = self;
        let kind = super::rdma::kind_name(kind);
        match (gid_index, gid) {
            (Some(index), Some(gid)) => format!("{name} port {port}, GID {index}, {gid}, {kind}"),
            _ => format!("{name} port {port}, {kind}"),
        }
    }
}

/// What carries the bytes.
#[derive(Debug, Serialize)]
struct Conclusion {
    /// shm, verbs or tcp; null if nothing gets there.
    fabric: Option<&'static str>,
    /// With tcp: a name as `thallus status` shows it; null if there would be no library to show one.
    reason: Option<&'static str>,
    /// In words.
    text: String,
    /// What to do about it, if it is not what was wished for.
    remedy: Option<String>,
}

impl Conclusion {
    fn tcp(reason: Option<Reason>, why: impl AsRef<str>, remedy: impl Into<String>) -> Self {
        let why = why.as_ref();
        let text = match reason {
            Some(reason) => format!("TCP: {why} ({reason})"),
            None => format!("TCP: {why}"),
        };
        Self { fabric: Some("tcp"), reason: reason.map(Reason::name), text, remedy: Some(remedy.into()) }
    }

    fn leaves_tcp(&self) -> bool {
        matches!(self.fabric, Some("shm" | "verbs"))
    }
}

/// Resolves the server and looks at each of its addresses.
pub(super) fn look(target: &Target, around: &Around<'_>, problems: &mut Vec<Problem>) -> Route {
    let mut addresses = Vec::new();
    let mut error = None;
    match (target.host.as_str(), target.port).to_socket_addrs() {
        Ok(list) => {
            for address in list {
                if !addresses.contains(&address) {
                    addresses.push(address);
                }
            }
        }
        Err(failure) => error = Some(failure.to_string()),
    }
    if let Some(error) = &error {
        let text = format!("{} has no address: {error}", target.host);
        problems.push(Problem::new("connection", text, "another name or address"));
    }
    let addresses: Vec<_> = addresses.into_iter().map(|address| Way::find(address, around)).collect();
    let host = if target.host.contains(':') { format!("[{}]", target.host) } else { target.host.clone() };
    Route { server: format!("{host}:{}", target.port), addresses, error }
}

impl Way {
    fn find(address: SocketAddr, around: &Around<'_>) -> Self {
        let settings = around.settings;
        let local = local_address(address);
        let on_this_host = is_own(address.ip())
            || local.as_ref().is_ok_and(|&local| same_host(SocketAddr::new(local, 0), address));
        let port = address.port();
        let rule = settings.verbs.peers.iter().find(|rule| rule.names(address.ip(), port));
        let listeners = on_this_host.then(|| users_listening(address)).flatten();
        let mut way = Self {
            address,
            local: local.as_ref().ok().copied(),
            on_this_host,
            listening: listeners.as_ref().map(|users| !users.is_empty()),
            stranger: listeners
                .is_some_and(|users| !users.is_empty() && !users.into_iter().any(process::is_somebody)),
            announced: on_this_host
                .then(|| {
                    rendezvous::is_announced(
                        Service::Port(port),
                        thallus_transport::settings::settings().place,
                    )
                    .ok()
                })
                .flatten(),
            port_selected: settings.selects(port),
            rule: rule.map(ToString::to_string),
            device: None,
            conclusion: Conclusion { fabric: None, reason: None, text: String::new(), remedy: None },
        };
        way.conclusion = match local {
            Ok(local) => way.conclude(local, around),
            Err(error) => Conclusion {
                text: format!("none: no way to this address: {error}"),
                remedy: Some("a route to it (ip route get ADDRESS)".into()),
                ..way.conclusion
            },
        };
        way
    }

    /// In the order in which a connection decides (`transport::connection`).
    fn conclude(&mut self, local: IpAddr, around: &Around<'_>) -> Conclusion {
        let settings = around.settings;
        let port = self.address.port();
        if !around.library {
            return Conclusion::tcp(
                None,
                "there is no library to preload",
                "install it: see the library above",
            );
        }
        if !around.program {
            return Conclusion::tcp(
                None,
                "the library can't be preloaded into the program",
                "see the program above",
            );
        }
        if around.off {
            return Conclusion::tcp(None, "THALLUS=off", "unset THALLUS, or mode in the configuration");
        }
        if !settings.shm && around.no_peers {
            let why =
                "THALLUS_FABRIC=verbs, and without the key that is asked for no rule of THALLUS_PEERS counts";
            return Conclusion::tcp(Some(Reason::Disabled), why, KEY_TO_MEND);
        }
        if !settings.shm && settings.verbs.peers.is_empty() {
            return Conclusion::tcp(
                Some(Reason::Disabled),
                "THALLUS_FABRIC allows nothing else, or RDMA only and no rule says with whom",
                "unset THALLUS_FABRIC, or set THALLUS_PEERS",
            );
        }
        if !self.port_selected {
            return Conclusion::tcp(
                Some(Reason::NotSelected),
                format!("THALLUS_PORTS does not have port {port}"),
                format!("add {port} to THALLUS_PORTS, on both sides"),
            );
        }
        if settings.verbs.covers(SocketAddr::new(local, 0), self.address, port) {
            return self.by_rdma(local, around);
        }
        if !settings.shm {
            return Conclusion::tcp(
                Some(Reason::Disabled),
                "THALLUS_FABRIC=verbs, and no rule of THALLUS_PEERS names the server",
                self.rule_to_add(),
            );
        }
        if self.on_this_host { self.by_shared_memory(around) } else { self.by_no_rule(around) }
    }

    fn by_rdma(&mut self, local: IpAddr, around: &Around<'_>) -> Conclusion {
        let trial = trial::attempt(local);
        let place = match &trial {
            Ok(trial) => Some((trial.place.clone(), trial.is_iwarp)),
            Err(_) => device::find(local.to_canonical()).map(|place| (place, false)),
        };
        self.device = place.map(|(place, is_iwarp)| Device {
            name: place.device,
            port: place.port,
            gid_index: (!is_iwarp).then_some(place.index),
            gid: (!is_iwarp).then(|| place.gid.into()),
            kind: match place.routable {
                _ if is_iwarp => "iwarp",
                true => "roce_v2",
                false => "roce_v1",
            },
        });
        match (trial, &self.device) {
            (Ok(_), Some(device)) => {
                let key = if around.key { " and the same key" } else { "" };
                let device = device.text();
                let text =
                    format!("RDMA ({device}), if the server runs Thallus with a rule for {local}{key}");
                Conclusion { fabric: Some("verbs"), reason: None, text, remedy: None }
            }
            (_, None) => Conclusion::tcp(
                Some(Reason::NoDevice),
                format!("no RDMA port has the local address {local}"),
                "an RDMA device on that address's network interface, or a route over one that has a device",
            ),
            (Err(reason), Some(_)) => Conclusion::tcp(
                Some(reason),
                format!("RDMA from {local} can't be used"),
                "see RDMA, between hosts, above",
            ),
        }
    }

    fn by_shared_memory(&self, around: &Around<'_>) -> Conclusion {
        if !around.one_host.works {
            return Conclusion::tcp(
                around.one_host.reason.and_then(by_name),
                "this process can't share memory with another",
                "see shared memory, above",
            );
        }
        match (self.announced, self.listening) {
            // Ports are announced, not addresses.
            (_, Some(false)) => Conclusion::tcp(
                Some(Reason::PeerWithoutThallus),
                format!("nobody listens at {} in this network namespace", self.address),
                "start the server with thallus run, in the same network namespace, at that address",
            ),
            (Some(true), _) if self.stranger => Conclusion::tcp(
                Some(Reason::NoAnswer),
                "the listener's user has no id in this user namespace",
                "one user namespace for both (podman: the same --userns and --uidmap; systemd: PrivateUsers=no)",
            ),
            (Some(true), _) => {
                let text =
                    format!("shared memory, once {} calls have been made", around.settings.upgrade_after);
                Conclusion { fabric: Some("shm"), reason: None, text, remedy: None }
            }
            _ => Conclusion::tcp(
                Some(Reason::PeerWithoutThallus),
                "the listener has no Thallus",
                "start the server with thallus run; one that runs already has to be started anew. If it was, its security \
                 profile may forbid the name that announces it (README, AppArmor)",
            ),
        }
    }

    fn by_no_rule(&self, around: &Around<'_>) -> Conclusion {
        let (rules, remedy) = if around.no_peers {
            let rules = "without the key that is asked for no rule of THALLUS_PEERS counts";
            (rules, KEY_TO_MEND.to_owned())
        } else if around.settings.verbs.peers.is_empty() {
            ("THALLUS_PEERS has no rule", self.rule_to_add())
        } else {
            ("no rule of THALLUS_PEERS names it", self.rule_to_add())
        };
        Conclusion::tcp(
            Some(Reason::PeerWithoutThallus),
            format!("the server is on another host, or in another network namespace, and {rules}"),
            format!(
                "if it is a container on this host: one network namespace for both (a pod, or docker run \
                 --network container:NAME); {remedy}"
            ),
        )
    }

    fn rule_to_add(&self) -> String {
        let (ip, port) = (self.address.ip().to_canonical(), self.address.port());
        let rule = if ip.is_ipv6() { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
        format!(
            "if that host runs Thallus and RDMA: THALLUS_PEERS={rule} here, and there a rule for this host"
        )
    }
}

const KEY_TO_MEND: &str = "if that host runs Thallus and RDMA: correct THALLUS_KEY_FILE, see settings, above";

fn by_name(name: &str) -> Option<Reason> {
    Reason::ALL.iter().copied().find(|reason| reason.name() == name)
}

/// The address that the kernel would give to a connection: that of a UDP socket, which sends nothing to connect.
fn local_address(address: SocketAddr) -> std::io::Result<IpAddr> {
    let any: IpAddr = match address {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let socket = UdpSocket::bind((any, 0))?;
    socket.connect(address)?;
    Ok(socket.local_addr()?.ip())
}

/// Whether it is one of this network namespace's. That a socket can be bound to it is no proof (`net.ipv4.ip_nonlocal_bind`).
fn is_own(address: IpAddr) -> bool {
    let address = address.to_canonical();
    let is = |interface: InterfaceAddress| {
        let storage = interface.address?;
        let v4 = storage.as_sockaddr_in().map(|address| IpAddr::from(address.ip()));
        v4.or_else(|| storage.as_sockaddr_in6().map(|address| address.ip().into()))
    };
    address.is_loopback()
        || address.is_unspecified()
        || getifaddrs().is_ok_and(|mut all| all.any(|interface| is(interface) == Some(address)))
}

/// The users of the sockets of this network namespace that listen at the address, or at all (proc_net(5)); `None` without /proc.
fn users_listening(address: SocketAddr) -> Option<Vec<u32>> {
    let tables = ["/proc/self/net/tcp", "/proc/self/net/tcp6"].map(|path| fs::read_to_string(path).ok());
    if tables.iter().all(Option::is_none) {
        return None;
    }
    let lines = tables.iter().flatten().flat_map(|table| table.lines());
    Some(
        lines
            .filter_map(listener)
            .filter(|&(socket, _)| serves(socket, address))
            .map(|(_, user)| user)
            .collect(),
    )
}

/// Where a line of such a table says that somebody listens, and who.
fn listener(line: &str) -> Option<(SocketAddr, u32)> {
    // sl, local_address, rem_address, st, tx_queue:rx_queue, tr:tm->when, retrnsmt, uid
    let mut fields = line.split_whitespace().skip(1);
    let (ip, port) = fields.next()?.split_once(':')?;
    if fields.nth(1) != Some("0A") {
        return None;
    }
    // Words of 32 bits, each as a number of this machine.
    let word = |at: usize| Some(u32::from_str_radix(ip.get(8 * at..8 * at + 8)?, 16).ok()?.to_ne_bytes());
    let ip: IpAddr = match ip.len() {
        8 => word(0)?.into(),
        _ => <[u8; 16]>::try_from([word(0)?, word(1)?, word(2)?, word(3)?].concat()).ok()?.into(),
    };
    let user = fields.nth(3)?.parse().ok()?;
    Some((SocketAddr::new(ip, u16::from_str_radix(port, 16).ok()?), user))
}

/// Whether a socket that listens there gets what is sent to the address. One at `::` may be for IPv6 alone, of which the table says nothing.
fn serves(socket: SocketAddr, address: SocketAddr) -> bool {
    let asked = match address.ip().to_canonical() {
        // Where it leads.
        IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        ip => ip,
    };
    let at = socket.ip().to_canonical();
    let for_all = at.is_unspecified() && (at.is_ipv6() || asked.is_ipv4());
    socket.port() == address.port() && (at == asked || for_all)
}

impl Route {
    /// Whether a connection to the first address, which a program tries first, would leave TCP.
    pub(super) fn leaves_tcp(&self) -> bool {
        self.addresses.first().is_some_and(|way| way.conclusion.leaves_tcp())
    }

    pub(super) fn show(&self, sheet: &mut Sheet) {
        for way in &self.addresses {
            way.show(sheet);
        }
    }
}

impl Way {
    fn show(&self, sheet: &mut Sheet) {
        sheet.fact("address", self.address.ip().to_string());
        if let Some(local) = self.local {
            sheet.fact("local address", local.to_string());
        }
        sheet.fact("on this host", yes_or_no(self.on_this_host));
        if let Some(listening) = self.listening {
            sheet.fact("listener", if listening { "there is one" } else { "none" });
        }
        if let Some(announced) = self.announced {
            sheet.fact("announced by Thallus", yes_or_no(announced));
        }
        sheet.fact("in THALLUS_PORTS", yes_or_no(self.port_selected));
        sheet.fact("rule", self.rule.as_deref().unwrap_or("none"));
        if let Some(device) = &self.device {
            sheet.fact("RDMA port", device.text());
        }
        sheet.fact("conclusion", &*self.conclusion.text);
        if let Some(remedy) = &self.conclusion.remedy {
            sheet.fact("remedy", &**remedy);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn target(host: &str, port: u16) -> Target {
        Target { host: host.into(), port }
    }

    #[test]
    fn a_target_is_a_host_and_a_port() {
        assert_eq!(Target::parse("db:5432"), Ok(target("db", 5432)));
        assert_eq!(Target::parse("10.0.0.1:1"), Ok(target("10.0.0.1", 1)));
        assert_eq!(Target::parse("[::1]:80"), Ok(target("::1", 80)));
        for bad in ["db", "db:", "db:0", "db:65536", ":80", "::1:80", "[::1:80", "[::1]80", ""] {
            assert!(Target::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_listener_serves_its_address_or_all() {
        let row = |local: &str| {
            listener(&format!(
                "   0: {local} 00000000:0000 0A 00000000:00000000 00:00000000 00000000 1000 0 7"
            ))
        };
        let loopback = if cfg!(target_endian = "little") { "0100007F" } else { "7F000001" };
        assert_eq!(row(&format!("{loopback}:1538")), Some(("127.0.0.1:5432".parse().unwrap(), 1000)));
        assert_eq!(row(&format!("{:032}:0050", 0)), Some(("[::]:80".parse().unwrap(), 1000)));
        assert_eq!(listener("  sl  local_address rem_address   st tx_queue"), None);
        assert_eq!(listener(&format!("   0: {loopback}:1538 {loopback}:9999 01 00000000:00000000")), None);
        let serves = |socket: &str, address: &str| serves(socket.parse().unwrap(), address.parse().unwrap());
        for address in ["127.0.0.1:5", "[::ffff:127.0.0.1]:5", "0.0.0.0:5"] {
            assert!(
                serves("127.0.0.1:5", address) && serves("0.0.0.0:5", address) && serves("[::]:5", address)
            );
            assert!(serves("[::ffff:127.0.0.1]:5", address) && !serves("127.0.0.1:6", address));
        }
        assert!(!serves("127.0.0.1:5", "192.0.2.2:5") && !serves("0.0.0.0:5", "[::1]:5"));
        assert!(serves("[::]:5", "[::1]:5") && serves("[::1]:5", "[::]:5"));
    }

    #[test]
    fn the_local_address_of_loopback_is_its_own() {
        assert_eq!(local_address("127.0.0.1:9".parse().unwrap()).unwrap(), Ipv4Addr::LOCALHOST);
        for own in ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1", "0.0.0.0"] {
            assert!(is_own(own.parse().unwrap()), "{own}");
        }
        assert!(!is_own("192.0.2.1".parse().unwrap()));
    }
}
