//! The settings as the environment asks for them. A wrong value is complained about, and the default is used.

use std::env::var;
use std::fs::File;
use std::io::Read;
use std::{fmt, io};

use crate::peers::Rule;
use crate::settings::{Order, Settings, class_within};

/// How much to say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u8)]
pub enum Level {
    /// Nothing.
    Off,
    /// What broke a connection.
    Error,
    /// What is not as the user wants it.
    Warn,
    /// What became of connections.
    Info,
    /// Everything.
    Debug,
}

/// `THALLUS_LOG`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    /// How much to log.
    pub level: Level,
    /// The file; none: standard error.
    pub path: Option<String>,
}

/// Bytes of a key or a list of peers, at most.
const LARGEST_FILE: u64 = 1 << 20;

/// A value that can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The variable.
    pub name: &'static str,
    /// Its value.
    pub given: String,
    /// What is wrong, and what is used instead.
    pub text: String,
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}: {}", self.name, self.given, self.text)
    }
}

/// Values that can't be used, in the order in which they were met.
#[derive(Debug, Default)]
pub struct Complaints(pub Vec<Complaint>);

impl Complaints {
    fn add(&mut self, name: &'static str, given: &str, text: impl Into<String>) {
        self.0.push(Complaint { name, given: given.to_owned(), text: text.into() });
    }

    fn read<T>(
        &mut self,
        name: &'static str,
        wanted: &str,
        parse: impl Fn(&str) -> Option<T>,
        mut apply: impl FnMut(T),
    ) {
        let Some(text) = value(name) else { return };
        match parse(&text) {
            Some(value) => apply(value),
            None => self.add(name, &text, format!("not {wanted}; taking the default")),
        }
    }

    fn read_up_to(&mut self, name: &'static str, largest: u8, setting: &mut u8) {
        let parse = |text: &str| text.trim().parse().ok().filter(|&number| number <= largest);
        self.read(name, &format!("a number from 0 to {largest}"), parse, |number| *setting = number);
    }
}

/// A variable's value. An empty one is as good as none.
fn value(name: &str) -> Option<String> {
    var(name).ok().filter(|text| !text.is_empty())
}

/// Whether the environment switches the library off.
pub fn is_off() -> bool {
    matches!(var("THALLUS").as_deref(), Ok("off" | "0"))
}

/// Where to log, if anywhere.
pub fn log(complaints: &mut Complaints) -> Option<Log> {
    let text = value("THALLUS_LOG")?;
    let (name, path) = text.split_once(':').map_or((text.as_str(), None), |(name, path)| (name, Some(path)));
    let level = level(name).unwrap_or_else(|| {
        let wrong = "the level is off, error, warn, info or debug; taking warn";
        complaints.add("THALLUS_LOG", &text, wrong);
        Level::Warn
    });
    Some(Log { level, path: path.map(str::to_owned) })
}

fn level(name: &str) -> Option<Level> {
    Some(match name {
        "off" => Level::Off,
        "error" => Level::Error,
        "warn" => Level::Warn,
        "info" => Level::Info,
        "debug" | "trace" => Level::Debug,
        _ => return None,
    })
}

/// The settings; what no variable is about is as in `chosen`.
pub fn settings(mut chosen: Settings, complaints: &mut Complaints) -> Settings {
    if let (Ok(other), false) = (var("THALLUS"), is_off())
        && !matches!(other.as_str(), "" | "on" | "1")
    {
        complaints.add("THALLUS", &other, "on or off; taking on");
    }
    let fabric = value("THALLUS_FABRIC").unwrap_or_default();
    let (shm, verbs) = match fabric.as_str() {
        "" | "auto" => (true, true),
        "shm" => (true, false),
        "verbs" => (false, true),
        "off" | "tcp" => (false, false),
        other => {
            complaints.add("THALLUS_FABRIC", other, "auto, shm, verbs or off; taking auto");
            (true, true)
        }
    };
    chosen.shm = shm;
    if verbs {
        chosen.verbs.on_one_host = !shm;
        chosen.verbs.peers = peers(complaints);
        chosen.verbs.key = key(&mut chosen.verbs.peers, complaints);
    }
    let verbs = &mut chosen.verbs;
    complaints.read_up_to("THALLUS_RDMA_TIMEOUT", 31, &mut verbs.timeout);
    complaints.read_up_to("THALLUS_RDMA_RETRY", 7, &mut verbs.retries);
    complaints.read_up_to("THALLUS_RDMA_SL", 15, &mut verbs.service_level);
    complaints.read("THALLUS_RDMA_ORDER", "one-write or two-writes", order, |order| verbs.order = order);
    complaints.read("THALLUS_PORTS", "a list such as 5432,8000-8100", ports, |ports| chosen.ports = ports);
    let calls = |text: &str| number(text).filter(|&calls| calls > 0);
    complaints.read("THALLUS_UPGRADE_AFTER", "a number of calls from 1", calls, |calls| {
        chosen.upgrade_after = u32::try_from(calls).unwrap_or(u32::MAX);
        chosen.learns = false;
    });
    complaints.read("THALLUS_SPIN_US", "a number of microseconds", number, |us| {
        chosen.spin_ns = us.saturating_mul(1000)
    });
    complaints.read("THALLUS_LEND", "0 or a size from 8K", none_or_size, |bytes| chosen.lend_bytes = bytes);
    complaints.read("THALLUS_RING", "a size from 8K", size, |bytes| {
        chosen.largest_class = class_within(bytes);
        chosen.verbs.ring = bytes;
    });
    chosen
}

