//! A report as one page of HTML, with plots: latency against size, throughput against connections, CPU time against rate, and
//! how round trips are distributed. It is made from the JSON, so that one of a saved report is the same, and has the JSON in it.

use anyhow::Context;
use plotters::style::RGBColor;
use serde::Deserialize;
use serde_json::Value;

use super::latency::Times;
use super::plot::{Axis, Line, Plot};
use super::report::put;

/// Transports that are plotted, with name and colour; of two reports the old one has the paler colour.
const SHOWN: [(&str, &str, [RGBColor; 2]); 5] = [
    ("tcp", "TCP", [RGBColor(120, 120, 120), RGBColor(200, 200, 200)]),
    ("unix", "Unix socket", [RGBColor(214, 120, 30), RGBColor(240, 200, 150)]),
    ("thallus", "Thallus", [RGBColor(20, 60, 160), RGBColor(150, 180, 230)]),
    ("thallus-unix", "Thallus over a Unix socket", [RGBColor(30, 140, 90), RGBColor(160, 215, 185)]),
    ("bare", "bare ring", [RGBColor(190, 30, 60), RGBColor(235, 165, 180)]),
];

const STYLE: &str = "body { font: 16px/1.5 sans-serif; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }\n\
    table { border-collapse: collapse; font-size: .8rem } td, th { border: 1px solid #ccc; padding: .2rem .5rem; text-align: left }\n\
    svg { max-width: 100%; height: auto }";

/// What this needs of a report as `report::json` writes it.
#[derive(Debug, Deserialize)]
struct Report {
    results: Vec<Measured>,
}

#[derive(Debug, Deserialize)]
struct Measured {
    name: String,
    transports: std::collections::BTreeMap<String, Series>,
}

#[derive(Debug, Deserialize)]
struct Series {
    median: Option<f64>,
    cpu_seconds_per_million: Option<f64>,
    #[serde(default)]
    times: Times,
}

/// A report, and how it is called beside another; empty if there is no other.
pub(super) struct Titled<'a> {
    pub(super) title: &'a str,
    pub(super) report: &'a Value,
}

/// The page: `tables` (Markdown), plots of the `reports`, newest first, and their JSON.
///
/// # Errors
/// A report has another form, or a plot can't be drawn.
pub(super) fn html(tables: &str, reports: &[Titled<'_>]) -> anyhow::Result<String> {
    let mut text = format!(
        "<!doctype html>\n<html lang=\"en\">\n<meta charset=\"utf-8\">\n<title>thallus bench</title>\n\
         <style>\n{STYLE}\n</style>\n<h1>thallus bench</h1>\n"
    );
    let read = |titled: &Titled<'_>| {
        let report = Report::deserialize(titled.report).context("the report has another form")?;
        anyhow::Ok((titled.title.to_owned(), report))
    };
    let all = reports.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    for (title, plot) in plots(&all) {
        put(&mut text, format_args!("<h2>{}</h2>\n{}", escape(&title), plot.svg()?));
    }
    text += &from_markdown(tables);
    for Titled { title, report } in reports {
        // A page's script ends at its first `</`.
        let json = report.to_string().replace('<', "\\u003c");
        put(
            &mut text,
            format_args!("<script type=\"application/json\" title=\"{}\">{json}</script>", escape(title)),
        );
    }
    text += "</html>\n";
    Ok(text)
}

type Reports = [(String, Report)];
/// The point that a measurement is in a plot, if any.
type Point<'a> = &'a dyn Fn(&Measured, &Series) -> Option<(f64, f64)>;

/// Those for which there is something to see.
fn plots(reports: &Reports) -> Vec<(String, Plot<'static>)> {
    let log = |name| Axis { name, logarithmic: true };
    let linear = |name| Axis { name, logarithmic: false };
    let mut plots = Vec::new();
    let mut add = |title: String, axes: [Axis<'static>; 2], lines: Vec<Line>| {
        if !lines.is_empty() {
            plots.push((title, Plot { x: axes[0], y: axes[1], lines }));
        }
    };
    for wait in ["blocking", "poll", "epoll"] {
        for placement in ["cores", "one-core", "unpinned"] {
            let lines = lines(reports, &|measured, series| {
                let size = match measured.parts()[..] {
                    ["ping-pong", size, how, place] if (how, place) == (wait, placement) => size,
                    _ => return None,
                };
                Some((size.parse().ok()?, micros(&series.times)?))
            });
            let axes = [log("bytes of a message"), log("median round trip, µs")];
            add(format!("Latency against size: {wait}, {placement}"), axes, lines);
        }
    }
    for placement in ["cores", "one-core", "unpinned"] {
        let lines = lines(reports, &|measured, series| {
            let connections = match measured.parts()[..] {
                ["ping-pong", "64", "epoll", place] if place == placement => "1",
                ["ping-pong", "64", how, place] if place == placement => how.strip_prefix("epoll-")?,
                _ => return None,
            };
            Some((connections.parse().ok()?, series.median?))
        });
        let axes = [log("connections in one epoll set"), log("round trips a second")];
        add(format!("Throughput against connections: 64 B, {placement}"), axes, lines);
    }
    let cpu = lines(reports, &|measured, series| {
        measured.parts().first().filter(|&&what| what == "paced")?;
        Some((series.median?, series.cpu_seconds_per_million?))
    });
    let axes = [log("round trips a second, as many as asked for"), log("CPU s of a million, both sides")];
    add("CPU time against rate: 64 B".to_owned(), axes, cpu);
    if let Some((_, report)) = reports.first() {
        let timed =
            |measured: &&Measured| measured.transports.values().any(|series| !series.times.0.is_empty());
        for measured in report.results.iter().filter(timed).filter(|measured| measured.is_small()) {
            let axes = [log("µs"), linear("share of the round trips that took at most so long")];
            let title = format!("How long round trips take: {}", measured.name);
            add(title, axes, distributions(reports, &measured.name));
        }
    }
    plots
}

