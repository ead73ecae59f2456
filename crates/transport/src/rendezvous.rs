//! How the two ends of a connection on one host find each other, beside the connection and never in it.
//!
//! Both know the connection's four-tuple, or of `AF_UNIX` the number of the client's socket ([`Ends`]). Names are abstract Unix socket names, which live in the same network
//! namespace as the TCP ports and vanish with their sockets.
//!
//! ```text
//!  server process                                client process
//!  listen():  binds «hint of the port»
//!                                                call 4:  does the server advise to wait?
//!                                                call N:  is there such a hint?
//!                                                         binds and listens on «four-tuple»
//!  reads:     connects to «four-tuple»
//!             whose is it? whose is the TCP socket?   same uid, or no deal
//!             creates the segment, sends it
//!                                                some call: accepts; the same check; maps it, sets ready
//! ```
//!
//! No step waits: connect and send succeed before the other side accepts. A hint can be forged to
//! no other end than a name that nobody answers. Each side compares the peer credentials of the Unix socket
//! (unix(7), `SO_PEERCRED`) with the owner of the other socket of the connection (sock_diag(7)).
//!
//! Of a TCP connection the kernel counts the bytes, so each side knows by itself whether some went another way than by its hooks. Of
//! an `AF_UNIX` one it does not: the server keeps its counts in the segment, and the client compares them with its own (`crate::count`).

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, IntoRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect,
    listen, recvmsg, sendmsg, socket_with,
};

use crate::chime::{self, Exchange, Mouth};
use crate::experience::{self, Advice};
use crate::reason::Reason;
use crate::segment::{Nonce, Segment};
use crate::uninterrupted::Descriptor;
use crate::unix::Name;
use crate::{process, tcp, unix};

const MESSAGE_MAGIC: [u8; 8] = *b"THALLUSo";
const MESSAGE_BYTES: usize = 24;

/// The two ends of a connection, as both of them know them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ends {
    /// Of a TCP connection: their addresses.
    Internet {
        /// Of the end that connected.
        client: SocketAddr,
        /// Of the end that accepted.
        server: SocketAddr,
    },
    /// Of an `AF_UNIX` connection: the inode numbers of their sockets.
    Unix {
        /// Of the end that connected.
        client: u32,
        /// Of the end that accepted. It has none before, so the client leaves it open.
        server: Option<u32>,
    },
}

impl Ends {
    fn name(self) -> SocketAddrUnix {
        name(&match self {
            Self::Internet { client, server } => format!("thallus/1/{client}-{server}"),
            Self::Unix { client, .. } => format!("thallus/1/unix/{client}"),
        })
    }

    /// The user who owns the client's socket, or the server's.
    fn owner(self, of_client: bool) -> Result<u32, Failure> {
        match self {
            Self::Internet { client, server } => {
                let (local, peer) = if of_client { (client, server) } else { (server, client) };
                let owner = tcp::owner_of(local, peer).map_err(no_diag)?.ok_or_else(|| {
                    // A kernel whose sock_diag knows no TCP does not know this end either.
                    let knows_tcp = matches!(tcp::owner_of(peer, local), Ok(Some(_)));
                    Failure::Stay(if knows_tcp { Reason::Remote } else { Reason::NoDiag })
                })?;
                Ok(owner.uid)
            }
            Self::Unix { client, server } => {
                let look_up = |inode| unix::look_up(inode).map_err(no_diag);
                let server = match server {
                    Some(server) => server,
                    None => look_up(client)?.ok_or(Failure::Stay(Reason::NoDiag))?.peer,
                };
                if server == 0 {
                    // Nobody has accepted it, so whoever answers is somebody else.
                    return Err(Failure::Stay(Reason::NotOwner));
                }
                let (own, peer) = if of_client { (client, server) } else { (server, client) };
                let known = look_up(own)?.filter(|known| known.peer == peer);
                let known = known.ok_or(Failure::Stay(Reason::NotOwner))?;
                known.uid.ok_or(Failure::Stay(Reason::NoDiag))
            }
        }
    }
}

