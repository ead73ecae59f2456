//! The kernel's connection manager, by which iWARP queue pairs are connected: they can't be moved by hand as those of RoCE.
//!
//! Its commands are written to `/dev/infiniband/rdma_cm` (linux/rdma/rdma_user_cm.h), each a short system call, and its
//! events are read from there without waiting. librdmacm does the same behind calls that wait, with descriptors of its own
//! that an application could close, and with state that it would share with an application that uses it itself.
//!
//! ```text
//!   server                          client
//!   bind, listen: port in its reply
//!                                   bind to its address, resolve address and route, connect (nonce)
//!   request: right nonce? accept
//!   established                     established: it writes first, as MPA wants (RFC 5044, 7.1)
//! ```
//!
//! *Nobody waits.* Each step is made by whichever call comes by once the event before it is there, and all of them within
//! [`PATIENCE`]. Soft-iWARP's connect alone waits for a TCP handshake (siw_connect of drivers/infiniband/sw/siw/siw_cm.c), where
//! a firewall might swallow it: so a socket that does not wait tries the way first.

use std::fs;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};
use syscalls::{Sysno, syscall};

use crate::reason::Reason;
use crate::settings::settings;
use crate::tcp::errno;
use crate::uninterrupted::Uninterrupted;

/// How long the two sides may take to meet.
const PATIENCE: Duration = Duration::from_secs(10);
/// Connections that may wait at a listener: the trial's, the peer's, and a stranger's.
const BACKLOG: u32 = 8;
/// Steps in one call: all that a meeting has, and some more.
const MOST_STEPS: u32 = 16;
/// Ports that are tried: the manager does not know which ones TCP sockets have.
const TRIES: u32 = 8;

/// What the client tells the listener, so that nobody else is let in.
pub(crate) type Nonce = [u8; 16];

/// How far a meeting has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Not there yet: look again at the next call.
    Pending,
    /// The queue pair is connected.
    Connected,
    /// It will not be.
    Failed,
}

#[derive(Debug)]
enum Step {
    /// Bound to the local address, and no more.
    Bound,
    Listens,
    Accepts,
    /// A socket has begun to connect to where the manager will.
    Tries,
    ResolvesAddress,
    ResolvesRoute,
    Connects,
    Connected,
    Failed,
}

/// A queue pair's way to the peer's.
#[derive(Debug)]
pub(super) struct Meeting {
    fd: OwnedFd,
    inside: Mutex<Inside>,
}

#[derive(Debug)]
struct Inside {
    step: Step,
    /// The identifier that was bound, and the one that carries the queue pair.
    bound: Option<u32>,
    carrier: Option<u32>,
    /// The manager has not said yet what became of the connection: until then it blocks whoever takes it back (`iw_cm_connect` of
    /// drivers/infiniband/core/iwcm.c).
    busy: bool,
    local: SocketAddr,
    peer: SocketAddr,
    nonce: Nonce,
    /// Number of the queue pair, and how many RDMA READs may be in flight.
    pair: u32,
    reads: u8,
    deadline: Option<Instant>,
    /// Ports that the client has had.
    ports: u32,
    /// The socket that tried the way, until the server has let this side in, and so has accepted what came before. Soft-iWARP closes a listener
    /// if a connection is reset before that: until then the child's socket calls back for the listener's (`siw_cm_llp_state_change`).
    way: Option<OwnedFd>,
}

/// Whether there is an iWARP device at all.
pub(super) fn has_device() -> bool {
    devices().next().is_some()
}

/// Names of iWARP devices.
fn devices() -> impl Iterator<Item = String> {
    let entries = fs::read_dir(CLASS).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| attribute(name, "node_type").starts_with("4:"))
}

fn attribute(device: &str, name: &str) -> String {
    fs::read_to_string(format!("{CLASS}/{device}/{name}")).unwrap_or_default()
}

const CLASS: &str = "/sys/class/infiniband";