/// A line for each transport of each report, of two points and more.
fn lines(reports: &Reports, point: Point<'_>) -> Vec<Line> {
    each(reports, |report, transport| {
        let points = report.results.iter().filter_map(|one| point(one, one.transports.get(transport)?));
        let mut points: Vec<_> = points.filter(|(x, y)| *x > 0.0 && *y > 0.0).collect();
        points.sort_by(|a, b| a.0.total_cmp(&b.0));
        (points.len() > 1).then_some((points, true))
    })
}

fn distributions(reports: &Reports, name: &str) -> Vec<Line> {
    each(reports, |report, transport| {
        let measured = report.results.iter().find(|measured| measured.name == name)?;
        let times = &measured.transports.get(transport)?.times;
        let points: Vec<_> =
            times.cumulated().into_iter().map(|(time, share)| (time as f64 / 1000.0, share)).collect();
        (!points.is_empty()).then_some((points, false))
    })
}

fn each(reports: &Reports, points: impl Fn(&Report, &str) -> Option<(Vec<(f64, f64)>, bool)>) -> Vec<Line> {
    let mut lines = Vec::new();
    for (index, (title, report)) in reports.iter().enumerate() {
        for (transport, name, colours) in SHOWN {
            if let Some((points, marked)) = points(report, transport) {
                let name = if title.is_empty() { name.to_owned() } else { format!("{name}, {title}") };
                lines.push(Line { name, colour: colours[index.min(1)], faint: index > 0, points, marked });
            }
        }
    }
    lines
}

impl Measured {
    fn parts(&self) -> Vec<&str> {
        self.name.split('/').collect()
    }

    /// Of those a distribution is worth a plot.
    fn is_small(&self) -> bool {
        matches!(self.parts()[..], ["ping-pong", "64", ..])
    }
}

fn micros(times: &Times) -> Option<f64> {
    Some(times.quantile(0.5)?.as_nanos() as f64 / 1000.0)
}

/// Tables and paragraphs, which is all that our Markdown has; and `**`.
fn from_markdown(markdown: &str) -> String {
    let mut text = String::from("<h2>All figures</h2>\n");
    let mut in_table = false;
    for line in markdown.lines().map(str::trim).filter(|line| !line.is_empty()) {
        let is_row = line.starts_with('|');
        if is_row != in_table {
            text += if is_row { "<table>\n" } else { "</table>\n" };
        }
        in_table = is_row;
        if !is_row {
            put(&mut text, format_args!("<p>{}</p>", escape(&line.replace("**", ""))));
        } else if line.chars().any(|char| !matches!(char, '|' | '-' | ':' | ' ')) {
            let cell = |cell: &str| format!("<td>{}</td>", escape(&cell.trim().replace("**", "")));
            let cells: String = line.trim_matches('|').split('|').map(cell).collect();
            put(&mut text, format_args!("<tr>{cells}</tr>"));
        }
    }
    if in_table {
        text += "</table>\n";
    }
    text
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    use serde_json::json;

    fn report() -> Value {
        let series = |median: f64| json!({"median": median, "cpu_seconds_per_million": 2.0, "times": [[500, 3], [9000, 1]]});
        let result =
            |name: &str| json!({"name": name, "transports": {"tcp": series(10.0), "thallus": series(20.0)}});
        let names = [
            "ping-pong/64/blocking/cores",
            "ping-pong/4096/blocking/cores",
            "ping-pong/64/epoll/cores",
            "ping-pong/64/epoll-50/cores",
            "paced/64/100-per-second/unpinned",
            "paced/64/1000-per-second/unpinned",
        ];
        json!({"results": names.map(result), "remark": "</script>"})
    }

    #[test]
    fn each_kind_of_plot_is_on_the_page() {
        let report = report();
        let page = html(
            "| a | b |\n|---|--:|\n| 1 | **2** |\n\nFAILED: <x>",
            &[Titled { title: "", report: &report }],
        )
        .unwrap();
        for wanted in [
            "<h2>Latency against size: blocking, cores</h2>",
            "<h2>Throughput against connections: 64 B, cores</h2>",
            "<h2>CPU time against rate: 64 B</h2>",
            "<h2>How long round trips take: ping-pong/64/epoll-50/cores</h2>",
            "<tr><td>1</td><td>2</td></tr>\n</table>",
            "<p>FAILED: &lt;x&gt;</p>",
        ] {
            assert!(page.contains(wanted), "{wanted}: {page}");
        }
        // One size is no line.
        assert!(!page.contains("Latency against size: epoll"), "{page}");
        assert_eq!(page.matches("</script>").count(), 1);
    }

    #[test]
    fn the_page_has_the_report_in_it() {
        let report = report();
        let page = html("", &[Titled { title: "", report: &report }]).unwrap();
        let json =
            page.split_once("application/json\" title=\"\">").unwrap().1.split_once("</script>").unwrap().0;
        assert_eq!(serde_json::from_str::<Value>(json).unwrap(), report);
    }

    #[test]
    fn two_reports_are_beside_each_other() {
        let report = report();
        let pair = [Titled { title: "new", report: &report }, Titled { title: "old", report: &report }];
        let page = html("", &pair).unwrap();
        assert!(page.contains("Thallus, new") && page.contains("Thallus, old"), "{page}");
    }

    #[test]
    fn a_report_of_another_form_is_refused() {
        assert!(html("", &[Titled { title: "", report: &json!({}) }]).is_err());
    }
}
