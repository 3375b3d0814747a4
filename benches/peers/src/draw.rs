//! The results as a drawing: a panel for each series, the machine's limit dashed above the peers.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::Result;
use crate::options::Part;
use crate::report::Report;
use crate::table::Series;

const PANEL: (u32, u32) = (760, 380);
const COLUMNS: usize = 2;
/// Right of the lines, for their names.
const NAMES_WIDTH: u32 = 210;
/// Between names, in pixels: lines that end close together have theirs pushed apart.
const NAME_HEIGHT: i32 = 15;
const LIMIT_COLOR: RGBColor = RGBColor(90, 90, 90);
const OUR_COLOR: RGBColor = RGBColor(0, 0, 0);
/// Okabe and Ito's, which the colour-blind tell apart, and darker ones behind them.
const COLORS: [RGBColor; 10] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(140, 86, 75),
    RGBColor(120, 120, 40),
    RGBColor(110, 60, 150),
    RGBColor(160, 30, 60),
];

struct Line<'a> {
    name: &'a str,
    color: RGBColor,
    is_dashed: bool,
    width: u32,
    /// Ascending.
    points: Vec<(f64, f64)>,
}

/// An SVG document.
pub fn svg(report: &Report) -> Result<String> {
    crate::font::register();
    // A single length is no line.
    let all: Vec<Series<'_>> = Series::all(report).into_iter().filter(|series| series.xs().len() > 1).collect();
    let mut peers: Vec<&str> = Vec::new();
    for peer in all.iter().flat_map(|series| series.peers()) {
        if !peers.contains(&peer) {
            peers.push(peer);
        }
    }
    let rows = all.len().div_ceil(COLUMNS).max(1);
    let size = (PANEL.0 * COLUMNS as u32, PANEL.1 * rows as u32 + 40);
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
    root.fill(&WHITE)?;
    let machine = &report.machine;
    let title = format!("{}, {} cores, {}, {}", machine.cpu, machine.cores, machine.instruction_set, machine.date);
    let panels = root.titled(&title, ("sans-serif", 18))?;
    for (panel, series) in panels.split_evenly((rows, COLUMNS)).iter().zip(&all) {
        draw(panel, series, &peers)?;
    }
    root.present()?;
    drop((panels, root));
    Ok(svg)
}

fn draw(root: &DrawingArea<SVGBackend<'_>, Shift>, series: &Series<'_>, peers: &[&str]) -> Result<()> {
    let lines = lines(series, peers);
    let highest = lines.iter().flat_map(|line| &line.points).map(|point| point.1).fold(0.0, f64::max);
    let xs = series.xs();
    let (first, last) = (xs[0] as f64, xs[xs.len() - 1] as f64);
    let style = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
    let mut chart = ChartBuilder::on(root)
        .caption(series.title, style(14))
        .margin(8)
        .margin_right(NAMES_WIDTH)
        .x_label_area_size(40)
        .y_label_area_size(56)
        .build_cartesian_2d(
            (first / 1.1..last * 1.1).log_scale().base(2.0).with_key_points(xs.iter().map(|&x| x as f64).collect()),
            0.0..1.08 * highest,
        )?;
    let (x_desc, y_desc) = match series.part {
        Part::Decode => ("keys", "GB/s of K and V"),
        Part::Window => ("window, keys", "GFLOP/s on visible scores"),
        Part::Batch => ("batch", "GFLOP/s on visible scores"),
        Part::Prefill | Part::Memory => ("queries = keys", "GFLOP/s on visible scores"),
    };
    chart
        .configure_mesh()
        .x_desc(x_desc)
        .y_desc(y_desc)
        .axis_desc_style(style(13))
        .label_style(style(11))
        .x_labels(usize::MAX)
        .x_label_formatter(&|x| format!("{x:.0}"))
        .y_label_formatter(&|rate| format!("{rate:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    let mut names = Vec::new();
    for line in &lines {
        let style = line.color.stroke_width(line.width);
        if line.is_dashed {
            chart.draw_series(DashedLineSeries::new(line.points.iter().copied(), 7, 5, style))?;
        } else {
            chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        }
        chart.draw_series(line.points.iter().map(|&point| Circle::new(point, 2, line.color.filled())))?;
        if let Some(end) = line.points.last() {
            let (x, y) = chart.backend_coord(end);
            let (left, top) = root.get_base_pixel();
            names.push((line, x - left, y - top));
        }
    }
    let right = names.iter().map(|name| name.1).max().unwrap_or(0) + 12;
    // Names that are pushed down must not leave the panel.
    let mut free = i32::MIN;
    names.sort_by_key(|name| name.2);
    let lowest = PANEL.1 as i32 - 60;
    let count = names.len() as i32;
    for (i, (line, _, y)) in names.into_iter().enumerate() {
        let y = y.min(lowest - (count - 1 - i as i32) * NAME_HEIGHT).max(free);
        free = y + NAME_HEIGHT;
        root.draw(&Text::new(line.name.to_owned(), (right, y - 6), ("sans-serif", 12).into_font().color(&line.color)))?;
    }
    Ok(())
}

/// The limit, then everyone. A peer has the same colour in all panels.
fn lines<'a>(series: &Series<'a>, peers: &[&'a str]) -> Vec<Line<'a>> {
    let limit = series.xs().into_iter().filter_map(|x| {
        let row = series.rows.iter().find(|row| row.x() == x)?;
        Some((x as f64, row.limit()))
    });
    let name = if series.part == Part::Decode { "read bandwidth" } else { "measured peak" };
    let mut lines = vec![Line { name, color: LIMIT_COLOR, is_dashed: true, width: 1, points: limit.collect() }];
    let mut colors = COLORS.iter().cycle();
    for peer in peers {
        let rows: Vec<_> = series.xs().into_iter().filter_map(|x| series.row(peer, x)).collect();
        let is_ours = peer.starts_with(crate::peers::our_name(crate::args::Layout::Bhsd));
        let is_dashed = peer.ends_with("token-major");
        let color = if is_ours { OUR_COLOR } else { colors.next().copied().unwrap_or(LIMIT_COLOR) };
        let points: Vec<_> = rows.iter().map(|row| (row.x() as f64, row.rate())).collect();
        if !points.is_empty() {
            lines.push(Line { name: peer, color, is_dashed, width: if is_ours { 3 } else { 2 }, points });
        }
    }
    lines
}
