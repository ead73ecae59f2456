//! The results as tables in Markdown, and as a page of HTML with plots.

use super::plan::{FLIGHT, Figure, OURS, RPC, WAYS, Way};
use super::plot;
use super::results::{Measured, losses};
use crate::bench::machine::Machine;
use crate::bench::report::{put, put_part};

const LOST: &str = "Where we lose: auto under Thallus against all ways over TCP";
const PATHS: &str = "Paths of the clients' connections";

pub(super) fn markdown(machine: &Machine, results: &[Measured], rounds: u32) -> String {
    let mut text = format!("{}\n{}\n", place(machine), method(rounds));
    for figure in Figure::ALL {
        let table = Table::of(results, figure);
        if table.rows.is_empty() {
            continue;
        }
        put(&mut text, format_args!("\n{}:\n\n| {} |", figure.title(), table.head.join(" | ")));
        put(&mut text, format_args!("|---|{}", "--:|".repeat(table.head.len() - 1)));
        for row in table.rows {
            put(&mut text, format_args!("| {} |", row.join(" | ")));
        }
    }
    for (title, lines) in [(LOST, lost(results)), (PATHS, paths(results))] {
        put(&mut text, format_args!("\n{title}:\n"));
        lines.iter().for_each(|line| put(&mut text, format_args!("- {line}")));
    }
    text
}

/// # Errors
/// A plot can't be drawn.
pub(super) fn html(machine: &Machine, results: &[Measured], rounds: u32) -> anyhow::Result<String> {
    let mut text = String::from(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>thallus bench arrow</title>\n<style>\n\
         body { font: 16px/1.5 sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }\n\
         table { border-collapse: collapse; font-size: .8rem } td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: right }\n\
         td:first-child, th:first-child { text-align: left } svg { max-width: 100%; height: auto }\n</style>\n\
         <h1>Query results over Thallus</h1>\n",
    );
    put(&mut text, format_args!("<p>{}<br>{}</p>", escape(&place(machine)), escape(&method(rounds))));
    for figure in Figure::ALL {
        let table = Table::of(results, figure);
        if table.rows.is_empty() {
            continue;
        }
        put(&mut text, format_args!("<h2>{}</h2>", figure.title()));
        text += &plot::svg(figure, results)?;
        put_part(&mut text, format_args!("<table>\n<tr>"));
        table.head.iter().for_each(|cell| put_part(&mut text, format_args!("<th>{}</th>", escape(cell))));
        for row in table.rows {
            put_part(&mut text, format_args!("</tr>\n<tr>"));
            row.iter().for_each(|cell| put_part(&mut text, format_args!("<td>{}</td>", escape(cell))));
        }
        put(&mut text, format_args!("</tr>\n</table>"));
    }
    for (title, lines) in [(LOST, lost(results)), (PATHS, paths(results))] {
        put(&mut text, format_args!("<h2>{title}</h2>\n<ul>"));
        lines.iter().for_each(|line| put(&mut text, format_args!("<li>{}</li>", escape(line))));
        put(&mut text, format_args!("</ul>"));
    }
    text += "</html>\n";
    Ok(text)
}

fn place(machine: &Machine) -> String {
    let kind = if machine.is_virtual { "virtual machine" } else { "machine" };
    let gib = machine.memory_bytes >> 30;
    format!("{}, {} CPUs, {gib} GiB ({kind}), Linux {}.", machine.cpu, machine.cpus, machine.kernel)
}

fn method(rounds: u32) -> String {
    format!(
        "Milliseconds from the request to the last batch on a connection that has been used before: medians (lowest–highest) of \
         {rounds} rounds, all ways in turn. Transport alone: the server has the result in memory. The client counts rows. All \
         results of a case had the same checksum."
    )
}

/// The cells of a figure.
struct Table {
    head: Vec<String>,
    rows: Vec<Vec<String>>,
}

