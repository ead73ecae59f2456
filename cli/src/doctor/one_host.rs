//! What shared memory on one host needs: each step of an upgrade, made with a connection of this process's own.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::fd::AsFd;

use rustix::io::Errno;
use serde::Serialize;
use thallus_transport::reason::Reason;
use thallus_transport::rendezvous::{self, Ends, Failure};
use thallus_transport::segment::Segment;
use thallus_transport::settings::settings;
use thallus_transport::tcp;

use super::Problem;
use super::sheet::Sheet;

/// What was tried.
#[derive(Debug, Serialize)]
pub(super) struct OneHost {
    /// Whether a connection between two ends on this host can leave TCP.
    pub(super) works: bool,
    /// Why it would stay there: a name as `thallus status` shows it.
    pub(super) reason: Option<&'static str>,
    checks: Vec<Check>,
}

#[derive(Debug, Serialize)]
struct Check {
    name: &'static str,
    works: bool,
    /// What the kernel said.
    error: Option<String>,
}

/// Why a step failed: what the kernel said, the reason that a connection would show, and what to do.
struct Refusal {
    error: String,
    reason: Option<Reason>,
    remedy: &'static str,
}

/// What to do where the kernel would, but may not.
const CONFINED: &str =
    "allow it in the container's seccomp filter, or in the security profile (README, AppArmor)";

/// Tries each step.
pub(super) fn look(problems: &mut Vec<Problem>) -> OneHost {
    let connection = Connection::make();
    let with = |step: fn(&Connection) -> Result<(), Refusal>| match &connection {
        Ok(connection) => step(connection),
        Err(error) => Err(Refusal {
            error: format!("no connection to try it with: {error}"),
            reason: None,
            remedy: "bring the loopback interface up (ip link set lo up)",
        }),
    };
    let steps = [
        ("memfd", memory()),
        ("abstract_sockets", with(abstract_sockets)),
        ("sock_diag", with(sock_diag)),
        ("byte_counts", with(byte_counts)),
        ("upgrade", with(upgrade)),
        ("proc", proc()),
    ];
    let mut reason = None;
    let checks = steps.into_iter().map(|(name, outcome)| {
        let Err(refusal) = outcome else { return Check { name, works: true, error: None } };
        if reason.is_none() {
            reason = refusal.reason.map(Reason::name);
        }
        // One cause is told once.
        let known = problems.last().is_some_and(|problem| {
            problem.part == "one_host" && (name == "upgrade" || problem.remedy == refusal.remedy)
        });
        let shown = refusal.reason.map(|reason| format!(" (connections show {reason})")).unwrap_or_default();
        let problem = format!("{}: {}{shown}", label(name), refusal.error);
        if !known {
            problems.push(Problem::new("one_host", problem, refusal.remedy));
        }
        Check { name, works: false, error: Some(refusal.error) }
    });
    let checks: Vec<_> = checks.collect();
    // An upgrade does without /proc.
    OneHost { works: checks.iter().all(|check| check.works || check.name == "proc"), reason, checks }
}

fn label(name: &str) -> &'static str {
    match name {
        "memfd" => "sealed memory",
        "abstract_sockets" => "abstract sockets",
        "sock_diag" => "sock_diag",
        "byte_counts" => "byte counts",
        "upgrade" => "all steps together",
        _ => "/proc",
    }
}

impl OneHost {
    pub(super) fn show(&self, sheet: &mut Sheet) {
        for Check { name, works, .. } in &self.checks {
            sheet.fact(label(name), if *works { "tried, works" } else { "does not work" });
        }
    }
}

/// Both ends of a TCP connection.
struct Connection {
    client: TcpStream,
    server: TcpStream,
}

impl Connection {
    fn make() -> io::Result<Self> {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
        let client = TcpStream::connect(listener.local_addr()?)?;
        let (server, _) = listener.accept()?;
        Ok(Self { client, server })
    }