fn peers(complaints: &mut Complaints) -> Vec<Rule> {
    let mut rules = Vec::new();
    let wanted = "a list such as 10.0.0.0/24:5432,10.1.2.3";
    complaints.read("THALLUS_PEERS", wanted, Rule::parse_list, |list| rules = list);
    let name = "THALLUS_PEERS_FILE";
    if let Some(path) = value(name) {
        let read = read_file(&path).map(|text| {
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<_> = text.lines().map(|line| line.split('#').next().unwrap_or_default()).collect();
            Rule::parse_list(&lines.join("\n"))
        });
        match read {
            Ok(Some(list)) => rules.extend(list),
            Ok(None) => complaints.add(name, &path, "not a list such as 10.0.0.0/24:5432; ignoring it"),
            Err(error) => complaints.add(name, &path, format!("{error}; ignoring it")),
        }
    }
    rules
}

/// The shared key. One that is asked for and can't be read leaves nobody to greet: unsigned greetings would be worse.
fn key(peers: &mut Vec<Rule>, complaints: &mut Complaints) -> Option<Vec<u8>> {
    let name = "THALLUS_KEY_FILE";
    let path = value(name)?;
    match read_file(&path) {
        Ok(key) if !key.trim_ascii().is_empty() => return Some(key.trim_ascii().to_vec()),
        Ok(_) => complaints.add(name, &path, "it is empty; staying on TCP with other hosts"),
        Err(error) => complaints.add(name, &path, format!("{error}; staying on TCP with other hosts")),
    }
    peers.clear();
    None
}

/// A regular file of no more than [`LARGEST_FILE`] bytes: reading anything else could last for ever.
fn read_file(path: &str) -> io::Result<Vec<u8>> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = File::options().read(true).custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path)?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut content = Vec::new();
    file.take(LARGEST_FILE + 1).read_to_end(&mut content)?;
    if content.len() as u64 > LARGEST_FILE {
        return Err(io::Error::from(io::ErrorKind::FileTooLarge));
    }
    Ok(content)
}

fn order(text: &str) -> Option<Order> {
    match text {
        "one-write" => Some(Order::OneWrite),
        "two-writes" => Some(Order::TwoWrites),
        _ => None,
    }
}

fn number(text: &str) -> Option<u64> {
    text.trim().parse().ok()
}

fn none_or_size(text: &str) -> Option<u64> {
    if text.trim() == "0" { Some(0) } else { size(text) }
}

fn size(text: &str) -> Option<u64> {
    let text = text.trim();
    let (digits, factor) = match text.as_bytes().last()? {
        b'k' | b'K' => (&text[..text.len() - 1], 1 << 10),
        b'm' | b'M' => (&text[..text.len() - 1], 1 << 20),
        b'g' | b'G' => (&text[..text.len() - 1], 1 << 30),
        _ => (text, 1),
    };
    let size = digits.parse::<u64>().ok()?.checked_mul(factor)?;
    (size >= 8192).then_some(size)
}

fn ports(text: &str) -> Option<Vec<(u16, u16)>> {
    text.split(',')
        .map(|part| {
            let part = part.trim();
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let range = (first.parse().ok()?, last.parse().ok()?);
            (range.0 <= range.1).then_some(range)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_would_be_read_for_ever_are_refused() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = std::env::temp_dir().join(format!("thallus-environment-{}", crate::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = |name| folder.join(name).into_os_string().into_string().unwrap();
        mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::fs::write(path("large"), vec![b'k'; LARGEST_FILE as usize + 1]).unwrap();
        std::fs::write(path("key"), b"secret").unwrap();
        let read = ["pipe", "large", "key"].map(|name| read_file(&path(name)).map_err(|error| error.kind()));
        let device = read_file("/dev/zero").map_err(|error| error.kind());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            read,
            [Err(io::ErrorKind::Other), Err(io::ErrorKind::FileTooLarge), Ok(b"secret".to_vec())]
        );
        assert_eq!(device, Err(io::ErrorKind::Other));
    }
}
