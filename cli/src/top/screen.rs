//! The picture on the terminal.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Paragraph, Row, Table, Wrap};

use super::state::{COLUMNS, State};

/// The widest that a column gets, of what a line does not need.
const WIDEST: usize = 40;
/// What a text may be cut to for want of room.
const NARROWEST: usize = 15;
const SPACING: usize = 2;

/// What a narrow terminal does without, in this order.
const LEAST_WANTED: [&str; COLUMNS.len() - 1] = [
    "LOCAL",
    "AGE",
    "PEER",
    "SPUN",
    "PER WAIT",
    "FD",
    "WAITS/s",
    "FABRIC",
    "RECEIVED/s",
    "COMMAND",
    "SENT/s",
];

pub(super) fn draw(frame: &mut Frame<'_>, state: &mut State) {
    let area = frame.area();
    let summary = Paragraph::new(Text::from_iter(state.heading())).wrap(Wrap { trim: true });
    // As for the columns: a number that is cut is another one. Half of the terminal is the table's.
    let lines = summary.line_count(area.width).clamp(2, usize::from(area.height / 2).max(2));
    let heights = [Constraint::Length(lines as u16), Constraint::Min(1), Constraint::Length(1)];
    let [heading, table, footing] = Layout::vertical(heights).areas(area);
    frame.render_widget(summary, heading);
    frame.render_widget(Line::from(state.footing()).dim(), footing);

    let lines = state.lines();
    let wanted = std::array::from_fn(|column| {
        let cells = lines.iter().map(|line| Line::raw(&*line[column]).width());
        cells.fold(COLUMNS[column].0.len(), usize::max).min(WIDEST)
    });
    let columns = fitting(wanted, frame.area().width.into());
    let cell = |column: usize, text: &str| {
        let side = if COLUMNS[column].1 { Alignment::Right } else { Alignment::Left };
        Cell::new(Text::from(text.to_owned()).alignment(side))
    };
    let titles = columns.iter().map(|&(column, _)| cell(column, COLUMNS[column].0));
    let rows =
        lines.iter().map(|line| Row::new(columns.iter().map(|&(column, _)| cell(column, &line[column]))));
    let widths = columns.iter().map(|&(_, width)| Constraint::Length(width.try_into().unwrap_or(u16::MAX)));
    let widget = Table::new(rows, widths)
        .header(Row::new(titles).bold())
        .column_spacing(SPACING as u16)
        .row_highlight_style(Style::new().reversed());
    frame.render_stateful_widget(widget, table, &mut state.selected);
}

/// The columns that there is room for, each with its width. A number is whole or not there: one that is cut is another number.
fn fitting(wanted: [usize; COLUMNS.len()], room: usize) -> Vec<(usize, usize)> {
    let needed = |column: usize| match COLUMNS[column].1 {
        true => wanted[column],
        false => wanted[column].min(NARROWEST),
    };
    let all = |columns: &[usize]| {
        columns.iter().map(|&column| needed(column)).sum::<usize>() + SPACING * (columns.len() - 1)
    };
    let mut columns: Vec<usize> = (0..COLUMNS.len()).collect();
    for title in LEAST_WANTED {
        if all(&columns) <= room {
            break;
        }
        columns.retain(|&column| COLUMNS[column].0 != title);
    }
    let mut spare = room.saturating_sub(all(&columns));
    let widths = columns.into_iter().map(|column| {
        let more = (wanted[column] - needed(column)).min(spare);
        spare -= more;
        (column, needed(column) + more)
    });
    widths.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    use crate::top::state::tests::state;

    /// What is on a terminal of so many columns and enough lines.
    fn screen(width: u16) -> Vec<String> {
        let height = 60;
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, &mut state())).unwrap();
        let buffer = terminal.backend().buffer();
        (0..height).map(|y| (0..width).map(|x| buffer[(x, y)].symbol()).collect()).collect()
    }

    #[test]
    fn a_narrow_terminal_shows_all_of_the_heading() {
        let words = |lines: &[String]| lines.join(" ").split_whitespace().collect::<Vec<_>>().join(" ");
        for width in [24, 30, 40, 80] {
            let lines = screen(width);
            let table = lines.iter().position(|line| line.starts_with("PID")).unwrap();
            assert_eq!(words(&lines[..table]), words(&state().heading()), "{width}");
        }
    }

    /// The lines of the table as words, on a terminal of so many columns.
    fn drawn(width: u16) -> Vec<Vec<String>> {
        let lines = screen(width);
        let table = lines.iter().position(|line| line.starts_with("PID")).unwrap();
        lines[table..table + 5]
            .iter()
            .map(|line| {
                line.split("  ").map(str::trim).filter(|cell| !cell.is_empty()).map(str::to_owned).collect()
            })
            .collect()
    }

    #[test]
    fn a_narrow_terminal_shows_fewer_columns_and_no_number_without_its_first_digits() {
        let titles = COLUMNS.map(|(title, _)| title);
        assert_eq!(drawn(200)[0], titles);
        assert!(LEAST_WANTED.iter().all(|title| titles.contains(title)));
        let [wide, narrow] = [drawn(200), drawn(80)];
        let expected = ["PID", "COMMAND", "FD", "FABRIC", "SENT/s", "RECEIVED/s", "WAITS/s", "PER WAIT"];
        assert_eq!(narrow[0], expected);
        for width in 4..=140 {
            for (line, whole) in drawn(width).iter().zip(&wide) {
                for (title, cell) in drawn(width)[0].iter().zip(line) {
                    let column = titles.iter().position(|other| other == title).unwrap();
                    assert!(!COLUMNS[column].1 || *cell == whole[column], "{width}: {cell} of {whole:?}");
                }
            }
        }
        assert_eq!(
            drawn(20),
            [["PID", "SENT/s"], ["9", "2.0 KiB"], ["7", "10 B"], ["5", "0 B"], ["6", "0 B"]]
        );
    }
}
