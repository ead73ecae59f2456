//! The format of the configuration file (docs/configuration.md): lines `key = value`, first for every program, then in sections
//! for some.
//!
//! It is read in other people's processes: whatever is in it, reading ends after one pass over the bytes, and a line that
//! makes no sense is left out and told of.

/// Keys, and the variables that they stand for.
pub const KEYS: [(&str, &str); 17] = [
    ("mode", "THALLUS"),
    ("fabric", "THALLUS_FABRIC"),
    ("peers", "THALLUS_PEERS"),
    ("peers-file", "THALLUS_PEERS_FILE"),
    ("key-file", "THALLUS_KEY_FILE"),
    ("rdma-timeout", "THALLUS_RDMA_TIMEOUT"),
    ("rdma-retry", "THALLUS_RDMA_RETRY"),
    ("rdma-sl", "THALLUS_RDMA_SL"),
    ("rdma-order", "THALLUS_RDMA_ORDER"),
    ("ports", "THALLUS_PORTS"),
    ("unix", "THALLUS_UNIX"),
    ("upgrade-after", "THALLUS_UPGRADE_AFTER"),
    ("spin-us", "THALLUS_SPIN_US"),
    ("ring", "THALLUS_RING"),
    ("lend", "THALLUS_LEND"),
    ("io-uring", "THALLUS_IO_URING"),
    ("log", "THALLUS_LOG"),
];

/// A line that sets something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its number, from 1.
    pub line: usize,
    /// One of [`KEYS`].
    pub key: &'static str,
    /// The variable that the key stands for.
    pub name: &'static str,
    /// Without space around it; empty for the default.
    pub value: String,
}

/// A line that makes no sense.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wrong {
    /// Its number, from 1.
    pub line: usize,
    /// What it says, shortened.
    pub given: String,
    /// What is wrong with it.
    pub text: &'static str,
}

/// A file that has been read.
#[derive(Debug, Default)]
pub struct Configuration {
    sections: Vec<Section>,
    /// In the order of the lines.
    pub wrong: Vec<Wrong>,
}

#[derive(Debug, Default)]
struct Section {
    /// Patterns; none for every program.
    programs: Vec<String>,
    entries: Vec<Entry>,
}

/// Characters of a wrong line that are shown.
const SHOWN: usize = 60;

impl Configuration {
    /// Reads the content of a file.
    pub fn parse(content: &[u8]) -> Self {
        let mut read = Self { sections: vec![Section::default()], wrong: Vec::new() };
        // Whether the lines belong to a section that makes sense.
        let mut known = true;
        let content = content.strip_prefix(b"\xef\xbb\xbf").unwrap_or(content);
        for (index, bytes) in content.split(|&byte| byte == b'\n').enumerate() {
            let line = index + 1;
            let given = String::from_utf8_lossy(bytes);
            let is_head = given.trim_start_matches(is_no_text).starts_with('[');
            let outcome = match text(bytes) {
                Ok("") => continue,
                Ok(head) if is_head => programs(head).map(|programs| {
                    read.sections.push(Section { programs, entries: Vec::new() });
                }),
                Ok(text) if known => entry(line, text).and_then(|entry| read.add(entry)),
                Ok(_) => Err("in a section that makes no sense"),
                Err(wrong) => Err(wrong),
            };
            if is_head {
                known = outcome.is_ok();
            }
            if let Err(text) = outcome {
                let given = given.trim().chars().filter(|c| !c.is_control()).take(SHOWN).collect();
                read.wrong.push(Wrong { line, given, text });
            }
        }
        read
    }

    fn add(&mut self, entry: Entry) -> Result<(), &'static str> {
        let entries = &mut self.sections.last_mut().ok_or("in no section")?.entries;
        if entries.iter().any(|earlier| earlier.key == entry.key) {
            return Err("given twice in this section");
        }
        entries.push(entry);
        Ok(())
    }

    /// What concerns the program whose executable file is at `path`: of several lines about the same, the last one.
    pub fn for_program(&self, path: impl AsRef<[u8]>) -> Vec<Entry> {
        let path = path.as_ref();
        let mut chosen: Vec<Entry> = Vec::with_capacity(KEYS.len());
        for entry in self.sections.iter().filter(|section| section.names(path)).flat_map(|it| &it.entries) {
            chosen.retain(|earlier| earlier.key != entry.key);
            chosen.push(entry.clone());
        }
        chosen
    }

    /// Whether it depends on the program.
    pub fn has_programs(&self) -> bool {
        self.sections.iter().any(|section| !section.programs.is_empty())
    }

    /// All that is set for any program.
    pub fn entries(&self) -> impl Iterator<Item = &Entry> {
        self.sections.iter().flat_map(|section| &section.entries)
    }
}

