//! The settings as the environment asks for them, and a file that it names. A wrong value is complained about, and the
//! default is used.

use std::env::{var, var_os};
use std::{fmt, io};

use rustix::fs::{FileType, Mode, OFlags, fstat, open, readlink};

use crate::configuration::{Configuration, Entry, KEYS};
use crate::lending::AREA_BYTES;
use crate::peers::Rule;
use crate::settings::{IoUring, Order, Settings, UnixRule, class_within};

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
const LARGEST_FILE: usize = 1 << 20;

/// Bytes of a configuration, at most: each program reads it when it begins.
const LARGEST_CONFIGURATION: usize = 64 << 10;

/// What is done without the key that is asked for.
pub const NO_PEERS: &str = "staying on TCP with other hosts";

/// What is wrong with a value that is no text.
const NOT_TEXT: &str = "not UTF-8";

/// The variable that names the configuration.
pub const CONFIG: &str = "THALLUS_CONFIG";

/// A value that can't be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Complaint {
    /// The variable, also of a value that a file gives; [`CONFIG`] for a line of no meaning.
    pub name: &'static str,
    /// Its value, or the line.
    pub given: String,
    /// What is wrong.
    pub text: String,
    /// What the library does instead.
    pub instead: &'static str,
    /// The file that gives it, and its line, as `FILE:LINE`.
    pub place: Option<String>,
}

impl Complaint {
    /// What is wrong, for who does nothing instead.
    pub fn wrong(&self) -> String {
        match &self.place {
            Some(place) => format!("{place}: {}: {}", self.given, self.text),
            None => format!("{}={}: {}", self.name, self.given, self.text),
        }
    }
}

impl fmt::Display for Complaint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}; {}", self.wrong(), self.instead)
    }
}

/// A value, and where it is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Value {
    /// Not empty.
    pub text: String,
    /// The line of the file; `None` if it is from the environment.
    pub line: Option<Entry>,
}

/// What the user has asked for: variables, and lines of a file where there is no variable.
#[derive(Clone, Debug, Default)]
pub struct Given {
    only_file: bool,
    path: String,
    lines: Vec<Entry>,
    /// Nobody knows all that the file was to say.
    doubtful: bool,
}

impl Given {
    /// In this process.
    pub fn here(complaints: &mut Complaints) -> Self {
        let Some(path) = value(CONFIG) else {
            let Some(path) = not_text(CONFIG) else { return Self::default() };
            complaints.add(CONFIG, &path, NOT_TEXT, "going on without it");
            return Self::without(path);
        };
        match read_configuration(&path) {
            Err(error) => {
                complaints.add(CONFIG, &path, error.to_string(), "going on without it");
                Self::without(path)
            }
            Ok(read) => {
                complaints.add_wrong_lines(&path, &read);
                if !read.has_programs() {
                    return Self::of(path, &read, []);
                }
                executable().map(|program| Self::of(path.clone(), &read, program)).unwrap_or_else(|errno| {
                    let wrong = format!("nobody knows which of its sections count: /proc/self/exe: {errno}");
                    complaints.add(CONFIG, &path, wrong, "going on without them");
                    Self { doubtful: true, ..Self::of(path, &read, []) }
                })
            }
        }
    }

    /// In a process of the program whose executable file is at `program`.
    pub fn of(path: String, read: &Configuration, program: impl AsRef<[u8]>) -> Self {
        let doubtful = !read.wrong.is_empty();
        Self { only_file: false, path, lines: read.for_program(program), doubtful }
    }

    /// With a file that can't be read.
    pub fn without(path: String) -> Self {
        Self { path, doubtful: true, ..Self::default() }
    }

    /// A variable's value; one that is empty is as good as none.
    pub fn value(&self, name: &str) -> Option<Value> {
        let variable = if self.only_file { None } else { value(name) };
        if let Some(text) = variable {
            return Some(Value { text, line: None });
        }
        let line = self.lines.iter().find(|line| line.name == name && !line.value.is_empty())?;
        Some(Value { text: line.value.clone(), line: Some(line.clone()) })
    }

    /// Whether the library is switched off.
    pub fn is_off(&self) -> bool {
        self.value("THALLUS").is_some_and(|value| says_off(&value.text))
    }

