//! Which other hosts run this library: `THALLUS_PEERS`, a list of `ADDRESS[/BITS][:PORT]`.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// One entry: connections with hosts of this network, to this server port or to any.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rule {
    network: u128,
    bits: u32,
    port: Option<u16>,
}

fn number(address: IpAddr) -> u128 {
    match address {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
    .to_bits()
}

fn prefix(bits: u32) -> u128 {
    u128::MAX.checked_shl(128 - bits).unwrap_or(0)
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let network = Ipv6Addr::from_bits(self.network);
        let (network, bits) = match network.to_ipv4_mapped().filter(|_| self.bits >= 96) {
            Some(v4) => (IpAddr::V4(v4), self.bits - 96),
            None => (IpAddr::V6(network), self.bits),
        };
        match self.port {
            Some(port) if network.is_ipv6() => write!(f, "[{network}/{bits}]:{port}"),
            Some(port) => write!(f, "{network}/{bits}:{port}"),
            None => write!(f, "{network}/{bits}"),
        }
    }
}

impl Rule {
    /// Reads `10.0.0.0/24:5432`, `10.1.2.3`, `[fd00::/8]:80` or `fd00::/8`. `None` if it is none of these.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let (network, port) = if let Some(rest) = text.strip_prefix('[') {
            let (network, rest) = rest.split_once(']')?;
            match rest {
                "" => (network, None),
                _ => (network, Some(rest.strip_prefix(':')?)),
            }
        } else if text.matches(':').count() == 1 {
            let (network, port) = text.split_once(':')?;
            (network, Some(port))
        } else {
            (text, None)
        };
        let port = match port {
            Some(port) => Some(port.parse::<u16>().ok().filter(|&port| port != 0)?),
            None => None,
        };
        let (address, bits) = match network.split_once('/') {
            Some((address, bits)) => (address, Some(bits.parse::<u32>().ok()?)),
            None => (network, None),
        };
        let address: IpAddr = address.parse().ok()?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let bits = bits.unwrap_or(width);
        if bits > width {
            return None;
        }
        let bits = bits + 128 - width;
        Some(Self { network: number(address) & prefix(bits), bits, port })
    }

    /// Reads a list, separated by commas or white space.
    pub fn parse_list(text: &str) -> Option<Vec<Self>> {
        let parts = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|part| !part.is_empty());
        parts.map(Self::parse).collect()
    }

    /// Whether it names a connection with the host at `peer` whose server has this port.
    pub fn names(&self, peer: IpAddr, server_port: u16) -> bool {
        number(peer) & prefix(self.bits) == self.network && self.port.is_none_or(|port| port == server_port)
    }
}

/// Whether both addresses are this host's, as far as they tell.
pub fn same_host(local: SocketAddr, peer: SocketAddr) -> bool {
    let loopback = |address: IpAddr| match address.to_canonical() {
        IpAddr::V4(v4) => v4.is_loopback(),
        IpAddr::V6(v6) => v6 == Ipv6Addr::LOCALHOST,
    };
    local.ip().to_canonical() == peer.ip().to_canonical() || loopback(peer.ip())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(rule: &str, peer: &str, port: u16) -> bool {
        Rule::parse(rule).unwrap().names(peer.parse().unwrap(), port)
    }

    #[test]
    fn a_rule_names_a_network_and_a_port() {
        assert!(names("10.0.0.0/24:5432", "10.0.0.77", 5432));
        assert!(names("10.0.0.0/24:5432", "::ffff:10.0.0.77", 5432));
        assert!(!names("10.0.0.0/24:5432", "10.0.1.77", 5432));
        assert!(!names("10.0.0.0/24:5432", "10.0.0.77", 5433));
        assert!(names("10.0.0.5", "10.0.0.5", 1) && !names("10.0.0.5", "10.0.0.6", 1));
        assert!(names("0.0.0.0/0", "1.2.3.4", 1) && !names("0.0.0.0/0", "fd00::1", 1));
        assert!(names("::/0", "1.2.3.4", 1));
        assert!(names("[fd00::/8]:80", "fd12::1", 80) && !names("[fd00::/8]:80", "fd12::1", 81));
        assert!(names("fd00::/8", "fd12::1", 81) && names("[fd12::1]", "fd12::1", 1));
    }

    #[test]
    fn a_rule_that_is_shown_can_be_read_again() {
        for text in ["10.0.0.0/24:5432", "10.1.2.3/32", "0.0.0.0/0", "[fd00::/8]:80", "::/0"] {
            assert_eq!(Rule::parse(text).unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_is_no_rule_is_refused() {
        for text in
            ["", "10.0.0.0/33", "10.0.0.0/24:", "10.0.0.0:0", "10.0.0.0:99999", "host:80", "[::1", "[::1]80"]
        {
            assert_eq!(Rule::parse(text), None, "{text}");
        }
        assert_eq!(Rule::parse_list("10.0.0.1, 10.0.0.2:80\n").unwrap().len(), 2);
        assert_eq!(Rule::parse_list("10.0.0.1,nonsense"), None);
    }

    #[test]
    fn one_host_is_known_by_its_addresses() {
        let same = |a: &str, b: &str| same_host(a.parse().unwrap(), b.parse().unwrap());
        assert!(same("10.0.0.1:1", "[::ffff:10.0.0.1]:2") && same("127.0.0.1:1", "127.0.0.2:2"));
        assert!(!same("10.0.0.1:1", "10.0.0.2:1"));
    }
}