impl Section {
    fn names(&self, path: &[u8]) -> bool {
        let file = path.rsplit(|&byte| byte == b'/').next().unwrap_or(path);
        let matches = |pattern: &String| {
            let subject = if pattern.contains('/') { path } else { file };
            match pattern.strip_suffix('*') {
                Some(start) => subject.starts_with(start.as_bytes()),
                None => subject == pattern.as_bytes(),
            }
        };
        self.programs.is_empty() || self.programs.iter().any(matches)
    }
}

/// What a line says.
fn text(line: &[u8]) -> Result<&str, &'static str> {
    let line = str::from_utf8(line).map_err(|_| "not UTF-8")?;
    let text = without_comment(line).trim();
    if text.contains(|c: char| c.is_control() && c != '\t') { Err("a control character") } else { Ok(text) }
}

/// What may stand in front of a section's head, rightly or not.
fn is_no_text(c: char) -> bool {
    c.is_whitespace() || c.is_control() || c == char::REPLACEMENT_CHARACTER
}

/// Up to a `#` at the beginning or after white space.
fn without_comment(line: &str) -> &str {
    let begins = |&(at, _): &(usize, &str)| line[..at].chars().next_back().is_none_or(char::is_whitespace);
    line.match_indices('#').find(begins).map_or(line, |(at, _)| &line[..at])
}

/// Of `[program NAME…]`.
fn programs(line: &str) -> Result<Vec<String>, &'static str> {
    let inside =
        line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')).ok_or("no closing bracket")?;
    let mut words = inside.split_whitespace();
    let kind = words.next();
    let names: Vec<_> = words.map(str::to_owned).collect();
    match kind {
        Some("program") if names.is_empty() => Err("the program is missing"),
        // The end of a path with white space in it, most likely.
        Some("program") if names.iter().any(|name| name.contains('/') && !name.starts_with('/')) => {
            Err("a path begins with / and has no white space; * may stand for its end")
        }
        Some("program") => Ok(names),
        _ => Err("a section is [program NAME]"),
    }
}

fn entry(line: usize, text: &str) -> Result<Entry, &'static str> {
    let (key, value) = text.split_once('=').ok_or("not: key = value")?;
    let known = KEYS.iter().find(|(known, _)| *known == key.trim());
    let &(key, name) = known.ok_or("the library knows no such key")?;
    Ok(Entry { line, key, name, value: value.trim().to_owned() })
}

#[cfg(test)]
mod tests {
    use super::*;

    use proptest::prelude::*;

