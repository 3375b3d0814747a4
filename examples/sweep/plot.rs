//! The rows as a drawing: throughput against sequence length, the measured peak above it. In decode both are of memory.

use std::collections::BTreeMap;

use plotters::prelude::*;

use crate::args::Mode;
use crate::report::Row;

const SIZE: (u32, u32) = (960, 560);
/// Right of the lines, for their names.
const NAMES_WIDTH: u32 = 170;
/// Between names, in pixels: lines that end close together have theirs pushed apart.
const NAME_HEIGHT: i32 = 17;
const LIMIT_COLOR: RGBColor = RGBColor(90, 90, 90);
/// Okabe and Ito's, which the colour-blind tell apart.
const COLORS: [RGBColor; 6] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
];

/// A line of the drawing.
struct Line {
    name: String,
    color: RGBColor,
    is_dashed: bool,
    /// (q_len, GFLOP/s) or, in decode, (kv_len, GB/s), ascending.
    points: Vec<(f64, f64)>,
}

/// An SVG document of rows that differ in `head_dim` and lengths alone. `title` says what they have in common.
pub fn svg(title: &str, rows: &[Row]) -> crate::Result<String> {
    crate::font::register();
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;

    let lines = lines(rows);
    let points = || lines.iter().flat_map(|line| &line.points);
    let highest = points().map(|point| point.1).fold(0.0, f64::max);
    let (first, last) = points().fold((f64::MAX, 0.0), |(min, max), point| (point.0.min(min), point.0.max(max)));
    let mut lens: Vec<f64> = points().map(|point| point.0).collect();
    lens.sort_by(f64::total_cmp);
    lens.dedup();

    let style = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
    let mut chart = ChartBuilder::on(&root)
        .caption(title, style(16))
        .margin(12)
        .margin_right(NAMES_WIDTH)
        .x_label_area_size(48)
        .y_label_area_size(64)
        .build_cartesian_2d(
            (first / 1.1..last * 1.1).log_scale().base(2.0).with_key_points(lens),
            0.0..1.08 * highest,
        )?;
    let is_decode = rows.iter().any(|row| row.mode == Mode::Decode);
    let x_desc = match rows.iter().find(|row| row.kv_len != row.q_len) {
        _ if is_decode => "keys".to_owned(),
        _ if rows.iter().any(|row| row.varlen.is_some()) => "tokens of a sequence, in the mean".to_owned(),
        Some(row) => format!("queries (of {} keys)", row.kv_len),
        None => "queries = keys".to_owned(),
    };
    let y_desc = if is_decode { "GB/s of K and V" } else { "GFLOP/s on visible scores" };
    chart
        .configure_mesh()
        .x_desc(x_desc)
        .y_desc(y_desc)
        .axis_desc_style(style(14))
        .label_style(style(13))
        .x_labels(usize::MAX)
        .x_label_formatter(&|len| format!("{len:.0}"))
        .y_label_formatter(&|rate| format!("{rate:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;

    let mut names = Vec::new();
    for line in &lines {
        let style = line.color.stroke_width(2);
        if line.is_dashed {
            chart.draw_series(DashedLineSeries::new(line.points.iter().copied(), 7, 5, style))?;
        } else {
            chart.draw_series(LineSeries::new(line.points.iter().copied(), style))?;
        }
        chart.draw_series(line.points.iter().map(|&point| Circle::new(point, 3, line.color.filled())))?;
        if let Some(end) = line.points.last() {
            let (x, y) = chart.backend_coord(end);
            names.push((line, x, y));
        }
    }
    let right = names.iter().map(|name| name.1).max().unwrap_or(0) + 14;
    let mut free = i32::MIN;
    names.sort_by_key(|name| name.2);
    for (line, _, y) in names {
        let y = y.max(free);
        free = y + NAME_HEIGHT;
        let style = ("sans-serif", 14).into_font().color(&line.color);
        root.draw(&Text::new(line.name.as_str(), (right, y - 7), style))?;
    }
    root.present()?;
    drop(chart);
    drop(root);
    Ok(svg)
}

/// The limit, then for each `head_dim` attention and, where it was measured, the baseline.
fn lines(rows: &[Row]) -> Vec<Line> {
    let mut limit = BTreeMap::new();
    let mut head_dims = Vec::new();
    let len_of = |row: &Row| if row.memory.is_some() { row.kv_len } else { row.q_len };
    for row in rows {
        let best = limit.entry(len_of(row)).or_insert(0.0f64);
        *best = best.max(row.memory.map_or(row.peak_gflops, |memory| memory.read_gbytes_per_second));
        if !head_dims.contains(&row.head_dim) {
            head_dims.push(row.head_dim);
        }
    }
    let points = limit.into_iter().map(|(len, rate)| (len as f64, rate)).collect();
    let name = if rows.iter().any(|row| row.memory.is_some()) { "read bandwidth" } else { "measured peak" };
    let mut lines = vec![Line { name: name.into(), color: LIMIT_COLOR, is_dashed: false, points }];
    for (head_dim, &color) in head_dims.into_iter().zip(COLORS.iter().cycle()) {
        let line = |name: &str, is_dashed: bool, seconds: &dyn Fn(&Row) -> Option<f64>| {
            let of_dim = rows.iter().filter(|row| row.head_dim == head_dim);
            let rate = |row: &Row| {
                let work = row.memory.map_or(row.visible_flops as f64, |memory| memory.kv_bytes as f64);
                Some((len_of(row) as f64, work / seconds(row)? / 1e9))
            };
            let mut points: Vec<_> = of_dim.filter_map(rate).collect();
            points.sort_by(|a, b| a.0.total_cmp(&b.0));
            Line { name: format!("head_dim {head_dim}{name}"), color, is_dashed, points }
        };
        lines.push(line("", false, &|row| Some(row.seconds)));
        lines.push(line(", unfused", true, &|row| row.unfused_seconds));
    }
    lines.retain(|line| !line.points.is_empty());
    lines
}
