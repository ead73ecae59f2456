//! The report as a table for people.

use std::fmt::Write;

use super::{Connection, Report};

/// Title of a column, and whether it holds numbers, which stand at its right edge.
pub(crate) type Column = (&'static str, bool);

/// Of what [`identity`] gives.
const IDENTITY: [Column; 6] =
    [("PID", true), ("COMMAND", false), ("FD", true), ("LOCAL", false), ("PEER", false), ("FABRIC", false)];

const COLUMNS: [Column; 11] =
    identity_and([("SENT", true), ("RECEIVED", true), ("BELLS", true), ("SLEEPS", true), ("AGE", true)]);

/// The columns of [`identity`], and these.
pub(crate) const fn identity_and<const MORE: usize, const ALL: usize>(more: [Column; MORE]) -> [Column; ALL] {
    assert!(IDENTITY.len() + MORE == ALL);
    let mut all = [IDENTITY[0]; ALL];
    let mut column = 0;
    while column < ALL {
        let own = column < IDENTITY.len();
        all[column] = if own { IDENTITY[column] } else { more[column - IDENTITY.len()] };
        column += 1;
    }
    all
}

/// The whole report: a table, a summary line, and what could not be seen.
pub(crate) fn render(report: &Report) -> String {
    let mut text = String::new();
    if !report.connections.is_empty() {
        let rows: Vec<_> = report.connections.iter().map(row).collect();
        write_table(&mut text, &COLUMNS, &rows);
        text.push('\n');
    }
    write_summary(&mut text, report);
    text
}

/// The first columns of an end's line, here and elsewhere: pid, command, descriptor, addresses, fabric and reason.
pub(crate) fn identity(connection: &Connection) -> [String; IDENTITY.len()] {
    let address = |address: &Option<String>| address.as_deref().map_or("?".to_owned(), printable);
    [
        connection.pid.to_string(),
        printable(&connection.command),
        connection.fd.to_string(),
        address(&connection.local),
        address(&connection.peer),
        match connection.reason {
            Some(reason) => format!("{}: {reason}", connection.fabric),
            None => connection.fabric.to_owned(),
        },
    ]
}

fn row(connection: &Connection) -> [String; COLUMNS.len()] {
    let [pid, command, fd, local, peer, fabric] = identity(connection);
    let [sent, received] = [connection.bytes_sent, connection.bytes_received].map(size);
    let [bells, sleeps] = [connection.doorbells_sent, connection.sleeps].map(|count| count.to_string());
    [pid, command, fd, local, peer, fabric, sent, received, bells, sleeps, age(connection.age_seconds)]
}

pub(crate) fn write_table<const N: usize>(text: &mut String, columns: &[Column; N], rows: &[[String; N]]) {
    let titles = columns.map(|(title, _)| title.to_owned());
    let lines = || std::iter::once(&titles).chain(rows);
    let widths: [usize; N] =
        std::array::from_fn(|column| lines().map(|line| line[column].chars().count()).max().unwrap_or(0));
    for line in lines() {
        let mut cells = String::new();
        for (column, cell) in line.iter().enumerate() {
            let padding = " ".repeat(widths[column] - cell.chars().count());
            let separator = if column == 0 { "" } else { "  " };
            let (left, right) = if columns[column].1 { (&padding[..], "") } else { ("", &padding[..]) };
            cells.extend([separator, left, cell, right]);
        }
        text.push_str(cells.trim_end());
        text.push('\n');
    }
}

pub(crate) fn write_summary(text: &mut String, report: &Report) {
    let total = report.connections.len();
    let over = |fabric: &str| report.connections.iter().filter(|end| end.fabric == fabric).count();
    let processes = report.processes.len();
    if processes == 0 {
        text.push_str("No process with connections under Thallus.\n");
    } else {
        let ends = plural(total, "connection end", "connection ends");
        let processes = plural(processes, "process", "processes");
        append(text, format_args!("{ends} in {processes}: {} over shared memory, ", over("shm")));
        if over("verbs") > 0 {
            append(text, format_args!("{} over RDMA, ", over("verbs")));
        }
        if over("unix") > 0 {
            append(text, format_args!("{} over AF_UNIX, ", over("unix")));
        }
        append(text, format_args!("{} over TCP.\n", over("tcp")));
    }
    if report.hidden_processes > 0 {
        let processes = plural(report.hidden_processes, "process", "processes");
        append(text, format_args!("{processes} could not be looked at for lack of permission.\n"));
    }
    if report.other_versions > 0 {
        let processes = plural(report.other_versions, "process uses", "processes use");
        append(text, format_args!("{processes} another version of the library and can't be shown.\n"));
    }
    if report.arenas_not_shown > 0 {
        let arenas = plural(report.arenas_not_shown, "arena", "arenas");
        append(text, format_args!("{arenas} of connections left out: one user has too many.\n"));
    }
}

fn append(text: &mut String, arguments: std::fmt::Arguments<'_>) {
    text.write_fmt(arguments).expect("writing to a string can't fail");
}

fn plural(count: usize, one: &str, many: &str) -> String {
    format!("{count} {}", if count == 1 { one } else { many })
}

/// A process may give itself any name: what a terminal would obey is shown as `?`, and so is what has no width, breaks lines or turns
/// the direction of those around it (Unicode Standard Annex 9).
pub(crate) fn printable(name: &str) -> String {
    let is_shown = |c: char| {
        let is_format = matches!(
            c,
            '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}' | '\u{61c}'
        );
        !c.is_control() && !is_format
    };
    name.chars().map(|c| if is_shown(c) { c } else { '?' }).collect()
}

/// Bytes in the largest binary unit that leaves at least one.
pub(crate) fn size(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// Seconds in the two largest units that matter.
pub(crate) fn age(seconds: f64) -> String {
    let seconds = seconds as u64;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m{:02}s", seconds % 60),
        (0, _, _) => format!("{hours}h{:02}m", minutes % 60),
        _ => format!("{days}d{:02}h", hours % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::status::ProcessSummary;

    fn connection(pid: u32, reason: Option<&'static str>) -> Connection {
        Connection {
            pid,
            command: "redis\u{1b}[31m".to_owned(),
            fd: 8,
            role: "server",
            local: Some("127.0.0.1:6379".to_owned()),
            peer: None,
            fabric: if reason.is_some() { "tcp" } else { "shm" },
            reason,
            bytes_sent: 1536,
            bytes_received: 12,
            ring_bytes_sent: 1536,
            ring_bytes_received: 12,
            tcp_bytes_sent: 0,
            tcp_bytes_received: 0,
            doorbells_sent: 3,
            sleeps: 4,
            spin_hits: 5,
            age_seconds: 61.5,
            opened_ns: 0,
        }
    }

    #[test]
    fn columns_are_aligned_and_the_summary_counts_both_fabrics() {
        let summary = |pid| ProcessSummary { pid, command: "redis".to_owned(), connections: 1 };
        let report = Report {
            processes: vec![summary(7), summary(12345)],
            connections: vec![connection(7, None), connection(12345, Some("short"))],
            hidden_processes: 2,
            other_versions: 1,
            arenas_not_shown: 2,
        };
        let expected = "  \
  PID  COMMAND     FD  LOCAL           PEER  FABRIC         SENT  RECEIVED  BELLS  SLEEPS    AGE
    7  redis?[31m   8  127.0.0.1:6379  ?     shm         1.5 KiB      12 B      3       4  1m01s
12345  redis?[31m   8  127.0.0.1:6379  ?     tcp: short  1.5 KiB      12 B      3       4  1m01s

2 connection ends in 2 processes: 1 over shared memory, 1 over TCP.
2 processes could not be looked at for lack of permission.
1 process uses another version of the library and can't be shown.
2 arenas of connections left out: one user has too many.
";
        assert_eq!(render(&report), expected);
    }

    #[test]
    fn connections_over_rdma_are_not_counted_as_tcp() {
        let over_rdma = Connection { fabric: "verbs", ..connection(7, None) };
        let processes = vec![ProcessSummary { pid: 7, command: "redis".to_owned(), connections: 2 }];
        let connections = vec![over_rdma, connection(7, Some("short"))];
        let report =
            Report { processes, connections, hidden_processes: 0, other_versions: 0, arenas_not_shown: 0 };
        let text = render(&report);
        assert!(text.ends_with(": 0 over shared memory, 1 over RDMA, 1 over TCP.\n"), "{text}");
    }

    #[test]
    fn what_would_garble_a_line_is_shown_as_a_question_mark() {
        assert_eq!(printable("a\u{202e}gnp.\u{2066}x\u{200b}\u{feff}\u{2028}\n"), "a?gnp.?x????");
        assert_eq!(printable("naïve ☃ שלום"), "naïve ☃ שלום");
    }

    #[test]
    fn an_empty_report_says_so() {
        let report = Report {
            processes: vec![],
            connections: vec![],
            hidden_processes: 0,
            other_versions: 0,
            arenas_not_shown: 0,
        };
        assert_eq!(render(&report), "No process with connections under Thallus.\n");
    }

    #[test]
    fn sizes_and_ages_use_the_unit_that_fits() {
        assert_eq!(size(0), "0 B");
        assert_eq!(size(1023), "1023 B");
        assert_eq!(size(1024), "1.0 KiB");
        assert_eq!(size(1024 * 1024 - 1), "1.0 MiB");
        assert_eq!(size(u64::MAX), "16.0 EiB");
        assert_eq!(age(0.9), "0s");
        assert_eq!(age(3599.0), "59m59s");
        assert_eq!(age(3600.0), "1h00m");
        assert_eq!(age(90000.0), "1d01h");
    }
}
