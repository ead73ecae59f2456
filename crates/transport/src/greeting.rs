//! What two hosts say to each other in front of the application's bytes, on the TCP connection itself: HELLO before the
//! client's first bytes, and the reply before the server's. Byte tables are in docs/wire.md.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::reason::Reason;
use crate::verbs::Endpoint;
use crate::verbs::board::Memory;

/// Bytes of a greeting.
pub const LENGTH: usize = 160;
const SIGNED: usize = LENGTH - 32;

/// Begins each greeting: no protocol in use begins so.
const MAGIC: [u8; 15] = *b"\x00\xf5THALLUS-RDMA\xc3";
const VERSION: u8 = 7;

/// A secret of one connection, so that no reply fits another's HELLO.
pub type Nonce = [u8; 16];

/// Which greeting it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The client's.
    Hello,
    /// The server's; it agrees.
    Reply,
    /// The server's; it stays on TCP, and says why.
    Refusal(Reason),
}

/// A greeting.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Greeting {
    /// Which.
    pub kind: Kind,
    /// The client's choice, repeated by the server.
    pub nonce: Nonce,
    /// The sender's queue pair.
    pub endpoint: Endpoint,
    /// The sender's memory.
    pub memory: Memory,
}

/// What the first bytes of a stream are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opening {
    /// Not a greeting: they are the application's.
    Foreign,
    /// The beginning of a greeting.
    Partial,
    /// A whole one, of a version that is understood, and with the right signature.
    Whole(Greeting),
    /// A whole one that can't be used.
    Unusable(Reason),
}

/// The key that both hosts share, and the connection that a greeting is for.
#[derive(Clone, Copy, Debug)]
pub struct Seal<'a> {
    /// The key; none: greetings are not signed.
    pub key: Option<&'a [u8]>,
    /// The client's address.
    pub client: SocketAddr,
    /// The server's address.
    pub server: SocketAddr,
}

impl Seal<'_> {
    fn sign(&self, bytes: &[u8]) -> Option<Hmac<Sha256>> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.key?).ok()?;
        for address in [self.client, self.server] {
            mac.update(&mapped(address).octets());
            mac.update(&address.port().to_le_bytes());
        }
        mac.update(bytes);
        Some(mac)
    }
}

/// As in a GID.
pub(crate) fn mapped(address: SocketAddr) -> Ipv6Addr {
    match address.ip().to_canonical() {
        IpAddr::V4(v4) => v4.to_ipv6_mapped(),
        IpAddr::V6(v6) => v6,
    }
}

impl Greeting {
    /// The bytes to send.
    pub fn encode(&self, seal: Seal<'_>) -> [u8; LENGTH] {
        let mut bytes = [0u8; LENGTH];
        let (kind, reason) = match self.kind {
            Kind::Hello => (1u32, 0),
            Kind::Reply => (2, 0),
            Kind::Refusal(reason) => (3, reason as u32),
        };
        bytes[..15].copy_from_slice(&MAGIC);
        bytes[15] = VERSION;
        let mut put = |at: usize, field: &[u8]| bytes[at..at + field.len()].copy_from_slice(field);
        put(16, &kind.to_le_bytes());
        put(20, &reason.to_le_bytes());
        put(24, &self.nonce);
        put(40, &self.endpoint.gid);
        put(56, &self.endpoint.number.to_le_bytes());
        put(60, &self.endpoint.psn.to_le_bytes());
        put(64, &self.endpoint.mtu.to_le_bytes());
        put(68, &self.memory.ring.to_le_bytes());
        put(72, &self.memory.inbox.to_le_bytes());
        put(80, &self.memory.figures.to_le_bytes());
        put(88, &self.memory.inbox_key.to_le_bytes());
        put(92, &self.memory.figures_key.to_le_bytes());
        put(96, &u32::from(self.endpoint.manager.is_some()).to_le_bytes());
        put(100, &u32::from(self.endpoint.manager.unwrap_or(0)).to_le_bytes());
        if let Some(mac) = seal.sign(&bytes[..SIGNED]) {
            bytes[SIGNED..].copy_from_slice(&mac.finalize().into_bytes());
        }
        bytes
    }