impl Meeting {
    /// Binds to `local`, at a port of the manager's choice. With the device's name and port.
    pub(super) fn bind(local: SocketAddr) -> Result<(Self, String, u8), Reason> {
        let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
        let fd = rustix::fs::open("/dev/infiniband/rdma_cm", flags, Mode::empty());
        let fd = fd.map_err(|_| Reason::NoDevice)?;
        let fd = (settings().place)(fd).map_err(|_| Reason::NoFds)?;
        let inside = Inside {
            step: Step::Bound,
            bound: None,
            carrier: None,
            busy: false,
            local: SocketAddr::new(local.ip().to_canonical(), 0),
            peer: local,
            nonce: Nonce::default(),
            pair: 0,
            reads: 0,
            deadline: None,
            ports: 1,
            way: None,
        };
        let meeting = Self { fd, inside: Mutex::new(inside) };
        let (name, port) = meeting.rebind(&mut *meeting.inside.lock().map_err(|_| Reason::NoDevice)?)?;
        Ok((meeting, name, port))
    }

    /// Takes another port of the local address. The device that has it.
    fn rebind(&self, inside: &mut Inside) -> Result<(String, u8), Reason> {
        if let Some(id) = inside.bound.take() {
            self.destroy(id);
        }
        let id = self.create().map_err(|_| Reason::NoDevice)?;
        inside.bound = Some(id);
        let bind = BindIp { response: 0, address: Address::new(inside.local), id };
        self.command(command::BIND_IP, &bind).map_err(|_| Reason::NoDevice)?;
        let place = self.query(id).map_err(|_| Reason::NoDevice)?;
        let guid = u64::from_be(place.node_guid);
        let wanted = |name: &String| {
            let text: String = attribute(name, "node_guid").trim().replace(':', "");
            u64::from_str_radix(&text, 16) == Ok(guid)
        };
        // An address that no device has is bound to none.
        let name = devices().find(wanted).filter(|_| guid != 0).ok_or(Reason::NoDevice)?;
        Ok((name, place.port))
    }

    /// Server: lets the client in that will bring `nonce`. The port to tell it.
    pub(super) fn listen(&self, peer: IpAddr, nonce: Nonce, pair: u32, reads: u8) -> Result<u16, Reason> {
        let mut inside = self.inside.lock().map_err(|_| Reason::NoRoute)?;
        for _ in 0..TRIES {
            if let Some(id) = inside.bound {
                let listen = Listen { id, backlog: BACKLOG };
                if self.command(command::LISTEN, &listen).is_ok() {
                    let port = self.query(id).map_err(|_| Reason::NoRoute)?.local.port();
                    inside.peer = SocketAddr::new(peer.to_canonical(), 0);
                    (inside.nonce, inside.pair, inside.reads) = (nonce, pair, reads);
                    inside.step = Step::Listens;
                    inside.deadline = Some(Instant::now() + PATIENCE);
                    return Ok(port);
                }
            }
            self.rebind(&mut inside)?;
        }
        Err(Reason::NoRoute)
    }

    /// Client: begins to go to where the server listens.
    pub(super) fn approach(
        &self,
        server: SocketAddr,
        nonce: Nonce,
        pair: u32,
        reads: u8,
    ) -> Result<(), Reason> {
        let mut inside = self.inside.lock().map_err(|_| Reason::NoRoute)?;
        inside.peer = SocketAddr::new(server.ip().to_canonical(), server.port());
        (inside.nonce, inside.pair, inside.reads) = (nonce, pair, reads);
        inside.way = Some(try_way(inside.local, inside.peer).ok_or(Reason::NoRoute)?);
        inside.step = Step::Tries;
        inside.deadline = Some(Instant::now() + PATIENCE);
        Ok(())
    }