/// Where a server listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Service {
    /// A TCP port.
    Port(u16),
    /// The name of an `AF_UNIX` socket.
    Unix(Name),
}

impl Service {
    fn text(self) -> String {
        match self {
            Self::Port(port) => format!("thallus/1/port/{port}"),
            Self::Unix(path) => format!("thallus/1/path/{}", path.digest()),
        }
    }

    fn hint(self) -> SocketAddrUnix {
        name(&self.text())
    }

    /// A name that is taken while the server gives this advice.
    fn advice(self, advice: Advice) -> SocketAddrUnix {
        let what = match advice {
            Advice::Short => "short",
            Advice::ShortOnOne => "short/one",
        };
        name(&format!("{}/{what}", self.text()))
    }

    /// What stands for it where the past is remembered ([`crate::experience`]).
    pub fn number(self) -> u16 {
        match self {
            Self::Port(port) => port,
            Self::Unix(name) => name.number(),
        }
    }
}

/// Puts an internal file descriptor where it is out of the application's way.
pub type Place = fn(OwnedFd) -> Result<OwnedFd, Errno>;

/// Why an attempt came to nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The other side is not there yet: worth another try later.
    NotYet,
    /// The connection stays on TCP.
    Stay(Reason),
}

fn out_of(errno: Errno) -> Failure {
    match errno {
        Errno::MFILE | Errno::NFILE => Failure::Stay(Reason::NoFds),
        Errno::NOMEM | Errno::NOBUFS | Errno::NOSPC | Errno::FBIG => Failure::Stay(Reason::NoMemory),
        Errno::NOSYS => Failure::Stay(Reason::KernelTooOld),
        Errno::ACCESS | Errno::PERM => Failure::Stay(Reason::Forbidden),
        _ => Failure::Stay(Reason::NoAnswer),
    }
}

/// Why sock_diag(7) could not be asked.
pub(crate) fn no_diag(errno: Errno) -> Failure {
    match out_of(errno) {
        lacks @ Failure::Stay(Reason::NoFds | Reason::NoMemory) => lacks,
        _ => Failure::Stay(Reason::NoDiag),
    }
}

fn name(text: &str) -> SocketAddrUnix {
    // The longest text is that of two IPv6 addresses with ports, 106 bytes of 107.
    SocketAddrUnix::new_abstract_name(text.as_bytes()).expect("names are shorter than sun_path")
}

fn socket(kind: SocketType, place: Place) -> Result<OwnedFd, Errno> {
    place(socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)?)
}

/// Server: announces that this process family may serve there. `Ok(None)` if someone already does.
pub fn announce(service: Service, place: Place) -> Result<Option<OwnedFd>, Errno> {
    take(&service.hint(), place)
}

/// Client: whether some process announced that.
pub fn is_announced(service: Service, place: Place) -> Result<bool, Failure> {
    let ask = || is_taken(&socket(SocketType::DGRAM, place)?.into(), &service.hint());
    ask().map_err(out_of)
}

/// Server: gives clients this advice, as long as the sockets live: who gives the second gives the first as well. Those that others have are
/// left out.
pub fn tell(service: Service, advice: Advice, place: Place) -> Result<Vec<OwnedFd>, Errno> {
    let given =
        Advice::ALL.iter().take_while(|&&other| advice == Advice::ShortOnOne || other == Advice::Short);
    given.filter_map(|&advice| take(&service.advice(advice), place).transpose()).collect()
}

/// Client: takes the server's advice ([`experience::heed`]), for a process that [wants](experience::wants_advice) it. False if there is none.
pub fn take_advice(service: Service, place: Place) -> bool {
    let advice = ask(service, place).ok().flatten();
    if let Some(advice) = advice {
        experience::heed(service.number(), advice);
    }
    advice.is_some()
}