impl Table {
    fn of(results: &[Measured], figure: Figure) -> Self {
        let mut head = vec!["result".to_owned(), "MB".to_owned()];
        head.extend(WAYS.map(Way::name));
        head.extend(["memcpy, GB/s", "Thallus, GB/s", "÷ memcpy", "rpc ÷", "flight ÷"].map(str::to_owned));
        let of_figure = results.iter().filter(|measured| measured.case.figure == figure);
        Self { head, rows: of_figure.map(row).collect() }
    }
}

fn row(measured: &Measured) -> Vec<String> {
    let mut cells = vec![measured.case.point.to_string(), number(measured.bytes as f64 / 1e6)];
    cells.extend(WAYS.map(|way| {
        let Some(seconds) = measured.seconds(way) else { return "–".to_owned() };
        let [median, low, high] = [seconds.median, seconds.low, seconds.high].map(|one| number(one * 1e3));
        let stayed = if way.library && !measured.moved(way) { ", on TCP" } else { "" };
        format!("{median} ({low}–{high}{stayed})")
    }));
    let (memcpy, ours) = (measured.memcpy_rate(), measured.rate(OURS));
    // A copy that takes microseconds measures the caches, and the clock.
    let large = measured.bytes >= 1_000_000;
    let rate = |rate: Option<f64>| rate.filter(|_| large).map_or_else(dash, |rate| number(rate / 1e9));
    let times = |ratio: Option<f64>| ratio.map_or_else(dash, |ratio| format!("{ratio:.2}×"));
    let share = ours.zip(memcpy).filter(|_| large).map(|(ours, memcpy)| ours / memcpy);
    let share = share.map_or_else(dash, |share| format!("{share:.2}"));
    cells.extend([
        rate(memcpy),
        rate(ours),
        share,
        times(measured.ratio(RPC)),
        times(measured.ratio(FLIGHT)),
    ]);
    cells
}

fn dash() -> String {
    "–".to_owned()
}

fn lost(results: &[Measured]) -> Vec<String> {
    let lines = losses(results)
        .into_iter()
        .map(|loss| format!("{}: {:.2}× of {}", loss.measured.case.name(), loss.ratio, loss.to.name()));
    let lines: Vec<_> = lines.collect();
    if lines.is_empty() { vec!["nowhere in this run".to_owned()] } else { lines }
}

/// One line for each way that the library was there for, if all cases agree; else for each case.
fn paths(results: &[Measured]) -> Vec<String> {
    let mut lines = Vec::new();
    for way in WAYS.into_iter().filter(|way| way.library) {
        let stayed: Vec<_> = results.iter().filter(|measured| !measured.moved(way)).collect();
        if stayed.is_empty() {
            let largest = results.iter().max_by_key(|measured| measured.bytes);
            let path = largest.map(|measured| format!("; {}: {}", measured.case.name(), measured.path(way)));
            lines.push(format!("{}: all upgraded{}", way.name(), path.unwrap_or_default()));
        }
        for measured in stayed {
            lines.push(format!("{}, {}: {}", way.name(), measured.case.name(), measured.path(way)));
        }
    }
    lines
}

/// Three digits.
fn number(value: f64) -> String {
    match value {
        value if value >= 100.0 => format!("{value:.0}"),
        value if value >= 10.0 => format!("{value:.1}"),
        value if value >= 0.1 => format!("{value:.2}"),
        value => format!("{value:.3}"),
    }
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::super::results::tests::measured;
    use super::*;

    #[test]
    fn a_loss_stands_on_the_page() {
        let machine = crate::bench::machine::facts();
        let results = [measured(0.5, 0.25)];
        let page = html(&machine, &results, 1).unwrap();
        for text in ["<svg", "Where we lose", "alone: 1 column: 0.50× of flight, TCP", "all upgraded"] {
            assert!(page.contains(text), "{text}: {page}");
        }
        let text = markdown(&machine, &results, 1);
        assert!(text.contains("| 1 column | 0.001 | 1000 (1000–1000)"), "{text}");
        assert!(markdown(&machine, &[measured(0.2, 0.3)], 1).contains("- nowhere in this run"));
    }
}