    /// Goes as far as it goes without waiting.
    pub(super) fn advance(&self) -> Progress {
        let _uninterrupted = Uninterrupted::begin();
        // Another thread is at it.
        let Ok(mut inside) = self.inside.try_lock() else { return Progress::Pending };
        // Strangers who ask to be let in, one after the other, hold no call up.
        for _ in 0..MOST_STEPS {
            match inside.step {
                Step::Connected => return Progress::Connected,
                Step::Failed => return Progress::Failed,
                _ => {}
            }
            match self.step(&mut inside) {
                Ok(Some(step)) => inside.step = step,
                Ok(None) if inside.deadline.is_none_or(|deadline| Instant::now() < deadline) => {
                    return Progress::Pending;
                }
                Ok(None) | Err(_) => self.give_up(&mut inside),
            }
        }
        Progress::Pending
    }

    /// The next step, if what it waits for is there.
    fn step(&self, inside: &mut Inside) -> Result<Option<Step>, Errno> {
        if let Step::Tries = inside.step {
            if !is_connected(inside.way.as_ref().ok_or(Errno::CONNREFUSED)?)? {
                return Ok(None);
            }
            return self.resolve(inside).map(Some);
        }
        let Some(event) = self.event()? else { return Ok(None) };
        inside.busy = false;
        if event.status != 0 {
            return Err(Errno::CONNREFUSED);
        }
        let id = inside.bound.ok_or(Errno::CONNREFUSED);
        match (&inside.step, event.kind) {
            (Step::ResolvesAddress, event::ADDRESS_RESOLVED) => {
                let resolve = ResolveRoute { id: id?, timeout: PATIENCE.as_millis() as u32 };
                self.command(command::RESOLVE_ROUTE, &resolve)?;
                Ok(Some(Step::ResolvesRoute))
            }
            (Step::ResolvesRoute, event::ROUTE_RESOLVED) => {
                let id = id?;
                inside.carrier = Some(id);
                let parameters = Parameters::new(inside);
                match self.command(command::CONNECT, &Connect::new(parameters, id)) {
                    // A TCP socket has the port.
                    Err(Errno::ADDRINUSE) if inside.ports < TRIES => {
                        inside.ports += 1;
                        inside.carrier = None;
                        self.rebind(inside).map_err(|_| Errno::ADDRINUSE)?;
                        return self.resolve(inside).map(Some);
                    }
                    connecting => connecting?,
                }
                inside.busy = true;
                Ok(Some(Step::Connects))
            }
            (Step::Listens, event::CONNECT_REQUEST) => {
                if !self.is_expected(inside, &event) {
                    let _ = self.command(command::REJECT, &Reject { id: event.id, _none: [0; 65] });
                    self.destroy(event.id);
                    return Ok(Some(Step::Listens));
                }
                inside.carrier = Some(event.id);
                let parameters = Parameters::new(inside);
                let accept = Accept { uid: UID, connect: Connect::new(parameters, event.id) };
                self.command(command::ACCEPT, &accept)?;
                inside.busy = true;
                if let Some(listener) = inside.bound.take() {
                    self.destroy(listener);
                }
                Ok(Some(Step::Accepts))
            }
            (Step::Accepts | Step::Connects, event::ESTABLISHED) => {
                inside.way = None;
                Ok(Some(Step::Connected))
            }
            _ => Err(Errno::CONNREFUSED),
        }
    }

    /// Client: begins to resolve the server's address.
    fn resolve(&self, inside: &Inside) -> Result<Step, Errno> {
        let resolve = ResolveIp {
            from: Address::new(inside.local),
            to: Address::new(inside.peer),
            id: inside.bound.ok_or(Errno::CONNREFUSED)?,
            timeout: PATIENCE.as_millis() as u32,
        };
        self.command(command::RESOLVE_IP, &resolve)?;
        Ok(Step::ResolvesAddress)
    }

    /// Whether the right peer asks.
    fn is_expected(&self, inside: &Inside, event: &Event) -> bool {
        event.parameters.private.as_flattened()[..inside.nonce.len()] == inside.nonce
            && usize::from(event.parameters.private_length) >= inside.nonce.len()
            && self.query(event.id).is_ok_and(|place| place.peer.ip() == inside.peer.ip())
    }

