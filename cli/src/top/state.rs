//! What is shown, and in which order: changed by keys and by new snapshots.

use std::cmp::Ordering;

use clap::ValueEnum;
use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::widgets::TableState;
use serde::Serialize;

use super::Sort;
use super::rates::{Row, Snapshot};
use crate::status::table::{Column, age, identity, identity_and, size, write_table};

pub(super) const COLUMNS: [Column; 12] = identity_and([
    ("SENT/s", true),
    ("RECEIVED/s", true),
    ("WAITS/s", true),
    ("SPUN", true),
    ("PER WAIT", true),
    ("AGE", true),
]);

pub(super) struct State {
    sort: Sort,
    reverse: bool,
    filter: String,
    /// The filter is being typed.
    typing: bool,
    paused: bool,
    snapshot: Option<Snapshot>,
    pub(super) selected: TableState,
}

impl State {
    pub(super) fn new(sort: Sort, reverse: bool, filter: String) -> Self {
        let selected = TableState::default();
        Self { sort, reverse, filter, typing: false, paused: false, snapshot: None, selected }
    }

    pub(super) fn show(&mut self, snapshot: Snapshot) {
        self.snapshot = Some(snapshot);
    }

    pub(super) fn is_paused(&self) -> bool {
        self.paused
    }

    /// Obeys a key. True if it ends the program.
    pub(super) fn press(&mut self, key: KeyEvent) -> bool {
        if key.kind == KeyEventKind::Release {
            return false;
        }
        if key.modifiers.contains(KeyModifiers::CONTROL) {
            return key.code == KeyCode::Char('c');
        }
        if self.typing {
            match key.code {
                KeyCode::Enter => self.typing = false,
                KeyCode::Esc => {
                    self.typing = false;
                    self.filter.clear();
                }
                KeyCode::Backspace => {
                    self.filter.pop();
                }
                KeyCode::Char(c) => self.filter.push(c),
                _ => {}
            }
            return false;
        }
        match key.code {
            KeyCode::Char('q') | KeyCode::Esc => return true,
            KeyCode::Char('<') | KeyCode::Left => self.sort = neighbour(self.sort, -1),
            KeyCode::Char('>') | KeyCode::Right => self.sort = neighbour(self.sort, 1),
            KeyCode::Char('r') => self.reverse = !self.reverse,
            KeyCode::Char('p') => self.paused = !self.paused,
            KeyCode::Char('/') => self.typing = true,
            KeyCode::Up => self.selected.select_previous(),
            KeyCode::Down => self.selected.select_next(),
            KeyCode::PageUp => self.selected.scroll_up_by(10),
            KeyCode::PageDown => self.selected.scroll_down_by(10),
            KeyCode::Home => self.selected.select_first(),
            KeyCode::End => self.selected.select_last(),
            _ => {}
        }
        false
    }

    /// Lines above the table: who and how much in all; why connections are on TCP.
    pub(super) fn heading(&self) -> [String; 2] {
        let Some(snapshot) = &self.snapshot else { return Default::default() };
        let total = |rate: fn(&Row) -> f64| snapshot.rows.iter().map(rate).sum::<f64>();
        let (sent, received) = (total(|row| row.rates.sent), total(|row| row.rates.received));
        let summary = snapshot.summary.replace('\n', " ");
        let rates = format!("{summary}{}/s sent, {}/s received.", whole(sent), whole(received));
        let mut reasons: Vec<(&str, usize)> = Vec::new();
        for reason in snapshot.rows.iter().filter_map(|row| row.connection.reason) {
            match reasons.iter_mut().find(|(known, _)| *known == reason) {
                Some((_, count)) => *count += 1,
                None => reasons.push((reason, 1)),
            }
        }
        reasons.sort_by_key(|(reason, count)| (std::cmp::Reverse(*count), *reason));
        let reasons: Vec<_> = reasons.iter().map(|(reason, count)| format!("{reason} {count}")).collect();
        [rates, if reasons.is_empty() { String::new() } else { format!("On TCP: {}", reasons.join(", ")) }]
    }