    fn complain(
        &self,
        complaints: &mut Complaints,
        name: &'static str,
        value: &Value,
        text: impl Into<String>,
        instead: &'static str,
    ) {
        let text = text.into();
        complaints.0.push(match &value.line {
            None => Complaint { name, given: value.text.clone(), text, instead, place: None },
            Some(Entry { line, key, value, .. }) => {
                let place = Some(format!("{}:{line}", self.path));
                Complaint { name, given: format!("{key} = {value}"), text, instead, place }
            }
        });
    }

    /// Of variables whose value is no text. What else is done about them is said where they are read.
    fn complain_of_no_text(&self, complaints: &mut Complaints) {
        let names = KEYS.iter().map(|&(_, name)| name);
        for name in
            names.filter(|&name| !self.only_file && !matches!(name, "THALLUS_KEY_FILE" | "THALLUS_LOG"))
        {
            if let Some(text) = not_text(name) {
                complaints.add(name, &text, NOT_TEXT, "going on without it");
            }
        }
    }

    fn read<T>(
        &self,
        complaints: &mut Complaints,
        name: &'static str,
        wanted: &str,
        parse: impl Fn(&str) -> Option<T>,
        mut apply: impl FnMut(T),
    ) {
        let Some(value) = self.value(name) else { return };
        match parse(&value.text) {
            Some(value) => apply(value),
            None => self.complain(complaints, name, &value, format!("not {wanted}"), "taking the default"),
        }
    }

    fn read_up_to(&self, complaints: &mut Complaints, name: &'static str, largest: u8, setting: &mut u8) {
        let parse = |text: &str| text.trim().parse().ok().filter(|&number| number <= largest);
        let wanted = format!("a number from 0 to {largest}");
        self.read(complaints, name, &wanted, parse, |number| *setting = number);
    }
}

/// Reads a configuration file. Fails as open(2) and read(2) do, and if it is no regular file, or too large.
pub fn read_configuration(path: &str) -> io::Result<Configuration> {
    Ok(Configuration::parse(&read_file(path, LARGEST_CONFIGURATION)?))
}

/// All that is wrong with a configuration, whatever the program: each line on its own.
pub fn check(path: &str, read: &Configuration) -> Complaints {
    let mut complaints = Complaints::default();
    complaints.add_wrong_lines(path, read);
    for line in read.entries() {
        let alone =
            Given { only_file: true, path: path.to_owned(), lines: vec![line.clone()], ..Given::default() };
        log(&alone, &mut complaints);
        settings(Settings::default(), &alone, &mut complaints);
    }
    complaints
}

/// The path of the file that this process executes. Fails without `/proc`.
fn executable() -> rustix::io::Result<Vec<u8>> {
    let mut path = readlink("/proc/self/exe", Vec::new())?.into_bytes();
    if let Some(path_length) = path.strip_suffix(b" (deleted)").map(<[u8]>::len) {
        path.truncate(path_length);
    }
    Ok(path)
}

/// Values that can't be used, in the order in which they were met.
#[derive(Debug, Default)]
pub struct Complaints(pub Vec<Complaint>);

impl Complaints {
    fn add(&mut self, name: &'static str, given: &str, text: impl Into<String>, instead: &'static str) {
        self.0.push(Complaint { name, given: given.to_owned(), text: text.into(), instead, place: None });
    }

    fn add_wrong_lines(&mut self, path: &str, read: &Configuration) {
        self.0.extend(read.wrong.iter().map(|wrong| Complaint {
            name: CONFIG,
            given: wrong.given.clone(),
            text: wrong.text.to_owned(),
            instead: "ignoring the line",
            place: Some(format!("{path}:{}", wrong.line)),
        }));
    }
}

/// A variable's value. An empty one is as good as none.
fn value(name: &str) -> Option<String> {
    var(name).ok().filter(|text| !text.is_empty())
}

/// A variable's value if it is no text, as it can be shown.
pub fn not_text(name: &str) -> Option<String> {
    let value = var_os(name)?;
    if value.to_str().is_none() { Some(value.to_string_lossy().into_owned()) } else { None }
}

/// Whether a variable switches the library off.
pub fn is_off() -> bool {
    value("THALLUS").is_some_and(|text| says_off(&text))
}

fn says_off(text: &str) -> bool {
    matches!(text, "off" | "0")
}