/// The server's advice. Two system calls more than the socket's own if there is one, else one.
fn ask(service: Service, place: Place) -> Result<Option<Advice>, Errno> {
    let socket = Descriptor::from(socket(SocketType::DGRAM, place)?);
    let mut found = None;
    for advice in Advice::ALL {
        if !is_taken(&socket, &service.advice(advice))? {
            break;
        }
        found = Some(advice);
    }
    Ok(found)
}

fn take(name: &SocketAddrUnix, place: Place) -> Result<Option<OwnedFd>, Errno> {
    let socket = socket(SocketType::DGRAM, place)?;
    let taken = bind(&socket, name);
    if taken.is_ok() {
        return Ok(Some(socket));
    }
    drop(Descriptor::from(socket));
    match taken {
        Err(Errno::ADDRINUSE) => Ok(None),
        taken => taken.map(|()| None),
    }
}

/// Whether somebody has taken this name, by `socket`, which may have been used to ask for others.
fn is_taken(socket: &Descriptor, name: &SocketAddrUnix) -> Result<bool, Errno> {
    match connect(socket, name) {
        Ok(()) => Ok(true),
        // EPROTOTYPE: somebody else's socket of another type has the name.
        Err(Errno::CONNREFUSED | Errno::PROTOTYPE) => Ok(false),
        Err(errno) => Err(errno),
    }
}

/// Client: makes the connection findable.
pub fn offer(ends: Ends, place: Place) -> Result<Descriptor, Reason> {
    if is_pestered() {
        return Err(Reason::BadOffer);
    }
    let attempt = || {
        let socket = Descriptor::from(socket(SocketType::SEQPACKET, place)?);
        bind(&socket, &ends.name())?;
        listen(&socket, 1)?;
        Ok(socket)
    };
    attempt().map_err(|errno| match (errno, out_of(errno)) {
        (Errno::ADDRINUSE, _) => Reason::NameTaken,
        (_, Failure::Stay(reason)) => reason,
        (_, Failure::NotYet) => Reason::NoAnswer,
    })
}

/// Server: looks for the client's offer and answers it with a new segment, which is first shown to `enter`.
pub fn answer(ends: Ends, enter: impl FnOnce(&Segment), place: Place) -> Result<Segment, Failure> {
    if is_pestered() {
        return Err(Failure::Stay(Reason::BadOffer));
    }
    let socket = Descriptor::from(socket(SocketType::SEQPACKET, place).map_err(out_of)?);
    match connect(&socket, &ends.name()) {
        Ok(()) => {}
        Err(Errno::CONNREFUSED | Errno::AGAIN) => return Err(Failure::NotYet),
        Err(Errno::PROTOTYPE) => return Err(Failure::Stay(Reason::NotOwner)),
        Err(errno) => return Err(out_of(errno)),
    }
    let uid = check_owner(socket.as_fd(), ends, true)?;
    let mut nonce: Nonce = [0; 16];
    rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty()).map_err(out_of)?;
    let (segment, memory) = Segment::create(nonce).map_err(out_of)?;
    enter(&segment);
    let mut message = [0; MESSAGE_BYTES];
    message[..8].copy_from_slice(&MESSAGE_MAGIC);
    message[8..].copy_from_slice(&nonce);
    let mouth = chime::mouth(place);
    let fds = [Some(memory.as_fd()), mouth].into_iter().flatten().collect::<Vec<_>>();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let sent = sendmsg(&socket, &[IoSlice::new(&message)], &mut control, SendFlags::NOSIGNAL);
    sent.map_err(|errno| match errno {
        // It has withdrawn its offer, or ends.
        Errno::PIPE | Errno::CONNRESET => Failure::NotYet,
        errno => out_of(errno),
    })?;
    Ok(segment.met(uid).exchanging(Exchange::of_server(uid, mouth.is_some(), socket)))
}

