//! `thallus bench verbs`: what a message costs over an RDMA device, way by way, beside TCP between the same two hosts.
//!
//! ```text
//!   host b   thallus bench verbs --listen         one client, then it ends
//!   host a   thallus bench verbs --peer b         prints the tables
//! ```
//!
//! No library is preloaded: these are a queue pair and the parts of the fabric's message, and nothing above
//! (`thallus_transport::verbs::probe`). So the tables tell what a device can do and what each part costs there, not what a program
//! gains.
//!
//! | module | |
//! |---|---|
//! | `plan` | what is measured |
//! | `session` | the two sides: what they tell each other on TCP, and the round trips |
//! | `device` | what the tables say about a device and its link |
//! | `results` | medians; Markdown and JSON |

mod device;
mod plan;
mod results;
mod session;

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::path::PathBuf;

use anyhow::{Context, ensure};

use super::output::Output;
use crate::tell;

/// Where a server listens that is not told another port.
const PORT: u16 = 18625;

/// Measure an RDMA device between two hosts: round trips of 64 bytes over TCP and by each way of writing a message, and what inline
/// sends gain. Needs no privilege but access to the device; anybody who reaches the port can be the client.
#[derive(Debug, clap::Args)]
#[command(group = clap::ArgGroup::new("side").required(true))]
pub(crate) struct Args {
    /// Be the server of one client, at this address, or port, or any.
    #[arg(long, value_name = "ADDRESS", num_args = 0..=1, default_missing_value = "", group = "side")]
    listen: Option<String>,
    /// Measure with the server on this host, which runs `thallus bench verbs --listen`.
    #[arg(long, value_name = "HOST[:PORT]", group = "side")]
    peer: Option<String>,
    /// Measurements of each case, in turn.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000), conflicts_with = "listen")]
    rounds: u32,
    /// Seconds of one measurement, after a warm-up.
    #[arg(long, default_value_t = 1.0, value_parser = super::seconds, conflicts_with = "listen")]
    seconds: f64,
    /// Also write the results as JSON.
    #[arg(long, value_name = "FILE", conflicts_with = "listen")]
    json: Option<PathBuf>,
}

/// # Errors
/// There is no device, or none on the way to the other host; the other side is not there, is of another version, or does not
/// answer; a message had other bytes than were sent.
pub(super) fn run(args: &Args) -> anyhow::Result<()> {
    device::require()?;
    if let Some(address) = &args.listen {
        let listener = listen(address)?;
        tell(format_args!("waiting for thallus bench verbs --peer at {}\n", listener.local_addr()?));
        return session::serve(&listener);
    }
    let peer = args.peer.as_deref().context("neither --listen nor --peer")?;
    let addresses = resolve(peer)?;
    let file = Output::open(args.json.as_deref())?;
    let outcome = session::drive(&addresses, args.rounds, args.seconds)?;
    // What can't be written is not to take the rest with it.
    let printed = crate::print(&results::markdown(&outcome, args.rounds, args.seconds));
    file.write(|| Ok(format!("{:#}\n", results::json(&outcome, args.rounds, args.seconds)))).and(printed)
}

fn listen(address: &str) -> anyhow::Result<TcpListener> {
    let port = if address.is_empty() { Ok(PORT) } else { address.parse() };
    if let Ok(port) = port {
        // Where there is no IPv6, there is no such address.
        return TcpListener::bind((Ipv6Addr::UNSPECIFIED, port))
            .or_else(|_| TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)))
            .with_context(|| format!("listen on port {port}"));
    }
    TcpListener::bind(&resolve(address)?[..]).with_context(|| format!("listen at {address}"))
}

/// The addresses of `HOST`, or `HOST:PORT`.
fn resolve(host: &str) -> anyhow::Result<Vec<SocketAddr>> {
    let bare = host.trim_start_matches('[').trim_end_matches(']');
    let addresses: Vec<_> = match bare.parse::<Ipv6Addr>() {
        Ok(address) => vec![SocketAddr::from((address, PORT))],
        Err(_) if host.contains(':') => {
            host.to_socket_addrs().with_context(|| format!("look {host} up"))?.collect()
        }
        Err(_) => (host, PORT).to_socket_addrs().with_context(|| format!("look {host} up"))?.collect(),
    };
    ensure!(!addresses.is_empty(), "{host} has no address");
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_named_with_a_port_or_without() {
        let one = |host| resolve(host).unwrap()[0].to_string();
        assert_eq!(one("10.0.0.2"), "10.0.0.2:18625");
        assert_eq!(one("10.0.0.2:7"), "10.0.0.2:7");
        assert_eq!(one("::1"), "[::1]:18625");
        assert_eq!(one("[::1]:7"), "[::1]:7");
        assert_eq!(one("[::1]"), "[::1]:18625");
    }
}