    fn addresses(&self) -> io::Result<(std::net::SocketAddr, std::net::SocketAddr)> {
        Ok((self.client.local_addr()?, self.server.local_addr()?))
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        let kind = error.raw_os_error().map(rustix::io::Errno::from_raw_os_error);
        let (reason, remedy) = match kind {
            Some(rustix::io::Errno::FBIG) => (Some(Reason::NoMemory), "ulimit -f unlimited"),
            Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE) => {
                (Some(Reason::NoFds), "ulimit -n 65536")
            }
            Some(rustix::io::Errno::NOMEM | rustix::io::Errno::NOSPC | rustix::io::Errno::NOBUFS) => {
                (Some(Reason::NoMemory), "more memory for the container, ulimit -v unlimited")
            }
            Some(rustix::io::Errno::NOSYS) => (Some(Reason::KernelTooOld), "Linux 5.14 or newer"),
            Some(rustix::io::Errno::PERM | rustix::io::Errno::ACCESS) => (Some(Reason::Forbidden), CONFINED),
            _ => (Some(Reason::NoAnswer), "a kernel or container that allows it"),
        };
        Self { error: error.to_string(), reason, remedy }
    }
}

fn memory() -> Result<(), Refusal> {
    Segment::create([0; 16]).map(drop).map_err(|errno| io::Error::from(errno).into())
}

fn by_reason(reason: Reason) -> Refusal {
    let remedy = match reason {
        Reason::NoFds => "ulimit -n 65536",
        Reason::NoMemory => "more memory for the container, ulimit -v unlimited, ulimit -f unlimited",
        Reason::KernelTooOld => "Linux 5.14 or newer",
        Reason::NoDiag | Reason::Remote => "see sock_diag",
        Reason::NotOwner => {
            "a user that has an id in this user namespace, other than 65534 (runAsUser, podman --userns)"
        }
        _ => CONFINED,
    };
    Refusal { error: format!("refused ({reason})"), reason: Some(reason), remedy }
}

fn abstract_sockets(connection: &Connection) -> Result<(), Refusal> {
    let (client, server) = connection.addresses()?;
    rendezvous::offer(Ends::Internet { client, server }, settings().place).map(drop).map_err(by_reason)
}

fn sock_diag(connection: &Connection) -> Result<(), Refusal> {
    const REMEDY: &str = "modprobe tcp_diag, or a kernel with CONFIG_INET_DIAG; gVisor has none";
    let (client, server) = connection.addresses()?;
    match tcp::owner_of(client, server) {
        Ok(Some(_)) => Ok(()),
        // Its sock_diag knows no TCP.
        Ok(None) => Err(Refusal {
            error: "does not know a connection that exists".into(),
            reason: Some(Reason::NoDiag),
            remedy: REMEDY,
        }),
        Err(errno) => Err(Refusal {
            error: io::Error::from(errno).to_string(),
            reason: Some(Reason::NoDiag),
            remedy: match errno {
                Errno::AFNOSUPPORT => "AF_NETLINK in RestrictAddressFamilies= of the service's unit",
                Errno::ACCESS | Errno::PERM => CONFINED,
                _ => REMEDY,
            },
        }),
    }
}

fn byte_counts(connection: &Connection) -> Result<(), Refusal> {
    let socket = connection.client.as_fd();
    tcp::counts(socket).and_then(|_| tcp::bytes_read(socket)).map(drop).map_err(|errno| Refusal {
        error: io::Error::from(errno).to_string(),
        reason: Some(Reason::KernelTooOld),
        remedy: "Linux 4.19 or newer",
    })
}

/// The whole way of a connection into shared memory, but for its bytes.
fn upgrade(connection: &Connection) -> Result<(), Refusal> {
    let (client, server) = connection.addresses()?;
    let ends = Ends::Internet { client, server };
    let place = settings().place;
    let because = |failure| match failure {
        Failure::Stay(reason) => by_reason(reason),
        Failure::NotYet => by_reason(Reason::NoAnswer),
    };
    let offer = rendezvous::offer(ends, place).map_err(by_reason)?;
    let ours = rendezvous::answer(ends, |_| {}, place).map_err(because)?;
    let theirs = rendezvous::collect(offer.as_fd(), &mut None, ends, place).map_err(because)?;
    if theirs.set_ready() && ours.is_ready() { Ok(()) } else { Err(by_reason(Reason::BadOffer)) }
}

fn proc() -> Result<(), Refusal> {
    fs::read_dir("/proc/self/fd").map(drop).map_err(|error| Refusal {
        error: format!("{error}: thallus status sees no process"),
        reason: None,
        remedy: "mount -t proc proc /proc",
    })
}