/// Client: takes the segment, if the server has answered. A server that has connected but not sent
/// yet waits in `arrived` for the next attempt.
pub fn collect(
    offer: BorrowedFd<'_>,
    arrived: &mut Option<Descriptor>,
    ends: Ends,
    place: Place,
) -> Result<Segment, Failure> {
    let socket = match arrived.take() {
        Some(socket) => socket,
        None => admit(offer, ends, place)?,
    };
    let mut message = [0; MESSAGE_BYTES];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received =
        recvmsg(&socket, &mut [IoSliceMut::new(&mut message)], &mut control, RecvFlags::CMSG_CLOEXEC);
    let (received, cut) = match received {
        Ok(received) => (received.bytes, received.flags.contains(ReturnFlags::CTRUNC)),
        Err(Errno::AGAIN | Errno::INTR) => {
            *arrived = Some(socket);
            return Err(Failure::NotYet);
        }
        Err(errno @ (Errno::ACCESS | Errno::PERM)) => return Err(out_of(errno)),
        Err(_) => return Err(Failure::Stay(Reason::BadOffer)),
    };
    if received == 0 {
        // It could not make a segment, and knows why; it may come back.
        return Err(Failure::NotYet);
    }
    let mut fds = control
        .drain()
        .filter_map(|part| match part {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        })
        .flatten();
    let memory = fds
        .next()
        // The kernel cuts off a descriptor for which the process has no number left.
        .ok_or(Failure::Stay(if cut { Reason::NoFds } else { Reason::BadOffer }))?;
    let mouth = fds.next();
    let accepted = if received == MESSAGE_BYTES && message[..8] == MESSAGE_MAGIC {
        let mut nonce: Nonce = [0; 16];
        nonce.copy_from_slice(&message[8..]);
        Segment::accept(&memory, nonce).map_err(|error| match error {
            crate::segment::OfferError::Map(errno) => out_of(errno),
            _ => Failure::Stay(Reason::BadOffer),
        })
    } else {
        Err(Failure::Stay(Reason::BadOffer))
    };
    let segment = match accepted {
        Ok(segment) => segment,
        Err(refused) => {
            dismiss(memory);
            mouth.into_iter().for_each(dismiss);
            return Err(refused);
        }
    };
    let uid = tcp::user_of_peer(socket.as_fd()).map_err(out_of)?;
    let mouth = mouth.and_then(|fd| Mouth::adopt(fd, uid, place));
    Ok(segment.met(uid).exchanging(Exchange::of_client(uid, mouth, socket)))
}

/// Descriptors that [`dismiss`] has left open.
static LEFT_OPEN: AtomicU32 = AtomicU32::new(0);

/// Having left so many open, a process meets nobody any more.
const MOST_LEFT_OPEN: u32 = 16;

/// Gets rid of what a peer has passed and is not what it should be. To close it might take as long as the peer likes: the last descriptor of a
/// socket that lingers, any of a file whose file system a program provides. That is left open.
pub(crate) fn dismiss(fd: OwnedFd) {
    let is_memory = || rustix::fs::fcntl_get_seals(&fd).is_ok();
    if is_memory() || rustix::net::sockopt::set_socket_linger(&fd, None).is_ok() {
        drop(Descriptor::from(fd));
    } else {
        LEFT_OPEN.fetch_add(1, Ordering::Relaxed);
        let _ = fd.into_raw_fd();
    }
}

fn is_pestered() -> bool {
    LEFT_OPEN.load(Ordering::Relaxed) >= MOST_LEFT_OPEN
}

/// Accepts whoever answers the offer, if it is the server. A stranger's connection is dropped and the offer
/// stands: whoever spoils a name must not decide.
fn admit(offer: BorrowedFd<'_>, ends: Ends, place: Place) -> Result<Descriptor, Failure> {
    let socket = match accept_with(offer, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        Ok(socket) => Descriptor::from(place(socket).map_err(out_of)?),
        Err(Errno::AGAIN | Errno::INTR) => return Err(Failure::NotYet),
        Err(errno) => return Err(out_of(errno)),
    };
    match check_owner(socket.as_fd(), ends, false) {
        Ok(_) => Ok(socket),
        Err(Failure::Stay(Reason::NotOwner)) => Err(Failure::NotYet),
        Err(other) => Err(other),
    }
}