    /// The line below the table.
    pub(super) fn footing(&self) -> String {
        if self.typing {
            return format!("Filter: {}_", self.filter);
        }
        let sort = self.sort.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default();
        let order = if self.reverse { ", reversed" } else { "" };
        let filter =
            if self.filter.is_empty() { String::new() } else { format!(", filter: {}", self.filter) };
        let paused = if self.paused { ", paused" } else { "" };
        format!("By {sort}{order}{filter}{paused}.   q quit  < > sort  r reverse  / filter  p pause")
    }

    /// The cells of each line.
    pub(super) fn lines(&self) -> Vec<[String; COLUMNS.len()]> {
        self.rows().into_iter().map(cells).collect()
    }

    /// For a reader that is no terminal.
    pub(super) fn text(&self) -> String {
        let mut text = String::new();
        let lines = self.lines();
        if !lines.is_empty() {
            write_table(&mut text, &COLUMNS, &lines);
            text.push('\n');
        }
        for line in self.heading().iter().filter(|line| !line.is_empty()) {
            text.push_str(line);
            text.push('\n');
        }
        text
    }

    pub(super) fn json(&self) -> serde_json::Result<String> {
        #[derive(Serialize)]
        struct Report<'a> {
            interval_seconds: Option<f64>,
            connections: Vec<&'a Row>,
        }
        let interval_seconds = self.snapshot.as_ref().map(|snapshot| snapshot.seconds);
        let report = Report { interval_seconds, connections: self.rows() };
        serde_json::to_string_pretty(&report).map(|text| text + "\n")
    }

    /// The rows that pass the filter, in order.
    fn rows(&self) -> Vec<&Row> {
        let wanted = self.filter.to_lowercase();
        let passes =
            |row: &&Row| identity(&row.connection).iter().any(|cell| cell.to_lowercase().contains(&wanted));
        let rows = self.snapshot.iter().flat_map(|snapshot| &snapshot.rows);
        let mut rows: Vec<&Row> = rows.filter(passes).collect();
        rows.sort_by(|a, b| {
            let order = compare(self.sort, a, b);
            let order = if self.reverse { order.reverse() } else { order };
            order.then_with(|| place(a).cmp(&place(b)))
        });
        rows
    }
}

fn neighbour(sort: Sort, step: isize) -> Sort {
    let all = Sort::value_variants();
    let index = all.iter().position(|other| *other == sort).unwrap_or(0);
    let next = (index as isize + step).rem_euclid(all.len() as isize);
    all[next as usize]
}

fn place(row: &Row) -> (u32, u32) {
    (row.connection.pid, row.connection.fd)
}

/// In the order of the default: most first, names in theirs.
fn compare(sort: Sort, a: &Row, b: &Row) -> Ordering {
    let most = |value: fn(&Row) -> f64| value(b).total_cmp(&value(a));
    match sort {
        Sort::Rate => most(|row| row.rates.sent + row.rates.received),
        Sort::Sent => most(|row| row.rates.sent),
        Sort::Received => most(|row| row.rates.received),
        Sort::Waits => most(|row| row.rates.waits),
        Sort::Spun => most(|row| row.rates.spun.unwrap_or(-1.0)),
        Sort::Bells => most(|row| row.rates.doorbells),
        Sort::Age => most(|row| row.connection.age_seconds),
        Sort::Pid => Ordering::Equal,
        Sort::Command => a.connection.command.cmp(&b.connection.command),
        Sort::Fabric => {
            let fabric = |row: &Row| (row.connection.fabric, row.connection.reason);
            fabric(a).cmp(&fabric(b))
        }
    }
}

fn cells(row: &Row) -> [String; COLUMNS.len()] {
    let [pid, command, fd, local, peer, fabric] = identity(&row.connection);
    let rates = &row.rates;
    let none = || "-".to_owned();
    [
        pid,
        command,
        fd,
        local,
        peer,
        fabric,
        whole(rates.sent),
        whole(rates.received),
        format!("{:.0}", rates.waits),
        rates.spun.map_or_else(none, |share| format!("{:.0}%", share * 100.0)),
        rates.seconds_per_wait.map_or_else(none, duration),
        age(row.connection.age_seconds),
    ]
}

fn whole(bytes: f64) -> String {
    size(bytes.round() as u64)
}