    /// What `bytes`, the first of a stream, are: a HELLO, or with `nonce` the answer to that one.
    pub fn decode(bytes: &[u8], seal: Seal<'_>, nonce: Option<Nonce>) -> Opening {
        let known = bytes.len().min(MAGIC.len());
        if bytes[..known] != MAGIC[..known] {
            return Opening::Foreign;
        }
        let Some(bytes) = bytes.first_chunk::<LENGTH>() else { return Opening::Partial };
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        let long = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[15] != VERSION {
            return Opening::Unusable(Reason::OtherVersion);
        }
        let signed = match seal.sign(&bytes[..SIGNED]) {
            Some(mac) => mac.verify_slice(&bytes[SIGNED..]).is_ok(),
            None => seal.key.is_none() && bytes[SIGNED..].iter().all(|&byte| byte == 0),
        };
        if !signed {
            return Opening::Unusable(Reason::WrongKey);
        }
        let said = Nonce::from(std::array::from_fn(|i| bytes[24 + i]));
        let kind = match (word(16), nonce) {
            (1, None) => Kind::Hello,
            (2, Some(nonce)) if nonce == said => Kind::Reply,
            (3, Some(nonce)) if nonce == said => {
                Kind::Refusal(Reason::from_code(word(20)).unwrap_or(Reason::Refused))
            }
            _ => return Opening::Unusable(Reason::BadOffer),
        };
        let gid = std::array::from_fn(|i| bytes[40 + i]);
        let sender = if kind == Kind::Hello { seal.client } else { seal.server };
        // A connection manager is met at the TCP connection's address.
        let manager = (word(96) != 0).then_some(word(100) as u16);
        // Else whoever greets could make this side write to a third host's memory.
        if !matches!(kind, Kind::Refusal(_)) && manager.is_none() && gid != mapped(sender).octets() {
            return Opening::Unusable(Reason::BadOffer);
        }
        Opening::Whole(Self {
            kind,
            nonce: said,
            endpoint: Endpoint { gid, number: word(56), psn: word(60), mtu: word(64), manager },
            memory: Memory {
                ring: word(68),
                inbox: long(72),
                figures: long(80),
                inbox_key: word(88),
                figures_key: word(92),
            },
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seal(key: Option<&[u8]>) -> Seal<'_> {
        Seal { key, client: "10.0.0.1:5".parse().unwrap(), server: "10.0.0.2:6".parse().unwrap() }
    }

    fn gid(address: &str) -> [u8; 16] {
        address.parse::<Ipv6Addr>().unwrap().octets()
    }

    fn hello() -> Greeting {
        Greeting {
            kind: Kind::Hello,
            nonce: *b"0123456789abcdef",
            endpoint: Endpoint { number: 17, psn: 99, mtu: 3, gid: gid("::ffff:10.0.0.1"), manager: None },
            memory: Memory { inbox: 1 << 40, inbox_key: 5, ring: 1 << 20, figures: 2 << 40, figures_key: 6 },
        }
    }

    #[test]
    fn a_greeting_is_read_as_it_was_written() {
        for key in [None, Some(&b"secret"[..])] {
            let bytes = hello().encode(seal(key));
            assert_eq!(Greeting::decode(&bytes, seal(key), None), Opening::Whole(hello()));
            let endpoint = Endpoint { gid: gid("::ffff:10.0.0.2"), ..hello().endpoint };
            let reply = Greeting { kind: Kind::Reply, endpoint, ..hello() };
            let bytes = reply.encode(seal(key));
            assert_eq!(Greeting::decode(&bytes, seal(key), Some(hello().nonce)), Opening::Whole(reply));
            assert_eq!(
                Greeting::decode(&bytes, seal(key), Some([0; 16])),
                Opening::Unusable(Reason::BadOffer)
            );
            let refusal = Greeting { kind: Kind::Refusal(Reason::NoDevice), ..hello() };
            let bytes = refusal.encode(seal(key));
            assert_eq!(Greeting::decode(&bytes, seal(key), Some(hello().nonce)), Opening::Whole(refusal));
        }
    }

    #[test]
    fn the_applications_bytes_are_foreign_and_parts_are_parts() {
        let bytes = hello().encode(seal(None));
        for length in 0..LENGTH {
            assert_eq!(Greeting::decode(&bytes[..length], seal(None), None), Opening::Partial, "{length}");
        }
        assert_eq!(Greeting::decode(b"GET / HTTP/1.1", seal(None), None), Opening::Foreign);
        assert_eq!(Greeting::decode(&bytes[1..], seal(None), None), Opening::Foreign);
    }

    #[test]
    fn a_queue_pair_of_a_third_host_is_refused() {
        let endpoint = Endpoint { gid: gid("::ffff:10.0.0.3"), ..hello().endpoint };
        for (kind, nonce) in [(Kind::Hello, None), (Kind::Reply, Some(hello().nonce))] {
            let bytes = Greeting { kind, endpoint, ..hello() }.encode(seal(None));
            assert_eq!(Greeting::decode(&bytes, seal(None), nonce), Opening::Unusable(Reason::BadOffer));
        }
        // Nor is the client's the server's.
        let bytes = Greeting { kind: Kind::Reply, ..hello() }.encode(seal(None));
        let decoded = Greeting::decode(&bytes, seal(None), Some(hello().nonce));
        assert_eq!(decoded, Opening::Unusable(Reason::BadOffer));
    }

    #[test]
    fn a_wrong_key_version_or_address_is_refused() {
        let with_key = hello().encode(seal(Some(b"secret")));
        let wrong = Opening::Unusable(Reason::WrongKey);
        assert_eq!(Greeting::decode(&with_key, seal(Some(b"other")), None), wrong);
        assert_eq!(Greeting::decode(&with_key, seal(None), None), wrong);
        assert_eq!(Greeting::decode(&hello().encode(seal(None)), seal(Some(b"secret")), None), wrong);
        let elsewhere = Seal { client: "10.0.0.1:7".parse().unwrap(), ..seal(Some(b"secret")) };
        assert_eq!(Greeting::decode(&with_key, elsewhere, None), wrong);
        let mut other = hello().encode(seal(None));
        other[15] = VERSION + 1;
        assert_eq!(Greeting::decode(&other, seal(None), None), Opening::Unusable(Reason::OtherVersion));
        let mut other = hello().encode(seal(None));
        other[16] = 9;
        assert_eq!(Greeting::decode(&other, seal(None), None), Opening::Unusable(Reason::BadOffer));
    }
}
