//! One plot for each figure.

use anyhow::anyhow;
use plotters::coord::Shift;
use plotters::prelude::*;

use super::plan::{FLIGHT, Figure, OURS, RPC, Way, way};
use super::results::Measured;

const SIZE: (u32, u32) = (900, 420);

/// The ways that a plot shows, with their colours; the table has all.
const SHOWN: [(Way, RGBColor); 6] = [
    (RPC, RGBColor(150, 150, 150)),
    (way("ipc", false, false), RGBColor(90, 150, 90)),
    (FLIGHT, RGBColor(214, 120, 30)),
    (way("scatter", false, false), RGBColor(110, 160, 220)),
    (way("scatter", false, true), RGBColor(70, 110, 200)),
    (OURS, RGBColor(20, 60, 160)),
];
const MEMCPY: RGBColor = RGBColor(200, 40, 40);

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

/// The figure as an element of HTML.
///
/// # Errors
/// It can't be drawn.
pub(super) fn svg(figure: Figure, results: &[Measured]) -> anyhow::Result<String> {
    let results: Vec<_> = results.iter().filter(|measured| measured.case.figure == figure).collect();
    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, SIZE).into_drawing_area();
        let drawn = match figure {
            Figure::Size => sizes(&area, &results),
            _ => rates(&area, &results, figure != Figure::EndToEnd),
        };
        drawn.and_then(|()| Ok(area.present()?)).map_err(|error| anyhow!("plot: {error}"))?;
    }
    Ok(text)
}

type Drawn = Result<(), Box<dyn std::error::Error>>;

/// GB/s by point, at equal distances.
fn rates(area: &Area<'_>, results: &[&Measured], memcpy: bool) -> Drawn {
    let of_memcpy = |measured: &Measured| measured.memcpy_rate().filter(|_| memcpy);
    let all = results.iter().flat_map(|measured| {
        SHOWN.iter().filter_map(|(way, _)| measured.rate(*way)).chain(of_memcpy(measured))
    });
    let most = all.fold(0.0, f64::max) / 1e9 * 1.1;
    let last = results.len().saturating_sub(1).max(1) as f64;
    let mut chart = ChartBuilder::on(area)
        .margin(12)
        .x_label_area_size(36)
        .y_label_area_size(56)
        .build_cartesian_2d(-0.2..last + 0.2, 0.0..most)?;
    let label = |place: &f64| {
        let at_point = (place - place.round()).abs() < 1e-6 && *place >= 0.0;
        let measured = results.get(*place as usize).filter(|_| at_point);
        measured.map_or_else(String::new, |measured| measured.case.point.to_string())
    };
    chart
        .configure_mesh()
        .disable_x_mesh()
        .x_labels(results.len() * 5)
        .x_label_formatter(&label)
        .y_desc("GB/s")
        .draw()?;
    let places = |rate: &dyn Fn(&Measured) -> Option<f64>| -> Vec<(f64, f64)> {
        let point = |(place, measured): (usize, &&Measured)| Some((place as f64, rate(measured)? / 1e9));
        results.iter().enumerate().filter_map(point).collect()
    };
    for (way, colour) in SHOWN {
        let points = places(&|measured| measured.rate(way));
        let line = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
        legend(chart.draw_series(line)?, way.name(), colour);
    }
    if memcpy {
        let points = places(&of_memcpy);
        let line = LineSeries::new(points, MEMCPY.stroke_width(1)).point_size(2);
        legend(chart.draw_series(line)?, "memcpy of the same bytes".to_owned(), MEMCPY);
    }
    chart.configure_series_labels().background_style(WHITE.mix(0.8)).border_style(BLACK).draw()?;
    Ok(())
}

/// Milliseconds by rows, both logarithmic.
fn sizes(area: &Area<'_>, results: &[&Measured]) -> Drawn {
    let point = |measured: &Measured, way| {
        Some(((measured.rows as f64).max(1.0), measured.seconds(way)?.median * 1e3))
    };
    let all: Vec<_> = results
        .iter()
        .flat_map(|measured| SHOWN.iter().filter_map(|(way, _)| point(measured, *way)))
        .collect();
    let ends = |values: &mut dyn Iterator<Item = f64>| {
        values.fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)))
    };
    let (fewest, most) = ends(&mut all.iter().map(|one| one.0));
    let (shortest, longest) = ends(&mut all.iter().map(|one| one.1));
    let mut chart =
        ChartBuilder::on(area).margin(12).x_label_area_size(40).y_label_area_size(64).build_cartesian_2d(
            (fewest * 0.8..most * 1.25).log_scale(),
            (shortest * 0.8..longest * 1.25).log_scale(),
        )?;
    let short = |value: &f64| format!("{value:.3}").trim_end_matches('0').trim_end_matches('.').to_owned();
    let mut mesh = chart.configure_mesh();
    mesh.x_desc("rows").y_desc("ms").x_label_formatter(&short).y_label_formatter(&short).draw()?;
    for (way, colour) in SHOWN {
        let points = results.iter().filter_map(|measured| point(measured, way)).collect::<Vec<_>>();
        let line = LineSeries::new(points, colour.stroke_width(2)).point_size(3);
        legend(chart.draw_series(line)?, way.name(), colour);
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::UpperLeft)
        .background_style(WHITE.mix(0.8))
        .border_style(BLACK)
        .draw()?;
    Ok(())
}

fn legend<'a, 'b>(
    series: &mut plotters::chart::SeriesAnno<'a, SVGBackend<'b>>,
    name: String,
    colour: RGBColor,
) {
    series.label(name).legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], colour.stroke_width(2)));
}