/// Where to log, if anywhere.
pub fn log(given: &Given, complaints: &mut Complaints) -> Option<Log> {
    let name = "THALLUS_LOG";
    let value = match not_text(name).filter(|_| !given.only_file) {
        None => given.value(name)?,
        Some(text) if text.contains(':') => {
            complaints.add(name, &text, NOT_TEXT, "nothing is logged");
            return None;
        }
        Some(text) => Value { text, line: None },
    };
    let text = &value.text;
    let (word, path) = text.split_once(':').map_or((text.as_str(), None), |(word, path)| (word, Some(path)));
    if path == Some("") {
        given.complain(complaints, name, &value, "no path behind the colon", "nothing is logged");
        return None;
    }
    let level = level(word).unwrap_or_else(|| {
        let wrong = "the level is off, error, warn, info or debug";
        given.complain(complaints, name, &value, wrong, "taking warn");
        Level::Warn
    });
    Some(Log { level, path: path.map(str::to_owned) })
}

/// The level of this name.
pub fn level(name: &str) -> Option<Level> {
    Some(match name {
        "off" => Level::Off,
        "error" => Level::Error,
        "warn" => Level::Warn,
        "info" => Level::Info,
        "debug" | "trace" => Level::Debug,
        _ => return None,
    })
}

/// The settings; what nothing is given about is as in `chosen`.
pub fn settings(mut chosen: Settings, given: &Given, complaints: &mut Complaints) -> Settings {
    given.complain_of_no_text(complaints);
    if let (Some(other), false) = (given.value("THALLUS"), given.is_off())
        && !matches!(other.text.as_str(), "on" | "1")
    {
        given.complain(complaints, "THALLUS", &other, "on or off", "taking on");
    }
    let fabric = given.value("THALLUS_FABRIC");
    let (shm, verbs) = match fabric.as_ref().map(|value| value.text.as_str()) {
        None | Some("auto") => (true, true),
        Some("shm") => (true, false),
        Some("verbs") => (false, true),
        Some("off" | "tcp") => (false, false),
        Some(_) => {
            let wrong = "auto, shm, verbs or off";
            fabric
                .iter()
                .for_each(|value| given.complain(complaints, "THALLUS_FABRIC", value, wrong, "taking auto"));
            (true, true)
        }
    };
    chosen.shm = shm;
    if verbs {
        chosen.verbs.on_one_host = !shm;
        chosen.verbs.peers = peers(given, complaints);
        chosen.verbs.key = key(&mut chosen.verbs.peers, given, complaints);
        if given.doubtful && chosen.verbs.key.is_none() && !chosen.verbs.peers.is_empty() {
            let doubt = "what makes no sense may have named a key";
            complaints.add(CONFIG, &given.path, doubt, NO_PEERS);
            chosen.verbs.peers.clear();
        }
    }
    let verbs = &mut chosen.verbs;
    given.read_up_to(complaints, "THALLUS_RDMA_TIMEOUT", 31, &mut verbs.timeout);
    given.read_up_to(complaints, "THALLUS_RDMA_RETRY", 7, &mut verbs.retries);
    given.read_up_to(complaints, "THALLUS_RDMA_SL", 15, &mut verbs.service_level);
    given.read(complaints, "THALLUS_RDMA_ORDER", "one-write or two-writes", order, |order| {
        verbs.order = order
    });
    given.read(complaints, "THALLUS_PORTS", "a list such as 5432,8000-8100", ports, |ports| {
        chosen.ports = ports
    });
    let names = "off, all or a list such as /run/postgresql/*,@name,!/run/other";
    given.read(complaints, "THALLUS_UNIX", names, UnixRule::parse_list, |list| chosen.unix = list);
    let calls = |text: &str| number(text).filter(|&calls| calls > 0);
    given.read(complaints, "THALLUS_UPGRADE_AFTER", "a number of calls from 1", calls, |calls| {
        chosen.upgrade_after = u32::try_from(calls).unwrap_or(u32::MAX);
        chosen.learns = false;
    });
    given.read(complaints, "THALLUS_SPIN_US", "a number of microseconds", number, |us| {
        chosen.spin_ns = us.saturating_mul(1000)
    });
    given.read(complaints, "THALLUS_LEND", "0 or a size from 8K", none_or_size, |bytes| {
        chosen.lend_bytes = bytes
    });
    if let Some(value) = given.value("THALLUS_LEND").filter(|_| chosen.lend_bytes > AREA_BYTES as u64) {
        given.complain(complaints, "THALLUS_LEND", &value, "no more than 1G can be lent", "taking 1G");
        chosen.lend_bytes = AREA_BYTES as u64;
    }
    given.read(complaints, "THALLUS_RING", "a size from 8K", size, |bytes| {
        chosen.largest_class = class_within(bytes);
        chosen.verbs.ring = bytes;
    });
    given
        .read(complaints, "THALLUS_IO_URING", "auto, allow or deny", io_uring, |rule| chosen.io_uring = rule);
    chosen
}

