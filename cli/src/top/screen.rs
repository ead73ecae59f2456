//! The picture on the terminal.

use ratatui::Frame;
use ratatui::layout::{Alignment, Constraint, Layout};
use ratatui::style::{Style, Stylize};
use ratatui::text::{Line, Text};
use ratatui::widgets::{Cell, Row, Table};

use super::state::{COLUMNS, State};

/// The widest that a column gets, of what a line does not need.
const WIDEST: u16 = 40;

pub(super) fn draw(frame: &mut Frame<'_>, state: &mut State) {
    let [heading, table, footing] =
        Layout::vertical([Constraint::Length(2), Constraint::Min(1), Constraint::Length(1)])
            .areas(frame.area());
    frame.render_widget(Text::from_iter(state.heading()), heading);
    frame.render_widget(Line::from(state.footing()).dim(), footing);

    let lines = state.lines();
    let widths = (0..COLUMNS.len()).map(|column| {
        let cells = lines.iter().map(|line| line[column].chars().count());
        let title = COLUMNS[column].0.chars().count();
        Constraint::Length(cells.fold(title, usize::max).try_into().unwrap_or(WIDEST).min(WIDEST))
    });
    let cell = |column: usize, text: String| {
        let side = if COLUMNS[column].1 { Alignment::Right } else { Alignment::Left };
        Cell::new(Text::from(text).alignment(side))
    };
    let titles = COLUMNS.iter().enumerate().map(|(column, (title, _))| cell(column, (*title).to_owned()));
    let rows = lines
        .iter()
        .map(|line| Row::new(line.iter().enumerate().map(|(column, text)| cell(column, text.clone()))));
    let widget = Table::new(rows, widths.collect::<Vec<_>>())
        .header(Row::new(titles).bold())
        .column_spacing(2)
        .row_highlight_style(Style::new().reversed());
    frame.render_stateful_widget(widget, table, &mut state.selected);
}