/// The user at the other end of `socket`, if it owns the client's end of the connection, or the server's.
fn check_owner(socket: BorrowedFd<'_>, ends: Ends, of_client: bool) -> Result<u32, Failure> {
    let owner = ends.owner(of_client)?;
    let uid = tcp::user_of_peer(socket).map_err(out_of)?;
    if uid == owner && process::is_somebody(uid) { Ok(uid) } else { Err(Failure::Stay(Reason::NotOwner)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, TcpStream};
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
    use std::process;

    fn place(fd: OwnedFd) -> Result<OwnedFd, Errno> {
        Ok(fd)
    }

    fn connection() -> (TcpStream, TcpStream, Ends) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let server = listener.accept().unwrap().0;
        let ends =
            Ends::Internet { client: client.local_addr().unwrap(), server: server.local_addr().unwrap() };
        (client, server, ends)
    }

    fn unix_connection() -> (UnixStream, UnixStream, Ends) {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let address =
            SocketAddr::from_abstract_name(format!("rendezvous-{}-{number}", process::id())).unwrap();
        let listener = UnixListener::bind_addr(&address).unwrap();
        let client = UnixStream::connect_addr(&address).unwrap();
        let server = listener.accept().unwrap().0;
        let number = |end: &UnixStream| unix::inode(end.as_fd()).unwrap();
        let ends = Ends::Unix { client: number(&client), server: Some(number(&server)) };
        (client, server, ends)
    }

    #[test]
    fn an_offer_that_is_answered_gives_both_sides_the_same_memory() {
        let (_c, _s, internet) = connection();
        let (_client, _server, unix) = unix_connection();
        for ends in [internet, unix] {
            let offer = offer(ends, place).unwrap();
            let enter = |segment: &Segment| segment.outgoing().rare.0.taken.store(7, Ordering::Relaxed);
            let answered = answer(ends, enter, place).unwrap();
            let ends = match ends {
                Ends::Unix { client, .. } => Ends::Unix { client, server: None },
                internet => internet,
            };
            let collected = collect(offer.as_fd(), &mut None, ends, place).unwrap();
            assert_eq!(collected.incoming().rare.0.taken.load(Ordering::Relaxed), 7);
            assert!(collected.set_ready());
            assert!(answered.is_ready());
        }
    }

    #[test]
    fn who_names_other_ends_than_the_kernel_owns_none() {
        let (_client, _server, ends) = unix_connection();
        let Ends::Unix { client, .. } = ends else { unreachable!() };
        let elsewhere = Ends::Unix { client, server: Some(client) };
        let _offer = offer(elsewhere, place).unwrap();
        assert_eq!(answer(elsewhere, |_| {}, place).unwrap_err(), Failure::Stay(Reason::NotOwner));
    }

    #[test]
    fn nothing_waits_for_a_side_that_is_not_there() {
        let (_c, _s, ends) = connection();
        assert_eq!(answer(ends, |_| {}, place).unwrap_err(), Failure::NotYet);
        let offer = offer(ends, place).unwrap();
        assert_eq!(collect(offer.as_fd(), &mut None, ends, place).unwrap_err(), Failure::NotYet);
    }

    #[test]
    fn a_name_that_is_taken_keeps_the_connection_on_tcp() {
        let (_c, _s, ends) = connection();
        let _squatter = offer(ends, place).unwrap();
        assert_eq!(offer(ends, place).unwrap_err(), Reason::NameTaken);
    }

    #[test]
    fn an_offer_for_a_connection_that_does_not_exist_is_not_answered() {
        // Of a connection that exists the kernel knows at least this end.
        let [client, server] = ["127.0.0.1:1", "127.0.0.1:2"].map(|address| address.parse().unwrap());
        let ends = Ends::Internet { client, server };
        let _offer = offer(ends, place).unwrap();
        assert_eq!(answer(ends, |_| {}, place).unwrap_err(), Failure::Stay(Reason::NoDiag));
    }

    #[test]
    fn who_listens_at_the_clients_port_is_not_answered() {
        let (_c, server, _) = connection();
        let squatter = TcpListener::bind("0.0.0.0:0").unwrap();
        let client = ([127, 0, 0, 1], squatter.local_addr().unwrap().port()).into();
        let ends = Ends::Internet { client, server: server.local_addr().unwrap() };
        let _offer = offer(ends, place).unwrap();
        assert!(matches!(answer(ends, |_| {}, place).unwrap_err(), Failure::Stay(_)));
    }

    #[test]
    fn what_might_hold_up_a_close_does_not() {
        use rustix::net::sockopt;
        let (_client, server, _) = connection();
        sockopt::set_socket_linger(&server, Some(std::time::Duration::from_secs(1000))).unwrap();
        let copy = server.try_clone().unwrap();
        dismiss(server.into());
        assert_eq!(sockopt::socket_linger(&copy).unwrap(), None);
        // Nobody can tell whether to close it would wait: it stays.
        let (file, other) = std::io::pipe().unwrap();
        dismiss(file.into());
        assert!(rustix::io::write(&other, b"x").is_ok());
    }

    #[test]
    fn garbage_instead_of_a_segment_is_refused() {
        let (_c, _s, ends) = connection();
        let offer = offer(ends, place).unwrap();
        let stranger = socket(SocketType::SEQPACKET, place).unwrap();
        connect(&stranger, &ends.name()).unwrap();
        rustix::net::send(&stranger, b"what is this", SendFlags::empty()).unwrap();
        assert_eq!(
            collect(offer.as_fd(), &mut None, ends, place).unwrap_err(),
            Failure::Stay(Reason::BadOffer)
        );
    }

    #[test]
    fn a_server_that_has_not_sent_yet_is_waited_for() {
        let (_c, _s, ends) = connection();
        let offer = offer(ends, place).unwrap();
        let slow = socket(SocketType::SEQPACKET, place).unwrap();
        connect(&slow, &ends.name()).unwrap();
        let mut arrived = None;
        let attempt = |arrived: &mut _| collect(offer.as_fd(), arrived, ends, place).unwrap_err();
        assert_eq!(attempt(&mut arrived), Failure::NotYet);
        assert!(arrived.is_some());
        drop(slow);
        assert_eq!(attempt(&mut arrived), Failure::NotYet);
        assert!(arrived.is_none());
    }

    #[test]
    fn a_port_is_announced_until_its_socket_closes() {
        let port = Service::Port(1);
        assert!(!is_announced(port, place).unwrap());
        let hint = announce(port, place).unwrap();
        assert!(hint.is_some());
        assert!(is_announced(port, place).unwrap());
        assert!(announce(port, place).unwrap().is_none());
        drop(hint);
        assert!(!is_announced(port, place).unwrap());
    }

    #[test]
    fn advice_is_given_until_its_sockets_close() {
        let name = Name::of(b"/run/advice").unwrap();
        for service in [Service::Port(2), Service::Unix(name)] {
            assert_eq!(ask(service, place), Ok(None));
            for (advice, names) in [(Advice::Short, 1), (Advice::ShortOnOne, 2)] {
                let told = tell(service, advice, place).unwrap();
                assert_eq!((told.len(), ask(service, place)), (names, Ok(Some(advice))));
                assert_eq!(tell(service, advice, place).unwrap().len(), 0);
                drop(told);
            }
            assert_eq!(ask(service, place), Ok(None));
        }
    }

    #[test]
    fn the_longest_name_fits() {
        let address = "[ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff]:65535".parse().unwrap();
        Ends::Internet { client: address, server: address }.name();
        Service::Unix(Name::of(&[b'x'; 108]).unwrap()).advice(Advice::ShortOnOne);
    }
}
