//! The model as a drawing: efficiency against nodes, a panel for each network.

use plotters::coord::Shift;
use plotters::prelude::*;

use crate::Result;
use crate::model::{Series, named};

const SIZE: (u32, u32) = (1100, 460);
/// Okabe and Ito's, which the colour-blind tell apart.
const COLORS: [RGBColor; 4] =
    [RGBColor(0, 114, 178), RGBColor(213, 94, 0), RGBColor(0, 158, 115), RGBColor(204, 121, 167)];

/// An SVG document. Points where the network is waited for are hollow.
pub fn svg(title: &str, all: &[Series]) -> Result<String> {
    let mut svg = String::new();
    let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
    root.fill(&WHITE)?;
    let below_title = root.titled(title, ("sans-serif", 17))?;
    let mut networks: Vec<f64> = all.iter().map(|series| series.gbits).collect();
    networks.dedup();
    for (area, gbits) in below_title.split_evenly((1, networks.len())).iter().zip(networks) {
        let lines: Vec<&Series> = all.iter().filter(|series| series.gbits == gbits).collect();
        panel(area, gbits, &lines)?;
    }
    root.present()?;
    drop(below_title);
    drop(root);
    Ok(svg)
}

fn panel(area: &DrawingArea<SVGBackend<'_>, Shift>, gbits: f64, lines: &[&Series]) -> Result<()> {
    let mut nodes: Vec<f64> = lines.iter().flat_map(|line| &line.points).map(|point| point.nodes as f64).collect();
    nodes.sort_by(f64::total_cmp);
    nodes.dedup();
    let most = nodes.iter().copied().fold(1.0, f64::max);
    let style = |size: u32| ("sans-serif", size).into_font().color(&BLACK);
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{gbits} Gbit/s (hollow: waits for the network)"), style(14))
        .margin(10)
        .x_label_area_size(42)
        .y_label_area_size(52)
        .build_cartesian_2d((0.9..most * 1.1).log_scale().base(2.0).with_key_points(nodes), 0.0..1.05)?;
    chart
        .configure_mesh()
        .x_desc("nodes")
        .y_desc("efficiency")
        .axis_desc_style(style(13))
        .label_style(style(12))
        .x_labels(usize::MAX)
        .x_label_formatter(&|nodes| format!("{nodes:.0}"))
        .light_line_style(TRANSPARENT)
        .draw()?;
    for (line, &color) in lines.iter().zip(COLORS.iter().cycle()) {
        let points = || line.points.iter().map(|point| (point.nodes as f64, point.efficiency));
        chart
            .draw_series(LineSeries::new(points(), color.stroke_width(2)))?
            .label(format!("T = {}", named(line.seq_len)))
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 18, y)], color.stroke_width(2)));
        chart.draw_series(line.points.iter().map(|point| {
            let fill = if point.is_network_bound { WHITE.filled() } else { color.filled() };
            EmptyElement::at((point.nodes as f64, point.efficiency))
                + Circle::new((0, 0), 4, fill)
                + Circle::new((0, 0), 4, color.stroke_width(1))
        }))?;
    }
    chart
        .configure_series_labels()
        .position(SeriesLabelPosition::LowerLeft)
        .label_font(style(13))
        .background_style(WHITE.mix(0.8))
        .draw()?;
    Ok(())
}