fn peers(given: &Given, complaints: &mut Complaints) -> Vec<Rule> {
    let mut rules = Vec::new();
    let wanted = "a list such as 10.0.0.0/24:5432,10.1.2.3";
    given.read(complaints, "THALLUS_PEERS", wanted, Rule::parse_list, |list| rules = list);
    let name = "THALLUS_PEERS_FILE";
    if let Some(path) = given.value(name) {
        let read = read_file(&path.text, LARGEST_FILE).map(|text| {
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<_> = text.lines().map(|line| line.split('#').next().unwrap_or_default()).collect();
            Rule::parse_list(&lines.join("\n"))
        });
        match read {
            Ok(Some(list)) => rules.extend(list),
            Ok(None) => {
                given.complain(complaints, name, &path, "not a list such as 10.0.0.0/24:5432", "ignoring it");
            }
            Err(error) => given.complain(complaints, name, &path, error.to_string(), "ignoring it"),
        }
    }
    rules
}

/// The shared key. One that is asked for and can't be read leaves nobody to greet: unsigned greetings would be worse.
fn key(peers: &mut Vec<Rule>, given: &Given, complaints: &mut Complaints) -> Option<Vec<u8>> {
    let name = "THALLUS_KEY_FILE";
    let Some(path) = given.value(name) else {
        if let Some(path) = not_text(name).filter(|_| !given.only_file) {
            complaints.add(name, &path, NOT_TEXT, NO_PEERS);
            peers.clear();
        }
        return None;
    };
    let wrong = match read_file(&path.text, LARGEST_FILE) {
        Ok(key) if !key.trim_ascii().is_empty() => return Some(key.trim_ascii().to_vec()),
        Ok(_) => "it is empty".to_owned(),
        Err(error) => error.to_string(),
    };
    given.complain(complaints, name, &path, wrong, NO_PEERS);
    peers.clear();
    None
}

/// A regular file of no more than `most` bytes: reading anything else could last for ever.
fn read_file(path: &str, most: usize) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = open(path, flags, Mode::empty())?;
    if !FileType::from_raw_mode(fstat(&file)?.st_mode).is_file() {
        return Err(io::Error::other("it is no regular file"));
    }
    let mut content = Vec::new();
    let mut part = [0; 4096];
    loop {
        let count = rustix::io::retry_on_intr(|| rustix::io::read(&file, &mut part))?;
        if count == 0 {
            return Ok(content);
        }
        content.extend_from_slice(&part[..count]);
        if content.len() > most {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
    }
}

fn order(text: &str) -> Option<Order> {
    match text {
        "one-write" => Some(Order::OneWrite),
        "two-writes" => Some(Order::TwoWrites),
        _ => None,
    }
}