    const FILE: &str = "\u{feff}# For all
ports = 5432,6379   # a comment
spin-us=20\r
log = warn:/var/log/a#b

[program postgres /opt/*]
fabric = shm
spin-us = 0
[program redis-server]
ports =
[program redis-*]
mode = off
";

    fn values(configuration: &Configuration, path: &str) -> Vec<(&'static str, String)> {
        let mut entries = configuration.for_program(path);
        entries.sort_by_key(|entry| entry.line);
        entries.into_iter().map(|entry| (entry.key, entry.value)).collect()
    }

    #[test]
    fn a_program_is_concerned_by_what_is_for_all_and_by_its_sections() {
        let read = Configuration::parse(FILE.as_bytes());
        assert_eq!((&read.wrong[..], read.has_programs(), read.entries().count()), (&[][..], true, 7));
        let of = |path, expected: &[(&str, &str)]| {
            let expected: Vec<_> = expected.iter().map(|(key, value)| (*key, (*value).to_owned())).collect();
            assert_eq!(values(&read, path), expected, "{path}");
        };
        let log = ("log", "warn:/var/log/a#b");
        let all = [("ports", "5432,6379"), ("spin-us", "20"), log];
        of("", &all);
        of("/usr/bin/postgresql", &all);
        of("/usr/bin/opt", &all);
        of("/bin/postgres", &[("ports", "5432,6379"), log, ("fabric", "shm"), ("spin-us", "0")]);
        of("/opt/x/y", &[("ports", "5432,6379"), log, ("fabric", "shm"), ("spin-us", "0")]);
        of("/bin/redis-server", &[("spin-us", "20"), log, ("ports", ""), ("mode", "off")]);
        let odd = b"/opt/caf\xe9/redis-server";
        assert_eq!(read.for_program(odd), read.for_program("/opt/x/redis-server"));
        of("/bin/redis-cli", &[("ports", "5432,6379"), ("spin-us", "20"), log, ("mode", "off")]);
    }

    #[test]
    fn what_follows_a_head_that_cannot_be_read_is_for_nobody() {
        let heads: [&[u8]; 5] = [
            b"[program caf\xe9]",
            b"\xff[program a]",
            b"\xc2\xa0[program",
            b"\x01[program a]",
            b"[program a\0]",
        ];
        for head in heads {
            let file = [b"ring = 8K\n", head, b"\nmode = off\nports = 1\n[program a]\nring = 9K"].concat();
            let read = Configuration::parse(&file);
            assert_eq!(values(&read, "b"), [("ring", "8K".to_owned())], "{head:?}");
            assert_eq!(values(&read, "a"), [("ring", "9K".to_owned())], "{head:?}");
            assert_eq!(read.wrong.iter().map(|wrong| wrong.line).collect::<Vec<_>>(), [2, 3, 4], "{head:?}");
        }
    }

    #[test]
    fn a_wrong_line_is_named_and_left_out() {
        let file = b"prots = 1\nports\nspin-us = 1\nspin-us = 2\n\xff = 3\n[port 80]\nring = 8K\n[program\n[program]\n\
            [program a]\nring = 8K\nSTATS = x\nlog =\twarn:/a\0b\n[program /opt/My App/server]\nports = 1";
        let read = Configuration::parse(file);
        let wrong: Vec<_> = read.wrong.iter().map(|wrong| (wrong.line, wrong.text)).collect();
        let expected = [
            (1, "the library knows no such key"),
            (2, "not: key = value"),
            (4, "given twice in this section"),
            (5, "not UTF-8"),
            (6, "a section is [program NAME]"),
            (7, "in a section that makes no sense"),
            (8, "no closing bracket"),
            (9, "the program is missing"),
            (12, "the library knows no such key"),
            (13, "a control character"),
            (14, "a path begins with / and has no white space; * may stand for its end"),
            (15, "in a section that makes no sense"),
        ];
        assert_eq!(wrong, expected);
        assert_eq!(values(&read, "a"), [("spin-us", "1".to_owned()), ("ring", "8K".to_owned())]);
        assert_eq!(read.wrong[0].given, "prots = 1");
        let long = Configuration::parse(&[b'x'; 10_000]);
        assert_eq!(long.wrong[0].given.len(), SHOWN);
    }

    proptest! {
        #[test]
        fn whatever_is_in_a_file_its_lines_are_entries_or_wrong_or_nothing(
            lines in prop::collection::vec(
                prop_oneof![
                    any::<Vec<u8>>(),
                    "[ \\t]*[a-z=#\\[\\] -]{0,20}".prop_map(String::into_bytes),
                    "\\[program [a-c]\\]|ports = [0-9]|mode=off|#.*|".prop_map(String::into_bytes),
                ],
                0..20,
            ),
        ) {
            let file = lines.join(&b'\n');
            let read = Configuration::parse(&file);
            let count = file.split(|&byte| byte == b'\n').count();
            prop_assert!(read.entries().count() + read.wrong.len() <= count);
            prop_assert!(read.entries().all(|entry| (1..=count).contains(&entry.line)));
            let of_all: Vec<_> = read.for_program("a");
            prop_assert!(of_all.iter().all(|entry| KEYS.contains(&(entry.key, entry.name))));
        }
    }
}
