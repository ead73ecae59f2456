//! Plots of lines, as elements of HTML.

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::coord::ranged1d::{AsRangedCoord, ValueFormatter};
use plotters::prelude::*;

const SIZE: (u32, u32) = (760, 380);

/// Lines over two axes.
#[derive(Debug)]
pub(super) struct Plot<'a> {
    pub(super) x: Axis<'a>,
    pub(super) y: Axis<'a>,
    pub(super) lines: Vec<Line>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct Axis<'a> {
    /// What it measures, and the unit.
    pub(super) name: &'a str,
    pub(super) logarithmic: bool,
}

#[derive(Debug, Clone)]
pub(super) struct Line {
    pub(super) name: String,
    pub(super) colour: RGBColor,
    /// Thinner than the others, as something to compare with.
    pub(super) faint: bool,
    /// Points of which no coordinate is negative; none is zero on a logarithmic axis.
    pub(super) points: Vec<(f64, f64)>,
    /// Whether the points are worth a mark each.
    pub(super) marked: bool,
}

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Plot<'_> {
    /// The plot as an element of HTML.
    ///
    /// # Errors
    /// It can't be drawn.
    pub(super) fn svg(&self) -> anyhow::Result<String> {
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
            let drawn = self.draw(&area);
            drawn.and_then(|()| Ok(area.present()?)).map_err(|error| anyhow!("plot: {error}"))?;
        }
        Ok(text)
    }

    fn draw(&self, area: &Area<'_>) -> Drawn {
        let ends = |axis: Axis<'_>, of: fn(&(f64, f64)) -> f64| {
            let values = || self.lines.iter().flat_map(|line| &line.points).map(of);
            let (low, high) = (values().fold(f64::INFINITY, f64::min), values().fold(0.0, f64::max));
            match axis.logarithmic {
                true if low < high => low * 0.85..high * 1.18,
                true => low * 0.5..high * 2.0,
                false => 0.0..high * 1.05,
            }
        };
        let (x, y) = (ends(self.x, |point| point.0), ends(self.y, |point| point.1));
        match (self.x.logarithmic, self.y.logarithmic) {
            (true, true) => self.draw_on(area, x.log_scale(), y.log_scale()),
            (true, false) => self.draw_on(area, x.log_scale(), y),
            (false, true) => self.draw_on(area, x, y.log_scale()),
            (false, false) => self.draw_on(area, x, y),
        }
    }

    fn draw_on<X, Y>(&self, area: &Area<'_>, x: X, y: Y) -> Drawn
    where
        X: AsRangedCoord<Value = f64>,
        Y: AsRangedCoord<Value = f64>,
        X::CoordDescType: ValueFormatter<f64>,
        Y::CoordDescType: ValueFormatter<f64>,
    {
        let mut builder = ChartBuilder::on(area);
        let mut chart =
            builder.margin(12).x_label_area_size(40).y_label_area_size(64).build_cartesian_2d(x, y)?;
        let mut mesh = chart.configure_mesh();
        mesh.x_desc(self.x.name).y_desc(self.y.name);
        mesh.x_label_formatter(&|value| short(*value)).y_label_formatter(&|value| short(*value)).draw()?;
        for line in &self.lines {
            let style = line.colour.stroke_width(if line.faint { 1 } else { 2 });
            let series = LineSeries::new(line.points.iter().copied(), style);
            let series = if line.marked { series.point_size(3) } else { series };
            chart
                .draw_series(series)?
                .label(&line.name)
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], style));
        }
        let mut labels = chart.configure_series_labels();
        labels.position(SeriesLabelPosition::UpperLeft).background_style(WHITE.mix(0.8));
        labels.border_style(BLACK).draw()?;
        Ok(())
    }
}

/// `0.5`, `20`, `3k`, `1.5M`.
fn short(value: f64) -> String {
    let (value, unit) = match value {
        value if value >= 1e6 => (value / 1e6, "M"),
        value if value >= 1e3 => (value / 1e3, "k"),
        value => (value, ""),
    };
    let text = format!("{value:.2}");
    format!("{}{unit}", text.trim_end_matches('0').trim_end_matches('.'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plot(logarithmic: bool, points: Vec<(f64, f64)>) -> String {
        let axis = Axis { name: "bytes", logarithmic };
        let name = "TCP & <more>".to_owned();
        let line = Line { name, colour: BLACK, faint: false, points, marked: true };
        Plot { x: axis, y: axis, lines: vec![line] }.svg().unwrap()
    }

    #[test]
    fn a_plot_has_its_lines_and_names() {
        for logarithmic in [false, true] {
            let text = plot(logarithmic, vec![(1.0, 2.0), (1000.0, 3e6)]);
            assert!(text.contains("<svg") && text.contains("polyline") && text.contains("bytes"), "{text}");
            assert!(text.contains("TCP &amp; &lt;more&gt;"), "{text}");
        }
    }

    #[test]
    fn one_point_makes_a_plot_too() {
        assert!(plot(true, vec![(5.0, 5.0)]).contains("<circle"));
    }

    #[test]
    fn labels_are_short() {
        assert_eq!([0.5, 20.0, 3000.0, 1_500_000.0].map(short), ["0.5", "20", "3k", "1.5M"]);
    }
}