    fn give_up(&self, inside: &mut Inside) {
        inside.step = Step::Failed;
        inside.way = None;
        if inside.busy {
            // See `blocks`.
            return;
        }
        let (bound, carrier) = (inside.bound.take(), inside.carrier.take());
        for id in bound.into_iter().chain(carrier.filter(|_| carrier != bound)) {
            self.destroy(id);
        }
    }

    /// Whether the manager says that the connection has ended. Looks once.
    pub(super) fn is_over(&self) -> bool {
        let Ok(mut inside) = self.inside.try_lock() else { return false };
        if matches!(inside.step, Step::Connected) && matches!(self.event(), Ok(Some(_))) {
            inside.step = Step::Failed;
        }
        matches!(inside.step, Step::Failed)
    }

    /// Whether it would block to end the connection now.
    pub(super) fn blocks(&self) -> bool {
        let Ok(mut inside) = self.inside.try_lock() else { return true };
        if inside.busy && matches!(self.event(), Ok(Some(_))) {
            inside.busy = false;
        }
        inside.busy
    }

    /// Ends the connection, after the queue pair has gone. Only in the process that made it.
    pub(super) fn end(&self) {
        if let Ok(mut inside) = self.inside.try_lock() {
            self.give_up(&mut inside);
        }
    }

    /// Its descriptors, which are internal.
    pub(super) fn fds(&self) -> [Option<i32>; 2] {
        let way = self.inside.try_lock().ok().and_then(|inside| inside.way.as_ref().map(AsRawFd::as_raw_fd));
        [Some(self.fd.as_raw_fd()), way]
    }

    // ---- commands

    fn create(&self) -> Result<u32, Errno> {
        let mut id = 0u32;
        let create = CreateId {
            uid: UID,
            response: (&raw mut id).expose_provenance() as u64,
            port_space: PORT_SPACE_TCP,
            kind: super::ffi::RC as u8,
            _reserved: [0; 5],
        };
        self.exchange(command::CREATE_ID, &create, size_of::<u32>())?;
        Ok(id)
    }

    fn destroy(&self, id: u32) {
        let mut reported = 0u32;
        let destroy =
            DestroyId { response: (&raw mut reported).expose_provenance() as u64, id, _reserved: 0 };
        let _ = self.exchange(command::DESTROY_ID, &destroy, size_of::<u32>());
    }

    fn query(&self, id: u32) -> Result<Place, Errno> {
        let mut place = QueriedAddress::default();
        let query = Query { response: (&raw mut place).expose_provenance() as u64, id, option: 0 };
        self.exchange(command::QUERY, &query, size_of::<QueriedAddress>())?;
        Ok(Place {
            node_guid: place.node_guid,
            port: place.port,
            local: read_address(&place.local),
            peer: read_address(&place.peer),
        })
    }

    fn event(&self) -> Result<Option<Event>, Errno> {
        let mut event = Event::default();
        let next = NextEvent { response: (&raw mut event).expose_provenance() as u64 };
        match self.exchange(command::GET_EVENT, &next, size_of::<Event>()) {
            Ok(()) => Ok(Some(event)),
            Err(Errno::AGAIN | Errno::INTR) => Ok(None),
            Err(errno) => Err(errno),
        }
    }

    fn command<T: Copy>(&self, number: u32, body: &T) -> Result<(), Errno> {
        self.exchange(number, body, 0)
    }

    /// Writes one command, whose answer of `answer` bytes goes to where its body says.
    fn exchange<T: Copy>(&self, number: u32, body: &T, answer: usize) -> Result<(), Errno> {
        let message = Message { number, length: size_of::<T>() as u16, answer: answer as u16, body: *body };
        let length = 8 + size_of::<T>();
        // Not as rustix does it, which promises the compiler that a write changes no memory.
        // SAFETY: the message is plain data; the kernel writes as much as `answer` to where the body says, which the caller
        // vouches for.
        let written = unsafe { syscall!(Sysno::write, self.fd.as_raw_fd(), &raw const message, length) };
        written.map(|_| ()).map_err(errno)
    }
}