/// Seconds with three digits or so, in the unit that fits.
fn duration(seconds: f64) -> String {
    match seconds {
        _ if seconds < 1e-3 => format!("{:.1} µs", seconds * 1e6),
        _ if seconds < 1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    use crate::status::Connection;
    use crate::top::rates::Rates;

    fn row(pid: u32, command: &str, reason: Option<&'static str>, sent: f64) -> Row {
        let connection = Connection {
            pid,
            command: command.to_owned(),
            fd: 8,
            role: "server",
            local: Some("127.0.0.1:6379".to_owned()),
            peer: Some("127.0.0.1:40000".to_owned()),
            fabric: if reason.is_some() { "tcp" } else { "shm" },
            reason,
            bytes_sent: 0,
            bytes_received: 0,
            ring_bytes_sent: 0,
            ring_bytes_received: 0,
            tcp_bytes_sent: 0,
            tcp_bytes_received: 0,
            doorbells_sent: 0,
            sleeps: 0,
            spin_hits: 0,
            age_seconds: 61.0,
            opened_ns: 0,
        };
        let waits =
            Rates { waits: 50_000.0, spun: Some(0.25), seconds_per_wait: Some(2e-5), ..Rates::default() };
        Row { connection, rates: Rates { sent, received: 1024.0, ..waits } }
    }

    pub(in crate::top) fn state() -> State {
        let rows = vec![
            row(7, "redis-server", None, 10.0),
            row(9, "psql", Some("short"), 2048.0),
            row(5, "curl", Some("peer-without-thallus"), 0.0),
            row(6, "curl", Some("peer-without-thallus"), 0.0),
        ];
        let mut state = State::new(Sort::Rate, false, String::new());
        state.show(Snapshot { seconds: 1.0, rows, summary: "4 ends.\n".to_owned() });
        state
    }

    fn press(state: &mut State, keys: &str) -> bool {
        keys.chars().any(|c| {
            let code = match c {
                '\n' => KeyCode::Enter,
                '\u{1b}' => KeyCode::Esc,
                '\u{8}' => KeyCode::Backspace,
                c => KeyCode::Char(c),
            };
            state.press(KeyEvent::new(code, KeyModifiers::NONE))
        })
    }

    fn pids(state: &State) -> Vec<u32> {
        state.rows().iter().map(|row| row.connection.pid).collect()
    }

    #[test]
    fn keys_choose_the_order() {
        let mut state = state();
        assert_eq!(pids(&state), [9, 7, 5, 6]);
        press(&mut state, "r");
        assert_eq!(pids(&state), [5, 6, 7, 9]);
        press(&mut state, "r<<");
        assert_eq!((state.sort, pids(&state)), (Sort::Command, vec![5, 6, 9, 7]));
        press(&mut state, ">>>");
        assert_eq!(state.sort, Sort::Sent);
    }

    #[test]
    fn a_filter_looks_at_all_that_names_a_connection() {
        let mut state = state();
        for (filter, found) in
            [("CURL", vec![5, 6]), ("short", vec![9]), ("6379", vec![9, 7, 5, 6]), ("x", vec![])]
        {
            press(&mut state, &format!("/{filter}\n"));
            assert_eq!(pids(&state), found, "{filter}");
            press(&mut state, "/\u{1b}");
            assert_eq!(pids(&state).len(), 4);
        }
        // While it is typed, letters are letters.
        assert!(!press(&mut state, "/qp\u{8}"));
        assert_eq!((state.filter.as_str(), state.is_paused()), ("q", false));
        assert!(press(&mut state, "\nq"));
    }

    #[test]
    fn control_c_ends() {
        assert!(state().press(KeyEvent::new(KeyCode::Char('c'), KeyModifiers::CONTROL)));
    }

    #[test]
    fn lines_and_heading_say_what_happens() {
        let state = state();
        let first = ["9", "psql", "8", "127.0.0.1:6379", "127.0.0.1:40000", "tcp: short"];
        let rates = ["2.0 KiB", "1.0 KiB", "50000", "25%", "20.0 µs", "1m01s"];
        assert_eq!(state.lines()[0][..], [first, rates].concat()[..]);
        assert_eq!(
            state.heading(),
            ["4 ends. 2.0 KiB/s sent, 4.0 KiB/s received.", "On TCP: peer-without-thallus 2, short 1"]
        );
    }
}