fn io_uring(text: &str) -> Option<IoUring> {
    match text {
        "auto" => Some(IoUring::Auto),
        "allow" => Some(IoUring::Allow),
        "deny" => Some(IoUring::Deny),
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

/// Ports and ranges of them, both ends included.
pub fn ports(text: &str) -> Option<Vec<(u16, u16)>> {
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

    fn file(text: &str) -> (Given, Complaints) {
        let read = Configuration::parse(text.as_bytes());
        (Given { only_file: true, ..Given::of("F".into(), &read, "p") }, check("F", &read))
    }

    #[test]
    fn a_line_does_what_its_variable_does() {
        let (given, complaints) = file(
            "fabric = shm\nports = 1,5-9\nupgrade-after = 3\nspin-us = 7\nring = 8K\nlend = 0\nio-uring = deny\nlog = info:/x\n\
             [program p]\nspin-us = 8\n[program q]\nmode = off",
        );
        assert_eq!(complaints.0, []);
        let mut none = Complaints::default();
        let chosen = settings(Settings::default(), &given, &mut none);
        assert_eq!((chosen.shm, chosen.ports, chosen.upgrade_after), (true, vec![(1, 1), (5, 9)], 3));
        assert_eq!((chosen.spin_ns, chosen.largest_class, chosen.lend_bytes), (8000, 0, 0));
        assert_eq!(chosen.io_uring, IoUring::Deny);
        assert_eq!(log(&given, &mut none), Some(Log { level: Level::Info, path: Some("/x".into()) }));
        assert!(!given.is_off() && file("mode = off").0.is_off());
        let (given, _) =
            file("fabric = verbs\npeers = 10.0.0.0/8\nrdma-retry = 3\nrdma-sl = 1\nrdma-timeout = 5");
        let verbs = settings(Settings::default(), &given, &mut none).verbs;
        assert_eq!((verbs.peers.len(), verbs.on_one_host), (1, true));
        assert_eq!((verbs.retries, verbs.service_level, verbs.timeout), (3, 1, 5));
        assert_eq!(none.0, []);
    }

    #[test]
    fn every_wrong_line_is_named_also_of_another_program() {
        let (_, complaints) = file(
            "ports = 9-8\nfabric = ether\nnonsense\n[program q]\nmode = of\nlog = loud\nrdma-sl = 16\n\
             key-file = /nowhere/key\npeers = here\n[program r]\nlog = info:\n\
             [program s]\nlend = 2G\nlog = loud:",
        );
        let said: Vec<_> = complaints.0.iter().map(ToString::to_string).collect();
        let expected = [
            "F:3: nonsense: not: key = value; ignoring the line",
            "F:1: ports = 9-8: not a list such as 5432,8000-8100; taking the default",
            "F:2: fabric = ether: auto, shm, verbs or off; taking auto",
            "F:5: mode = of: on or off; taking on",
            "F:6: log = loud: the level is off, error, warn, info or debug; taking warn",
            "F:7: rdma-sl = 16: not a number from 0 to 15; taking the default",
            "F:8: key-file = /nowhere/key: No such file or directory (os error 2); staying on TCP with other hosts",
            "F:9: peers = here: not a list such as 10.0.0.0/24:5432,10.1.2.3; taking the default",
            "F:11: log = info:: no path behind the colon; nothing is logged",
            "F:13: lend = 2G: no more than 1G can be lent; taking 1G",
            "F:14: log = loud:: no path behind the colon; nothing is logged",
        ];
        assert_eq!(said, expected);
        assert_eq!(complaints.0[1].wrong(), "F:1: ports = 9-8: not a list such as 5432,8000-8100");
    }

    #[test]
    fn nobody_is_greeted_unsigned_if_the_key_may_be_in_what_makes_no_sense() {
        let peers = |given: &Given| {
            let mut complaints = Complaints::default();
            let count = settings(Settings::default(), given, &mut complaints).verbs.peers.len();
            (count, complaints.0.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let doubt =
            "THALLUS_CONFIG=F: what makes no sense may have named a key; staying on TCP with other hosts";
        assert_eq!(peers(&file("peers = 10.0.0.1").0), (1, vec![]));
        assert_eq!(peers(&file("peers = 10.0.0.1\nkeyfile = /key").0), (0, vec![doubt.to_owned()]));
        assert_eq!(peers(&file("keyfile = /key").0), (0, vec![]));
        let key = std::env::temp_dir().join(format!("thallus-key-{}", crate::process::id()));
        std::fs::write(&key, "secret").unwrap();
        let with_key = format!("peers = 10.0.0.1\nnonsense\nkey-file = {}", key.display());
        let greeted = peers(&file(&with_key).0);
        std::fs::remove_file(key).unwrap();
        assert_eq!(greeted, (1, vec![]));
        let missing =
            Given { only_file: true, lines: file("peers = 10.0.0.1").0.lines, ..Given::without("F".into()) };
        assert_eq!(peers(&missing), (0, vec![doubt.to_owned()]));
    }

    #[test]
    fn files_that_would_be_read_for_ever_are_refused() {
        use rustix::fs::{CWD, FileType, Mode, mknodat};
        let folder = std::env::temp_dir().join(format!("thallus-environment-{}", crate::process::id()));
        std::fs::create_dir(&folder).unwrap();
        let path = |name| folder.join(name).into_os_string().into_string().unwrap();
        mknodat(CWD, path("pipe"), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        std::fs::write(path("large"), vec![b'k'; LARGEST_FILE + 1]).unwrap();
        std::fs::write(path("key"), b"secret").unwrap();
        let read = ["pipe", "large", "key"]
            .map(|name| read_file(&path(name), LARGEST_FILE).map_err(|error| error.kind()));
        let device = read_file("/dev/zero", LARGEST_FILE).map_err(|error| error.kind());
        std::fs::remove_dir_all(&folder).unwrap();
        assert_eq!(
            read,
            [Err(io::ErrorKind::Other), Err(io::ErrorKind::FileTooLarge), Ok(b"secret".to_vec())]
        );
        assert_eq!(device, Err(io::ErrorKind::Other));
    }
}