/// A socket that begins to connect, without waiting.
fn try_way(local: SocketAddr, peer: SocketAddr) -> Option<OwnedFd> {
    let family = if peer.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None).ok()?;
    let socket = (settings().place)(socket).ok()?;
    // It leaves no port behind that somebody may want.
    sockopt::set_socket_linger(&socket, Some(Duration::ZERO)).ok()?;
    rustix::net::bind(&socket, &local).ok()?;
    match rustix::net::connect(&socket, &peer) {
        Ok(()) | Err(Errno::INPROGRESS) => Some(socket),
        Err(_) => None,
    }
}

fn is_connected(socket: &OwnedFd) -> Result<bool, Errno> {
    let mut list = [PollFd::new(socket, PollFlags::OUT)];
    if rustix::event::poll(&mut list, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap_or(0) == 0 {
        return Ok(false);
    }
    match sockopt::socket_error(socket)? {
        Ok(()) => Ok(true),
        Err(errno) => Err(errno),
    }
}

/// What the manager knows of an identifier.
struct Place {
    /// In network byte order.
    node_guid: u64,
    port: u8,
    local: SocketAddr,
    peer: SocketAddr,
}

fn read_address(storage: &Storage) -> SocketAddr {
    let bytes = storage.as_flattened();
    let port = u16::from_be_bytes([bytes[2], bytes[3]]);
    let ip: IpAddr = if u16::from_ne_bytes([bytes[0], bytes[1]]) == libc::AF_INET as u16 {
        Ipv4Addr::from(std::array::from_fn::<u8, 4, _>(|i| bytes[4 + i])).into()
    } else {
        Ipv6Addr::from(std::array::from_fn::<u8, 16, _>(|i| bytes[8 + i])).to_canonical()
    };
    SocketAddr::new(ip, port)
}

// ---- linux/rdma/rdma_user_cm.h, version 4

/// `RDMA_USER_CM_CMD_…`.
mod command {
    pub(super) const CREATE_ID: u32 = 0;
    pub(super) const DESTROY_ID: u32 = 1;
    pub(super) const BIND_IP: u32 = 2;
    pub(super) const RESOLVE_IP: u32 = 3;
    pub(super) const RESOLVE_ROUTE: u32 = 4;
    pub(super) const CONNECT: u32 = 6;
    pub(super) const LISTEN: u32 = 7;
    pub(super) const ACCEPT: u32 = 8;
    pub(super) const REJECT: u32 = 9;
    pub(super) const GET_EVENT: u32 = 12;
    pub(super) const QUERY: u32 = 19;
}

/// `enum rdma_cm_event_type` of rdma/rdma_cm.h.
mod event {
    pub(super) const ADDRESS_RESOLVED: u32 = 0;
    pub(super) const ROUTE_RESOLVED: u32 = 2;
    pub(super) const CONNECT_REQUEST: u32 = 4;
    pub(super) const ESTABLISHED: u32 = 9;
}

/// Whatever is not 0: identifiers without it get no events (`ucma_event_handler` of drivers/infiniband/core/ucma.c).
const UID: u64 = 1;
const PORT_SPACE_TCP: u16 = 0x106;

/// A command with its header, `struct rdma_ucm_cmd_hdr`. Packed: the header has eight bytes, bodies may want less.
#[repr(C, packed)]
struct Message<T> {
    number: u32,
    length: u16,
    answer: u16,
    body: T,
}

/// `struct sockaddr_in6`, or a `sockaddr_in` in its place.
#[repr(C)]
#[derive(Clone, Copy)]
struct Address([u32; 7]);

impl Address {
    fn new(address: SocketAddr) -> Self {
        let mut bytes = [0u8; 28];
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        bytes[..2].copy_from_slice(&(family as u16).to_ne_bytes());
        bytes[2..4].copy_from_slice(&address.port().to_be_bytes());
        match address {
            SocketAddr::V4(v4) => bytes[4..8].copy_from_slice(&v4.ip().octets()),
            SocketAddr::V6(v6) => {
                bytes[8..24].copy_from_slice(&v6.ip().octets());
                bytes[24..].copy_from_slice(&v6.scope_id().to_ne_bytes());
            }
        }
        let words = bytes.as_chunks::<4>().0;
        Self(std::array::from_fn(|index| u32::from_ne_bytes(words[index])))
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct CreateId {
    uid: u64,
    response: u64,
    port_space: u16,
    kind: u8,
    _reserved: [u8; 5],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct DestroyId {
    response: u64,
    id: u32,
    _reserved: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BindIp {
    response: u64,
    address: Address,
    id: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ResolveIp {
    from: Address,
    to: Address,
    id: u32,
    timeout: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ResolveRoute {
    id: u32,
    timeout: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Query {
    response: u64,
    id: u32,
    /// `RDMA_USER_CM_QUERY_ADDR`.
    option: u32,
}

/// `struct __kernel_sockaddr_storage`: 128 bytes.
type Storage = [[u8; 32]; 4];

#[repr(C)]
#[derive(Default)]
struct QueriedAddress {
    node_guid: u64,
    port: u8,
    _reserved: u8,
    _pkey: u16,
    _sizes: [u16; 2],
    local: Storage,
    peer: Storage,
    _device: [u32; 2],
}

/// `struct rdma_ucm_conn_param`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Parameters {
    pair: u32,
    qkey: u32,
    /// 256 bytes.
    private: [[u8; 32]; 8],
    private_length: u8,
    srq: u8,
    reads_served: u8,
    reads: u8,
    flow_control: u8,
    retries: u8,
    rnr_retries: u8,
    valid: u8,
}

impl Parameters {
    fn new(inside: &Inside) -> Self {
        let mut parameters = Self {
            pair: inside.pair,
            private_length: inside.nonce.len() as u8,
            reads_served: inside.reads,
            reads: inside.reads,
            retries: 7,
            rnr_retries: 7,
            valid: 1,
            ..Self::default()
        };
        parameters.private.as_flattened_mut()[..inside.nonce.len()].copy_from_slice(&inside.nonce);
        parameters
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Connect {
    parameters: Parameters,
    id: u32,
    _reserved: u32,
    _ece: [u32; 2],
}

impl Connect {
    fn new(parameters: Parameters, id: u32) -> Self {
        Self { parameters, id, _reserved: 0, _ece: [0; 2] }
    }
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Listen {
    id: u32,
    backlog: u32,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Accept {
    uid: u64,
    connect: Connect,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct Reject {
    id: u32,
    /// No reason, no private data.
    _none: [u32; 65],
}

#[repr(C)]
#[derive(Clone, Copy)]
struct NextEvent {
    response: u64,
}

/// `struct rdma_ucm_event_resp`.
#[repr(C)]
#[derive(Default)]
struct Event {
    _uid: u64,
    id: u32,
    kind: u32,
    status: u32,
    parameters: Parameters,
    _rest_of_union: [u32; 8],
    _reserved: u32,
    _ece: [u32; 2],
}

const _: () = {
    use std::mem::offset_of;
    assert!(offset_of!(Message<DestroyId>, body) == 8);
    assert!(size_of::<CreateId>() == 24 && size_of::<DestroyId>() == 16 && size_of::<BindIp>() == 40);
    assert!(size_of::<ResolveIp>() == 64 && size_of::<ResolveRoute>() == 8 && size_of::<Query>() == 16);
    assert!(size_of::<QueriedAddress>() == 280 && offset_of!(QueriedAddress, local) == 16);
    assert!(size_of::<Parameters>() == 272 && size_of::<Connect>() == 288 && size_of::<Listen>() == 8);
    assert!(size_of::<Accept>() == 296 && size_of::<Reject>() == 264);
    assert!(
        size_of::<Event>() == 336 && offset_of!(Event, parameters) == 20 && offset_of!(Event, _ece) == 328
    );
};
