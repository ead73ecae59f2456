//! The text of a report: parts with labelled lines, aligned.

use std::fmt::Write as _;

enum Line {
    Part(String),
    Fact(String, String),
    Problem(String, String),
}

/// Lines to be shown.
#[derive(Default)]
pub(super) struct Sheet {
    lines: Vec<Line>,
}

impl Sheet {
    /// Begins a part.
    pub(super) fn part(&mut self, title: &str) {
        self.lines.push(Line::Part(title.to_owned()));
    }

    /// A labelled line.
    pub(super) fn fact(&mut self, label: &str, value: impl Into<String>) {
        self.lines.push(Line::Fact(label.to_owned(), value.into()));
    }

    /// A problem, and its remedy below it.
    pub(super) fn problem(&mut self, problem: &str, remedy: &str) {
        self.lines.push(Line::Problem(problem.to_owned(), remedy.to_owned()));
    }

    /// All of it.
    pub(super) fn text(&self) -> String {
        let labels = self.lines.iter().filter_map(|line| match line {
            Line::Fact(label, _) => Some(label.chars().count()),
            _ => None,
        });
        let width = labels.max().unwrap_or(0);
        let mut text = String::new();
        for line in &self.lines {
            // Writing to a string can't fail.
            let _ = match line {
                Line::Part(title) => {
                    let gap = if text.is_empty() { "" } else { "\n" };
                    writeln!(text, "{gap}{title}")
                }
                Line::Fact(label, value) => writeln!(text, "  {label:width$}  {value}"),
                Line::Problem(problem, remedy) => {
                    writeln!(text, "  problem: {problem}\n  remedy:  {remedy}")
                }
            };
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_aligned_and_a_remedy_follows_its_problem() {
        let mut sheet = Sheet::default();
        sheet.part("one");
        sheet.fact("a", "1");
        sheet.problem("no b", "buy b");
        sheet.part("two");
        sheet.fact("long", "2");
        let text = "one\n  a     1\n  problem: no b\n  remedy:  buy b\n\ntwo\n  long  2\n";
        assert_eq!(sheet.text(), text);
    }
}
